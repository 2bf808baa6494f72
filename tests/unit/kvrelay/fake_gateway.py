"""A gateway without a model: answers from a script and remembers what it was asked. Runs in threads of its own."""

import threading
from collections.abc import Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvrelay.errors import EngineError
from kvrelay.v1 import inference_service_pb2 as pb
from kvrelay.v1 import inference_service_pb2_grpc, sampling_pb2
from kvrelay.wire.status import STATUS_DETAILS_KEY, status_code, to_status

INFERENCE_SERVICE = "kvrelay.v1.InferenceService"


def answer(text: str, token_ids: Sequence[int] = (5, 6), index: int = 0) -> list[pb.GenerateResponse]:
    """One completion whose tokens arrive one at a time and share the text evenly."""
    messages = []
    step = -(-len(text) // max(1, len(token_ids)))
    for number, token_id in enumerate(token_ids):
        part = text[number * step : (number + 1) * step]
        chunk = pb.GenerateChunk(index=index, token_index=number, token_ids=[token_id], text=part)
        messages.append(pb.GenerateResponse(chunk=chunk))
    complete = pb.GenerateComplete(
        index=index,
        finish_reason=sampling_pb2.FINISH_REASON_STOP,
        matched_stop_token_id=2,
        usage=pb.Usage(prompt_tokens=4, completion_tokens=len(token_ids), cached_tokens=1),
        timings=pb.Timings(
            queue_ns=1_000_000,
            prefill_ns=2_000_000,
            transfer_ns=3_000_000,
            transfer_bytes=2048,
            first_token_ns=4_000_000,
            total_ns=9_000_000,
            transport="shm",
        ),
        prefill_worker="prefill-0",
        decode_worker="decode-0",
        num_attempts=2,
    )
    return [*messages, pb.GenerateResponse(complete=complete)]


class FakeGateway(inference_service_pb2_grpc.InferenceServiceServicer):
    """Answers `Generate` with `script`; an EngineError in it ends the stream with its status."""

    def __init__(self) -> None:
        self.script: list[pb.GenerateResponse | EngineError] = [*answer("Hello there")]
        self.requests: list[pb.GenerateRequest] = []
        self.metadata: dict[str, str | bytes] = {}
        self.waits_after: int | None = None
        """Number of messages after which the stream stands still until the client leaves."""
        self.cancelled = threading.Event()
        self.instance_id = "gateway-1"
        self.workers = [
            pb.WorkerSummary(
                worker_id="decode-0",
                role="decode",
                address="127.0.0.1:1",
                is_connected=True,
                num_running=1,
                num_free_blocks=9,
                num_blocks=10,
                num_leases=1,
                transports=["shm", "grpc"],
                kernels="native (avx2)",
            ),
            pb.WorkerSummary(
                worker_id="prefill-0",
                role="prefill",
                address="127.0.0.1:2",
                transports=["grpc"],
                kernels="torch, slow: native kernels cannot be had, no C++ compiler",
            ),
        ]

    def Generate(self, request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateResponse]:
        self.requests.append(request)
        self.metadata = dict(context.invocation_metadata())
        ended, gone = threading.Event(), threading.Event()

        def on_end() -> None:
            gone.set()
            if not ended.is_set():
                self.cancelled.set()

        context.add_callback(on_end)
        started = pb.GenerateStarted(request_id=11, seed=77, model="tiny", prompt_tokens=4)
        yield pb.GenerateResponse(started=started)
        for number, message in enumerate(self.script):
            if number == self.waits_after:
                gone.wait(20)
                return
            if isinstance(message, EngineError):
                _abort(context, message)
            else:
                yield message
        ended.set()

    def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        words = [message.content for message in request.chat.messages] or request.text.split()
        return pb.TokenizeResponse(token_ids=[len(word) for word in words])

    def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:
        return pb.DetokenizeResponse(text=f"{list(request.token_ids)} {request.skip_special_tokens}")

    def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        return pb.AbortResponse(aborted_request_ids=[each for each in request.request_ids if each == 11])

    def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        model = pb.ModelSummary(
            name="tiny", architecture="llama", context_length=512, vocab_size=100, has_chat_template=True
        )
        return pb.ListModelsResponse(models=[model])

    def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Any) -> pb.GetServerInfoResponse:
        return pb.GetServerInfoResponse(
            version="9.9",
            workers=self.workers,
            num_running_requests=1,
            uptime_ms=5000,
            instance_id=self.instance_id,
        )


def _abort(context: Any, error: EngineError) -> None:
    status = to_status(error)
    context.set_trailing_metadata(((STATUS_DETAILS_KEY, status.SerializeToString()),))
    context.abort(status_code(error), status.message)


@contextmanager
def serving(fake: FakeGateway, port: int = 0) -> Iterator[str]:
    """Serve on the loopback interface and yield the address."""
    server = grpc.server(futures.ThreadPoolExecutor(8, thread_name_prefix="asyncio_fake"))
    inference_service_pb2_grpc.add_InferenceServiceServicer_to_server(fake, server)
    health_servicer = health.HealthServicer()
    health_servicer.set(INFERENCE_SERVICE, health_pb2.HealthCheckResponse.SERVING)
    health_servicer.set("not.Ready", health_pb2.HealthCheckResponse.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        yield f"127.0.0.1:{bound}"
    finally:
        server.stop(None).wait()
