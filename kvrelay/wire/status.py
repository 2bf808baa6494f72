"""One table from the exception tree to gRPC statuses, and back.

Owns the wire form of errors: `google.rpc.Status` with ErrorInfo (reason, retryable), RetryInfo for capacity and
BadRequest for a wrong field, sent as the trailing metadata `grpc-status-details-bin`. Unknown exceptions never leak
their text. The tree itself is in `kvrelay/errors.py`; `kvrelay/serving/interceptors.py` applies this to every call.
"""

import asyncio
from collections.abc import Iterable, Iterator
from typing import Final, cast

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from kvrelay.errors import (
    CapacityError,
    ChecksumMismatch,
    ContextTooLong,
    CoverageIncomplete,
    DeadlineExceeded,
    DeviceError,
    EngineError,
    InvalidRequest,
    LayoutMismatch,
    LeaseError,
    LeaseExpired,
    LeaseUnknown,
    ModelNotFound,
    NameTaken,
    NoTokenAllowed,
    PeerUnavailable,
    RequestCancelled,
    SamplingFailed,
    StaleEpoch,
    StepFailed,
    TransferError,
    WorkerUnavailable,
)

ERROR_DOMAIN: Final = "kvrelay"
STATUS_DETAILS_KEY: Final = "grpc-status-details-bin"
MAX_MESSAGE_CHARS: Final = 1000
"""Longest message sent: metadata is limited to 8 KiB, and an error must not echo a prompt."""
INTERNAL_MESSAGE: Final = "internal error; the server's log has the details"

CODE_BY_ERROR: Final[dict[type[EngineError], grpc.StatusCode]] = {
    EngineError: grpc.StatusCode.INTERNAL,
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    ContextTooLong: grpc.StatusCode.INVALID_ARGUMENT,
    ModelNotFound: grpc.StatusCode.NOT_FOUND,
    CapacityError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    RequestCancelled: grpc.StatusCode.CANCELLED,
    WorkerUnavailable: grpc.StatusCode.UNAVAILABLE,
    NameTaken: grpc.StatusCode.ALREADY_EXISTS,
    LeaseError: grpc.StatusCode.ABORTED,
    LeaseUnknown: grpc.StatusCode.ABORTED,
    LeaseExpired: grpc.StatusCode.ABORTED,
    StaleEpoch: grpc.StatusCode.FAILED_PRECONDITION,
    TransferError: grpc.StatusCode.UNAVAILABLE,
    LayoutMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    ChecksumMismatch: grpc.StatusCode.DATA_LOSS,
    CoverageIncomplete: grpc.StatusCode.DATA_LOSS,
    PeerUnavailable: grpc.StatusCode.UNAVAILABLE,
    DeviceError: grpc.StatusCode.INTERNAL,
    StepFailed: grpc.StatusCode.INTERNAL,
    SamplingFailed: grpc.StatusCode.INTERNAL,
    NoTokenAllowed: grpc.StatusCode.INVALID_ARGUMENT,
}
"""The one table. A subclass that is not listed takes its nearest listed base's code."""

_ERROR_BY_REASON: Final = {error.reason: error for error in CODE_BY_ERROR}
_ERROR_BY_CODE: Final[dict[grpc.StatusCode, type[EngineError]]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: ModelNotFound,
    grpc.StatusCode.RESOURCE_EXHAUSTED: CapacityError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: RequestCancelled,
    grpc.StatusCode.UNAVAILABLE: WorkerUnavailable,
    grpc.StatusCode.ABORTED: LeaseError,
    grpc.StatusCode.DATA_LOSS: TransferError,
}
"""For statuses without our ErrorInfo: from gRPC itself, a proxy, or another server."""
CODE_BY_NUMBER: Final = {code.value[0]: code for code in grpc.StatusCode}
"""A status holds the number."""


def status_code(error: BaseException) -> grpc.StatusCode:
    """Return the gRPC code for an exception; anything outside the tree is INTERNAL, a cancelled task is CANCELLED."""
    if isinstance(error, asyncio.CancelledError):
        return grpc.StatusCode.CANCELLED
    for base in type(error).__mro__:
        code = CODE_BY_ERROR.get(base)
        if code is not None:
            return code
    return grpc.StatusCode.INTERNAL


