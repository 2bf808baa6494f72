"""Errors of the HTTP door: typed errors to OpenAI's error objects and statuses, by way of the table for gRPC."""

import math
from collections.abc import Mapping
from typing import Any, Final

import grpc
from starlette.responses import JSONResponse

from kvrelay.errors import CapacityError, EngineError, InvalidRequest, ModelNotFound
from kvrelay.wire.status import INTERNAL_MESSAGE, status_code

_PREFIXES: Final = ("sampling_params.",)
_FIELDS: Final = {"text": "prompt", "token_ids.ids": "prompt", "chat.messages": "messages", "client_request_id": "user"}
"""The public API's fields by the names that HTTP clients use."""
_STATUS: Final[Mapping[grpc.StatusCode, int]] = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.CANCELLED: 499,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
_TYPE: Final[Mapping[int, str]] = {
    400: "invalid_request_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


def http_status(error: BaseException) -> int:
    """Return the status of a typed error; anything else is 500."""
    return _STATUS.get(status_code(error), 500)


def field_name(field: str) -> str:
    """Return a field of the public API as HTTP clients name it."""
    for prefix in _PREFIXES:
        field = field.removeprefix(prefix)
    return _FIELDS.get(field, field)


def error_object(error: BaseException) -> dict[str, Any]:
    """Return OpenAI's error object. What is not typed is told without its text."""
    if not isinstance(error, EngineError):
        return _object(500, INTERNAL_MESSAGE, "INTERNAL", None)
    status = http_status(error)
    param: str | None = None
    message = str(error)
    if isinstance(error, InvalidRequest):
        param = field_name(error.field)
        message = f"{param}: {error.description}"
    elif isinstance(error, ModelNotFound):
        param = "model"
    return _object(status, message, error.reason, param)


def error_response(error: BaseException) -> JSONResponse:
    """Return the answer that tells of an error; a full server says when to come back."""
    headers: dict[str, str] = {}
    if isinstance(error, CapacityError):
        # Whole seconds, as the header has it; OpenAI's clients also read the other one.
        headers = {
            "retry-after": str(max(1, math.ceil(error.retry_after_s))),
            "retry-after-ms": str(max(1, round(1000 * error.retry_after_s))),
        }
    return JSONResponse(error_object(error), http_status(error), headers)


def plain_error(status: int, message: str, code: str, param: str | None = None) -> JSONResponse:
    """Return an answer for what never became a request: a wrong path, a body that cannot be read."""
    return JSONResponse(_object(status, message, code, param), status)


def _object(status: int, message: str, code: str, param: str | None) -> dict[str, Any]:
    kind = _TYPE.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code.lower()}}
