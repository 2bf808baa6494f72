"""Every typed error has one status, survives the wire, and arrives with its details at asyncio and blocking clients."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import pytest
import structlog
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

import kvrelay.errors
from kvrelay.errors import CapacityError, EngineError, InvalidRequest, RequestCancelled
from kvrelay.serving.server import ServiceServer
from kvrelay.wire.status import (
    CODE_BY_ERROR,
    INTERNAL_MESSAGE,
    STATUS_DETAILS_KEY,
    from_rpc_error,
    from_status,
    to_status,
    walk_errors,
)

EXPECTED_CODES = {
    "InvalidRequest": "INVALID_ARGUMENT",
    "ContextTooLong": "INVALID_ARGUMENT",
    "ModelNotFound": "NOT_FOUND",
    "CapacityError": "RESOURCE_EXHAUSTED",
    "DeadlineExceeded": "DEADLINE_EXCEEDED",
    "RequestCancelled": "CANCELLED",
    "WorkerUnavailable": "UNAVAILABLE",
    "PeerUnavailable": "UNAVAILABLE",
    "LeaseExpired": "ABORTED",
    "LeaseUnknown": "ABORTED",
    "StaleEpoch": "FAILED_PRECONDITION",
    "LayoutMismatch": "FAILED_PRECONDITION",
    "ChecksumMismatch": "DATA_LOSS",
    "CoverageIncomplete": "DATA_LOSS",
    "DeviceError": "INTERNAL",
}
ERROR_KINDS = [kind for kind in walk_errors() if kind.__module__ == kvrelay.errors.__name__]


def make_error(kind: type[EngineError]) -> EngineError:
    if issubclass(kind, InvalidRequest):
        return kind("sampling_params.top_p", "must be in (0, 1]")
    if issubclass(kind, CapacityError):
        return kind("no blocks are free", retry_after_s=2.5)
    return kind(f"a {kind.__name__} happened")


def unpack(status: Status, kind: Callable[[], Any]) -> Any:
    message = kind()
    found = [detail for detail in status.details if detail.Unpack(message)]
    return message if found else None


@pytest.mark.parametrize("kind", ERROR_KINDS)
def test_every_error_of_the_tree_is_in_the_table(kind: type[EngineError]) -> None:
    assert kind in CODE_BY_ERROR


def test_table_has_the_codes_of_the_wire_contract() -> None:
    actual = {kind.__name__: code.name for kind, code in CODE_BY_ERROR.items()}
    assert EXPECTED_CODES.items() <= actual.items()


def test_reasons_are_unique() -> None:
    reasons = [kind.reason for kind in ERROR_KINDS]
    assert len(set(reasons)) == len(reasons)


@pytest.mark.parametrize("kind", ERROR_KINDS)
def test_error_survives_the_round_trip_through_bytes(kind: type[EngineError]) -> None:
    error = make_error(kind)
    back = from_status(to_status(error).SerializeToString())
    assert type(back) is kind
    assert str(back) == str(error)
    assert back.is_retryable == error.is_retryable
    assert {name: getattr(back, name) for name in vars(error)} == vars(error)


@pytest.mark.parametrize("kind", ERROR_KINDS)
def test_status_says_whether_to_retry(kind: type[EngineError]) -> None:
    info = unpack(to_status(make_error(kind)), ErrorInfo)
    assert info.domain == "kvrelay"
    assert info.reason == kind.reason
    assert info.metadata["retryable"] == ("true" if kind.is_retryable else "false")


def test_capacity_carries_the_delay_and_invalid_request_the_field() -> None:
    retry = unpack(to_status(CapacityError("full", retry_after_s=0.25)), RetryInfo)
    assert retry.retry_delay.ToMilliseconds() == 250
    bad = unpack(to_status(InvalidRequest("prompt", "is empty")), BadRequest)
    assert [(entry.field, entry.description) for entry in bad.field_violations] == [("prompt", "is empty")]


def test_unknown_exception_is_internal_without_its_text() -> None:
    status = to_status(ValueError("the secret prompt"))
    assert status.code == grpc.StatusCode.INTERNAL.value[0]
    assert status.message == INTERNAL_MESSAGE
    assert b"secret" not in status.SerializeToString()


def test_cancellation_is_cancelled() -> None:
    assert isinstance(from_status(to_status(asyncio.CancelledError())), RequestCancelled)


def test_unlisted_subclass_takes_its_base() -> None:
    class NarrowerError(CapacityError):
        reason = "NARROWER"

    back = from_status(to_status(NarrowerError("full", 3.0)))
    assert type(back) is CapacityError
    assert isinstance(back, CapacityError)
    assert back.retry_after_s == 3.0


def test_long_messages_are_cut_to_what_metadata_can_hold() -> None:
    status = to_status(InvalidRequest("prompt", "x" * 1_000_000))
    assert len(status.SerializeToString()) < 4096


@pytest.mark.parametrize(
    ("code", "message", "name"),
    [
        (grpc.StatusCode.UNAVAILABLE, "failed to connect", "WorkerUnavailable"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", "DeadlineExceeded"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "CLIENT: Received message larger than max (9 vs. 4)", "InvalidRequest"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "quota", "CapacityError"),
        (grpc.StatusCode.UNIMPLEMENTED, "Method not found!", "EngineError"),
    ],
)
def test_statuses_of_others_become_the_nearest_error(code: grpc.StatusCode, message: str, name: str) -> None:
    assert type(from_status(Status(code=code.value[0], message=message))).__name__ == name


def test_garbage_bytes_become_an_engine_error() -> None:
    assert type(from_status(b"\xff\xff\xff")) is EngineError


class _Refusing(grpc.GenericRpcHandler):
    """Raises `error` from each of the four call shapes; stream shapes send one message first."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        async def unary(_request: Any, _context: Any) -> bytes:
            raise self.error

        async def generator(_request: Any, _context: Any) -> AsyncIterator[bytes]:
            yield b"first"
            raise self.error

        async def writer(_request: Any, context: Any) -> None:
            await context.write(b"first")
            raise self.error

        return {
            "/t.T/uu": grpc.unary_unary_rpc_method_handler(unary),
            "/t.T/su": grpc.stream_unary_rpc_method_handler(unary),
            "/t.T/us": grpc.unary_stream_rpc_method_handler(generator),
            "/t.T/ss": grpc.stream_stream_rpc_method_handler(writer),
        }.get(handler_call_details.method)


