"""The Python client: `Client` for ordinary code, `AsyncClient` for asyncio. Same methods, same errors.

Owns one channel to a gateway. Failed calls raise the typed errors of `kvrelay.errors`, e.g. `InvalidRequest` with the
field's name or `CapacityError` with the time to wait. Values are in `kvrelay/results.py`.
"""

from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvrelay.channel import PUBLIC_MAX_MESSAGE_BYTES, ChannelOptions, channel_options
from kvrelay.errors import EngineError
from kvrelay.requests import (
    Message,
    SamplingOptions,
    abort_request,
    detokenize_request,
    fill,
    generate_request,
    tokenize_request,
)
from kvrelay.results import (
    Complete,
    Completion,
    CompletionCollector,
    Event,
    ModelSummary,
    ServerInfo,
    event_from_proto,
    models_from_proto,
    server_info_from_proto,
)
from kvrelay.target import parse_target, proxy_options
from kvrelay.trace_context import current_traceparent
from kvrelay.v1 import inference_service_pb2 as pb
from kvrelay.v1 import inference_service_pb2_grpc
from kvrelay.wire.status import from_rpc_error

DEFAULT_TARGET = "127.0.0.1:50051"
"""Where `kvrelay serve` listens unless told otherwise."""
INFERENCE_SERVICE = "kvrelay.v1.InferenceService"
"""Full name of the public service; the name of its readiness."""

_SERVING = health_pb2.HealthCheckResponse.SERVING


class Client:
    """A blocking client. Threads may share it.

    Example::

        from kvrelay.client import Client

        with Client("127.0.0.1:50051") as client:
            print(client.complete("The capital of France is", max_tokens=8, temperature=0).text)
            for event in client.generate(messages=[("user", "Tell me a joke.")], temperature=0.7, seed=1):
                if isinstance(event, Chunk):
                    print(event.text, end="", flush=True)

    Args:
        target: `host:port` of a gateway.

    Raises:
        InvalidRequest: The target is no address; names `target`.
    """

    def __init__(self, target: str = DEFAULT_TARGET) -> None:
        self.target = parse_target(target)
        self._channel = grpc.insecure_channel(self.target, options=_options(self.target))
        self._stub: Any = inference_service_pb2_grpc.InferenceServiceStub(self._channel)

    def close(self) -> None:
        """End running calls and close the channel."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        model: str = "",
        timeout_s: float | None = None,
        client_request_id: str = "",
        **sampling: Unpack[SamplingOptions],
    ) -> Generator[Event, None, None]:
        """Stream one request: `Started`, then `Chunk`s, and one `Complete` per completion.

        Leaving the loop or closing the iterator cancels the request on the server.

        Args:
            prompt: Text to continue.
            messages: A chat to answer, as pairs or mappings of role and content. Instead of `prompt`.
            token_ids: Tokens to continue. Instead of `prompt`.
            model: Name of the model. Empty: the only one served.
            timeout_s: Deadline for the whole request. None: none.
            client_request_id: A name for logs and traces.
            **sampling: Fields of SamplingParams: max_tokens, temperature, top_p, seed, stop, ...

        Raises:
            EngineError: At once for arguments of the wrong form; while iterating for whatever the server answers.
        """
        request = generate_request(prompt, messages, token_ids, model, client_request_id, sampling)
        return self._events(request, timeout_s)

    def _events(self, request: pb.GenerateRequest, timeout_s: float | None) -> Generator[Event, None, None]:
        ends = _EndCheck(request)
        with _typed_errors():
            call = self._stub.Generate(request, timeout=timeout_s, metadata=_metadata())
        try:
            with _typed_errors():
                for message in call:
                    yield ends.seen(event_from_proto(message))
            ends.check()
        finally:
            call.cancel()

    def complete(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        model: str = "",
        timeout_s: float | None = None,
        client_request_id: str = "",
        **sampling: Unpack[SamplingOptions],
    ) -> Completion:
        """Run `generate` to its end and return the first completion as a whole."""
        collector = CompletionCollector()
        for event in self._events(
            generate_request(prompt, messages, token_ids, model, client_request_id, sampling), timeout_s
        ):
            collector.add(event)
        return collector.result()

    def tokenize(
        self, text: str | None = None, *, messages: Sequence[Message] | None = None, model: str = ""
    ) -> list[int]:
        """Return the token ids of a text or a chat, as `generate` would take them."""
        with _typed_errors():
            return list(self._stub.Tokenize(tokenize_request(text, messages, model)).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, model: str = "") -> str:
        """Return the text of token ids."""
        request = detokenize_request(token_ids, model, skip_special_tokens=skip_special_tokens)
        with _typed_errors():
            return str(self._stub.Detokenize(request).text)

    def list_models(self) -> tuple[ModelSummary, ...]:
        """Return the models served."""
        with _typed_errors():
            return models_from_proto(self._stub.ListModels(pb.ListModelsRequest()))

    def server_info(self, timeout_s: float | None = None) -> ServerInfo:
        """Return the gateway's view of its cluster."""
        with _typed_errors():
            return server_info_from_proto(self._stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=timeout_s))

    def abort(self, *request_ids: int) -> tuple[int, ...]:
        """End running requests, named by `Started.request_id`; return which of them were running."""
        with _typed_errors():
            return tuple(self._stub.Abort(abort_request(request_ids)).aborted_request_ids)

    def is_serving(self, service: str = INFERENCE_SERVICE, timeout_s: float | None = 5.0) -> bool:
        """Whether a service is ready; "" asks only whether the process lives.

        Raises:
            EngineError: The server cannot be reached.
        """
        stub: Any = health_pb2_grpc.HealthStub(self._channel)
        try:
            response = stub.Check(_health_request(service), timeout=timeout_s)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return False
            raise from_rpc_error(error) from error
        return bool(response.status == _SERVING)


