"""Mints request ids: 64 random bits, since whoever knows one may abort the request."""

import secrets

from engine.types import RequestId

_END = 1 << 64


def mint_request_ids(count: int = 1) -> RequestId:
    """Return the first of `count` ids in a row, one for each completion of a call; none is 0."""
    return RequestId(1 + secrets.randbelow(_END - count))