def to_status(error: BaseException) -> Status:
    """Return the status that tells a client about `error`.

    Exceptions outside the tree are reported without their text; logging them is the caller's part.
    """
    code: int = status_code(error).value[0]
    if isinstance(error, asyncio.CancelledError):
        error = RequestCancelled("cancelled")
    if not isinstance(error, EngineError):
        return Status(
            code=code, message=INTERNAL_MESSAGE, details=[_packed(_error_info("INTERNAL", is_retryable=False))]
        )
    status = Status(code=code, message=_shortened(str(error)))
    status.details.append(_packed(_error_info(error.reason, is_retryable=error.is_retryable)))
    if isinstance(error, CapacityError):
        retry_info = RetryInfo()
        retry_info.retry_delay.FromNanoseconds(max(0, round(error.retry_after_s * 1e9)))
        status.details.append(_packed(retry_info))
    if isinstance(error, InvalidRequest):
        violation = BadRequest.FieldViolation(field=error.field, description=_shortened(error.description))
        status.details.append(_packed(BadRequest(field_violations=[violation])))
    return status


def from_status(status: Status | bytes) -> EngineError:
    """Return the typed error that a status stands for.

    Args:
        status: The message, or its serialized form as it travels in metadata and session events.
    """
    if isinstance(status, bytes):
        try:
            status = Status.FromString(status)
        except DecodeError:
            return EngineError("the peer sent an error that cannot be read")
    reason, retry_after_s, violation = _read_details(status)
    code = CODE_BY_NUMBER.get(status.code, grpc.StatusCode.UNKNOWN)
    kind = _ERROR_BY_REASON.get(reason)
    if kind is None:
        kind = _ERROR_BY_CODE.get(code, EngineError)
        # gRPC reports an oversized message as RESOURCE_EXHAUSTED, but sending it again can never help.
        if kind is CapacityError and "larger than max" in status.message:
            return InvalidRequest("request", status.message)
    if issubclass(kind, InvalidRequest):
        return kind(*violation) if violation is not None else kind("request", status.message)
    if issubclass(kind, CapacityError):
        return kind(status.message, retry_after_s)
    return kind(status.message or code.name)


def from_rpc_error(error: grpc.RpcError) -> EngineError:
    """Return the typed error that a failed call stands for (asyncio and blocking calls alike)."""
    # Blocking calls give named pairs, asyncio calls a Metadata object; both iterate as (key, value).
    metadata = cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ())
    for key, value in metadata:
        if key == STATUS_DETAILS_KEY and isinstance(value, bytes):
            return from_status(value)
    return from_status(Status(code=error.code().value[0], message=error.details() or ""))


def walk_errors(root: type[EngineError] = EngineError) -> Iterator[type[EngineError]]:
    """Yield `root` and all its known subclasses."""
    yield root
    for child in root.__subclasses__():
        yield from walk_errors(child)


def _read_details(status: Status) -> tuple[str, float, tuple[str, str] | None]:
    reason, retry_after_s, violation = "", 1.0, None
    for detail in status.details:
        try:
            info, retry_info, bad_request = ErrorInfo(), RetryInfo(), BadRequest()
            if detail.Unpack(info) and info.domain == ERROR_DOMAIN:
                reason = info.reason
            elif detail.Unpack(retry_info):
                retry_after_s = retry_info.retry_delay.ToNanoseconds() / 1e9
            elif detail.Unpack(bad_request) and bad_request.field_violations:
                first = bad_request.field_violations[0]
                violation = (first.field, first.description)
        except DecodeError:
            continue
    return reason, retry_after_s, violation


def _error_info(reason: str, *, is_retryable: bool) -> ErrorInfo:
    metadata = {"retryable": "true" if is_retryable else "false"}
    return ErrorInfo(reason=reason, domain=ERROR_DOMAIN, metadata=metadata)


def _packed(message: ErrorInfo | RetryInfo | BadRequest) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(message)
    return packed


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE_CHARS else text[: MAX_MESSAGE_CHARS - 1] + "…"