class AsyncClient:
    """A client for asyncio. Create it inside the event loop that uses it.

    Example::

        async with AsyncClient("127.0.0.1:50051") as client:
            async for event in client.generate("Once upon a time", max_tokens=64, seed=7):
                if isinstance(event, Chunk):
                    print(event.text, end="", flush=True)

    Args:
        target: `host:port` of a gateway.

    Raises:
        InvalidRequest: The target is no address; names `target`.
    """

    def __init__(self, target: str = DEFAULT_TARGET) -> None:
        self.target = parse_target(target)
        self._channel = grpc.aio.insecure_channel(self.target, options=_options(self.target))
        self._stub: Any = inference_service_pb2_grpc.InferenceServiceStub(self._channel)

    async def close(self) -> None:
        """End running calls and close the channel."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        model: str = "",
        timeout_s: float | None = None,
        client_request_id: str = "",
        **sampling: Unpack[SamplingOptions],
    ) -> AsyncGenerator[Event, None]:
        """Stream one request; see `Client.generate`. Closing the iterator cancels the request on the server."""
        request = generate_request(prompt, messages, token_ids, model, client_request_id, sampling)
        return self._events(request, timeout_s)

    async def _events(self, request: pb.GenerateRequest, timeout_s: float | None) -> AsyncGenerator[Event, None]:
        ends = _EndCheck(request)
        call = self._stub.Generate(request, timeout=timeout_s, metadata=_metadata())
        try:
            with _typed_errors():
                async for message in call:
                    yield ends.seen(event_from_proto(message))
            ends.check()
        finally:
            call.cancel()

    async def complete(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        token_ids: Sequence[int] | None = None,
        model: str = "",
        timeout_s: float | None = None,
        client_request_id: str = "",
        **sampling: Unpack[SamplingOptions],
    ) -> Completion:
        """Run `generate` to its end and return the first completion as a whole."""
        collector = CompletionCollector()
        async for event in self._events(
            generate_request(prompt, messages, token_ids, model, client_request_id, sampling), timeout_s
        ):
            collector.add(event)
        return collector.result()

    async def tokenize(
        self, text: str | None = None, *, messages: Sequence[Message] | None = None, model: str = ""
    ) -> list[int]:
        """Return the token ids of a text or a chat, as `generate` would take them."""
        with _typed_errors():
            return list((await self._stub.Tokenize(tokenize_request(text, messages, model))).token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, model: str = "") -> str:
        """Return the text of token ids."""
        request = detokenize_request(token_ids, model, skip_special_tokens=skip_special_tokens)
        with _typed_errors():
            return str((await self._stub.Detokenize(request)).text)

    async def list_models(self) -> tuple[ModelSummary, ...]:
        """Return the models served."""
        with _typed_errors():
            return models_from_proto(await self._stub.ListModels(pb.ListModelsRequest()))

    async def server_info(self, timeout_s: float | None = None) -> ServerInfo:
        """Return the gateway's view of its cluster."""
        with _typed_errors():
            return server_info_from_proto(await self._stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=timeout_s))

    async def abort(self, *request_ids: int) -> tuple[int, ...]:
        """End running requests, named by `Started.request_id`; return which of them were running."""
        with _typed_errors():
            return tuple((await self._stub.Abort(abort_request(request_ids))).aborted_request_ids)

    async def is_serving(self, service: str = INFERENCE_SERVICE, timeout_s: float | None = 5.0) -> bool:
        """Whether a service is ready; see `Client.is_serving`."""
        stub: Any = health_pb2_grpc.HealthStub(self._channel)
        try:
            response = await stub.Check(_health_request(service), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return False
            raise from_rpc_error(error) from error
        return bool(response.status == _SERVING)


class _EndCheck:
    """Makes sure that a stream that ended well brought every completion to its end."""

    def __init__(self, request: pb.GenerateRequest) -> None:
        params = request.sampling_params
        self._num_open = params.n if params.HasField("n") else 1

    def seen(self, event: Event) -> Event:
        self._num_open -= isinstance(event, Complete)
        return event

    def check(self) -> None:
        if self._num_open > 0:
            raise EngineError("the server ended the stream before the completion did")


@contextmanager
def _typed_errors() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error


def _options(target: str) -> ChannelOptions:
    return (*channel_options(PUBLIC_MAX_MESSAGE_BYTES), *proxy_options(target))


def _metadata() -> tuple[tuple[str, str], ...]:
    current = current_traceparent()
    return (("traceparent", current),) if current else ()


def _health_request(service: str) -> health_pb2.HealthCheckRequest:
    request = health_pb2.HealthCheckRequest()
    fill(request, "service", service)
    return request
