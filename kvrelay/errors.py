"""The exception tree. Every error that may reach a client is one of these.

    EngineError
    ├── InvalidRequest            the caller must change the request (names the field)
    │   ├── ContextTooLong        prompt + max_tokens cannot fit the model or the pool
    │   └── NoTokenAllowed        its fields together leave no token at a position
    ├── ModelNotFound             the named model is not served here
    ├── CapacityError             no room now; retry after `retry_after_s`
    ├── DeadlineExceeded          the request's own time ran out
    ├── RequestCancelled          the client went away or said Abort
    ├── WorkerUnavailable         a worker is gone, draining or not connected; retry elsewhere
    ├── NameTaken                 another live worker is registered under this name
    ├── LeaseError                the reservation cannot be used
    │   ├── LeaseUnknown
    │   ├── LeaseExpired
    │   └── StaleEpoch            a newer attempt owns the reservation
    ├── TransferError             the KV did not arrive as it was sent
    │   ├── LayoutMismatch
    │   ├── ChecksumMismatch
    │   ├── CoverageIncomplete
    │   └── PeerUnavailable
    ├── SamplingFailed            no token can be drawn from this sequence's row; the step went on for the others
    └── DeviceError               the device or the engine thread is broken; the process must restart
        └── StepFailed            the request was in the step that broke it

`reason` is the stable machine-readable word (google.rpc.ErrorInfo.reason); `is_retryable` says whether the same request
may succeed later or elsewhere without a change. `kvrelay/wire/status.py` maps the tree to gRPC statuses.
"""

import reprlib
from typing import ClassVar

_MAX_SHOWN_CHARS = 120
_SHORT_REPR = reprlib.Repr()
_SHORT_REPR.maxstring = _SHORT_REPR.maxother = _SHORT_REPR.maxlong = _MAX_SHOWN_CHARS


class EngineError(Exception):
    """Base of every typed error."""

    reason: ClassVar[str] = "ENGINE_ERROR"
    is_retryable: ClassVar[bool] = False


class InvalidRequest(EngineError):
    """A field of the request is wrong. `field` uses the proto path, e.g. `sampling_params.top_p`."""

    reason = "INVALID_REQUEST"

    def __init__(self, field: str, description: str) -> None:
        super().__init__(f"{field}: {description}")
        self.field = field
        self.description = description


class ContextTooLong(InvalidRequest):
    """The tokens asked for can never fit: refuse at once rather than queue for ever."""

    reason = "CONTEXT_TOO_LONG"


class NoTokenAllowed(InvalidRequest):
    """The request's fields together ban every token, at once or at the position that it has reached."""

    reason = "NO_TOKEN_ALLOWED"


class ModelNotFound(EngineError):
    """The request names a model that is not served here."""

    reason = "MODEL_NOT_FOUND"


class CapacityError(EngineError):
    """No room now. Transient: the caller may retry after `retry_after_s` seconds."""

    reason = "CAPACITY"
    is_retryable = True

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(EngineError):
    """The request's deadline passed before it could finish."""

    reason = "DEADLINE_EXCEEDED"


class RequestCancelled(EngineError):
    """The client cancelled, disconnected or aborted the request."""

    reason = "CANCELLED"


class WorkerUnavailable(EngineError):
    """A worker is gone, draining or not connected."""

    reason = "WORKER_UNAVAILABLE"
    is_retryable = True


class NameTaken(EngineError):
    """Another live worker is registered under this name. Once it is gone the name is free."""

    reason = "NAME_TAKEN"
    is_retryable = True


class LeaseError(EngineError):
    """A reservation cannot be used any more."""

    reason = "LEASE"
    is_retryable = True


class LeaseUnknown(LeaseError):
    """No such lease, or the ticket does not open it."""

    reason = "LEASE_UNKNOWN"


class LeaseExpired(LeaseError):
    """The lease ran out of time before the commit."""

    reason = "LEASE_EXPIRED"


class StaleEpoch(LeaseError):
    """A newer attempt owns the reservation; this writer is fenced."""

    reason = "STALE_EPOCH"


class TransferError(EngineError):
    """KV did not arrive as it was sent."""

    reason = "TRANSFER"
    is_retryable = True


class LayoutMismatch(TransferError):
    """The peers' KV layouts cannot be converted into one another."""

    reason = "LAYOUT_MISMATCH"
    is_retryable = False


class ChecksumMismatch(TransferError):
    """A frame's payload does not have the digest its header names."""

    reason = "CHECKSUM_MISMATCH"


class CoverageIncomplete(TransferError):
    """A commit arrived although not every block of every layer did."""

    reason = "COVERAGE_INCOMPLETE"


class PeerUnavailable(TransferError):
    """The transfer peer cannot be reached or its connection was lost."""

    reason = "PEER_UNAVAILABLE"


class SamplingFailed(EngineError):
    """No token can be drawn from this sequence's row: the model's logits are not finite there, or a defect of ours."""

    reason = "SAMPLING_FAILED"


class DeviceError(EngineError):
    """The device or the engine thread is broken. Fatal: health turns NOT_SERVING."""

    reason = "DEVICE"


class StepFailed(DeviceError):
    """The engine broke in a step that this request took part in: it may be the cause, and so may any other there."""

    reason = "STEP_FAILED"


class ClusterError(Exception):
    """A local cluster cannot start or go on; the message is for people and may have several lines."""


def shown(value: object) -> str:
    """Return a value from a file or a peer as messages show it: on one line, and short however large it is."""
    text = _SHORT_REPR.repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[: _MAX_SHOWN_CHARS - 3]}..."
