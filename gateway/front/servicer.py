"""InferenceService: the public API over gRPC.

Turns calls into values, values into messages, and writes them in order; everything else is in
`gateway/relay/generation.py`. Typed errors become statuses in the server's interceptors.
"""

import asyncio
from typing import TypeAlias

import grpc.aio
import structlog

from engine.clock import Clock
from engine.request_checks import check_count, check_token_ids
from gateway.front.convert import (
    chunk_to_proto,
    completion_to_proto,
    started_to_proto,
    to_call,
    to_request_ids,
    to_tokenize_prompt,
)
from gateway.front.server_info import ServerInfo
from gateway.relay.generation import Generation
from gateway.relay.response import Completion, Started, TokenChunk
from gateway.relay.tokenizer import TokenizerService
from kvrelay.errors import DeadlineExceeded, InvalidRequest, RequestCancelled
from kvrelay.v1 import inference_service_pb2 as inference_pb2
from kvrelay.v1 import inference_service_pb2_grpc

_log = structlog.get_logger(__name__)

SERVICE_NAME = "kvrelay.v1.InferenceService"
MAX_DETOKENIZE_TOKENS = 1 << 20
"""Longest list that Detokenize takes."""

_DEADLINE_GRACE_S = 1.0
"""How long gRPC gets to end a call whose deadline has passed, before the gateway does."""

GenerateContext: TypeAlias = grpc.aio.ServicerContext[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]


class InferenceServicer(inference_service_pb2_grpc.InferenceServiceServicer):
    """Serves the public API. One event loop."""

    def __init__(
        self,
        generation: Generation,
        tokenizer: TokenizerService,
        info: ServerInfo,
        *,
        clock: Clock,
        write_timeout_s: float,
    ) -> None:
        self._generation = generation
        self._tokenizer = tokenizer
        self._info = info
        self._clock = clock
        self._write_timeout_s = write_timeout_s

    async def Generate(self, request: inference_pb2.GenerateRequest, context: GenerateContext) -> None:
        """Stream one request's completions; ends the call with a typed status where it cannot finish it.

        When the client goes away, gRPC cancels this coroutine, and with it everything the request holds.
        """
        time_left: float | None = context.time_remaining()
        deadline = None if time_left is None else self._clock.now() + time_left
        limits = self._generation.limits()
        call = to_call(request, limits)
        sink = _GrpcSink(context, self._write_timeout_s)
        try:
            await self._generation.run(call, limits, sink, deadline=deadline)
        except DeadlineExceeded:
            # gRPC ends the call at its deadline itself. A status of ours that meets that end half-way is an error deep
            # in the library, which then keeps the connection for ever (grpc issue 31570).
            await asyncio.sleep(_DEADLINE_GRACE_S)
            raise

    async def Tokenize(
        self,
        request: inference_pb2.TokenizeRequest,
        context: grpc.aio.ServicerContext[inference_pb2.TokenizeRequest, inference_pb2.TokenizeResponse],
    ) -> inference_pb2.TokenizeResponse:
        """Return the tokens of a text or a conversation, as Generate would see them."""
        self._generation.check_model(request.model)
        prompt = to_tokenize_prompt(request, self._generation.limits())
        return inference_pb2.TokenizeResponse(token_ids=await self._tokenizer.encode_prompt(prompt))

    async def Detokenize(
        self,
        request: inference_pb2.DetokenizeRequest,
        context: grpc.aio.ServicerContext[inference_pb2.DetokenizeRequest, inference_pb2.DetokenizeResponse],
    ) -> inference_pb2.DetokenizeResponse:
        """Return the text of tokens."""
        self._generation.check_model(request.model)
        check_count("token_ids", request.token_ids, MAX_DETOKENIZE_TOKENS)
        check_token_ids("token_ids", request.token_ids, self._generation.limits().vocab_size)
        skip_special_tokens = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        text = await self._tokenizer.decode(request.token_ids, skip_special_tokens=skip_special_tokens)
        return inference_pb2.DetokenizeResponse(text=text)

    async def Abort(
        self,
        request: inference_pb2.AbortRequest,
        context: grpc.aio.ServicerContext[inference_pb2.AbortRequest, inference_pb2.AbortResponse],
    ) -> inference_pb2.AbortResponse:
        """End running requests."""
        if not request.request_ids:
            raise InvalidRequest("request_ids", "name at least one request")
        aborted = self._generation.abort(to_request_ids(request))
        return inference_pb2.AbortResponse(aborted_request_ids=aborted)

    async def ListModels(
        self,
        request: inference_pb2.ListModelsRequest,
        context: grpc.aio.ServicerContext[inference_pb2.ListModelsRequest, inference_pb2.ListModelsResponse],
    ) -> inference_pb2.ListModelsResponse:
        """Return the models served."""
        model = self._info.model()
        summary = inference_pb2.ModelSummary(
            name=model.name,
            architecture=model.architecture,
            context_length=model.context_length,
            vocab_size=model.vocab_size,
            has_chat_template=model.has_chat_template,
        )
        return inference_pb2.ListModelsResponse(models=[summary])

    async def GetServerInfo(
        self,
        request: inference_pb2.GetServerInfoRequest,
        context: grpc.aio.ServicerContext[inference_pb2.GetServerInfoRequest, inference_pb2.GetServerInfoResponse],
    ) -> inference_pb2.GetServerInfoResponse:
        """Return what this gateway knows of its cluster."""
        cluster = self._info.cluster()
        workers = [
            inference_pb2.WorkerSummary(
                worker_id=worker.info.worker_id,
                role=worker.info.role.value,
                address=worker.info.address,
                is_connected=worker.is_connected,
                is_draining=worker.is_draining,
                num_running=worker.load.num_running,
                num_waiting=worker.load.num_waiting,
                num_free_blocks=worker.load.num_free_blocks,
                num_blocks=worker.info.num_blocks,
                transports=worker.info.transports,
                num_leases=worker.load.num_leases,
                is_stalled=worker.is_stalled,
                kernels=worker.info.kernels,
            )
            for worker in cluster.workers
        ]
        return inference_pb2.GetServerInfoResponse(
            version=cluster.version,
            workers=workers,
            num_running_requests=cluster.num_running_requests,
            num_queued_requests=cluster.num_queued_requests,
            uptime_ms=cluster.uptime_ms,
            instance_id=cluster.instance_id,
        )


class _GrpcSink:
    """Writes one call's messages in order.

    Completions of one call share the stream, and gRPC takes one write at a time. A client that stops reading makes a
    write wait for flow control, which has no limit of its own: after `timeout_s` the call is given up.
    """

    def __init__(self, context: GenerateContext, timeout_s: float) -> None:
        self._context = context
        self._timeout_s = timeout_s
        self._lock = asyncio.Lock()

    async def started(self, started: Started) -> None:
        await self._write(started_to_proto(started))

    async def chunk(self, index: int, chunk: TokenChunk) -> None:
        await self._write(chunk_to_proto(index, chunk))

    async def complete(self, index: int, completion: Completion) -> None:
        await self._write(completion_to_proto(index, completion))

    async def _write(self, message: inference_pb2.GenerateResponse) -> None:
        async with self._lock:
            timer = asyncio.timeout(self._timeout_s)
            try:
                async with timer:
                    await self._context.write(message)
            except TimeoutError:
                if not timer.expired():
                    raise
                raise RequestCancelled(f"the client has not read for {self._timeout_s:g} s") from None