async def _call(channel: Any, shape: str) -> None:
    async def requests() -> AsyncIterator[bytes]:
        yield b"x"

    match shape:
        case "uu":
            await channel.unary_unary("/t.T/uu")(b"x")
        case "su":
            await channel.stream_unary("/t.T/su")(requests())
        case "us":
            assert [message async for message in channel.unary_stream("/t.T/us")(b"x")]
        case "ss":
            assert [message async for message in channel.stream_stream("/t.T/ss")(requests())]


@pytest.mark.parametrize("shape", ["uu", "su", "us", "ss"])
@pytest.mark.parametrize("kind", [CapacityError, InvalidRequest, RequestCancelled])
async def test_client_receives_the_typed_error_from_every_call_shape(kind: type[EngineError], shape: str) -> None:
    error = make_error(kind)
    async with ServiceServer() as server:
        server.grpc_server.add_generic_rpc_handlers((_Refusing(error),))
        await server.start()
        async with grpc.aio.insecure_channel(server.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await _call(channel, shape)
    metadata = dict(caught.value.trailing_metadata())
    assert STATUS_DETAILS_KEY in metadata
    assert caught.value.code() is CODE_BY_ERROR[kind]
    back = from_rpc_error(caught.value)
    assert type(back) is kind
    assert vars(back) == vars(error)


@pytest.mark.parametrize("shape", ["uu", "su", "us", "ss"])
async def test_client_learns_nothing_of_an_unexpected_exception(shape: str) -> None:
    async with ServiceServer() as server:
        server.grpc_server.add_generic_rpc_handlers((_Refusing(ZeroDivisionError("the secret prompt")),))
        await server.start()
        async with grpc.aio.insecure_channel(server.address) as channel:
            with structlog.testing.capture_logs() as logs, pytest.raises(grpc.aio.AioRpcError) as caught:
                await _call(channel, shape)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in str(caught.value)
    (told,) = [entry for entry in logs if entry["event"] == "rpc.unhandled_error"]
    assert isinstance(told["exc_info"], ZeroDivisionError)


async def test_blocking_client_receives_the_typed_error() -> None:
    async with ServiceServer() as server:
        server.grpc_server.add_generic_rpc_handlers((_Refusing(make_error(CapacityError)),))
        await server.start()

        def refused_call() -> EngineError:
            with grpc.insecure_channel(server.address) as channel:
                method: Any = channel.unary_unary("/t.T/uu")
                with pytest.raises(grpc.RpcError) as caught:
                    method(b"x")
            return from_rpc_error(caught.value)

        error = await asyncio.to_thread(refused_call)
    assert isinstance(error, CapacityError)
    assert error.retry_after_s == 2.5
