"""SamplingParams: the resolved values to their proto and back.

Fields that are one value under one name on both sides are found in the proto, not listed: a new one needs its line in
the proto and in `SamplingParams`. Ranges are the matter of `engine/request_checks.py`.
"""

from dataclasses import fields
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from engine.types import SamplingParams
from kvrelay.v1 import sampling_pb2

_OF_PROTO = sampling_pb2.SamplingParams.DESCRIPTOR.fields_by_name
PLAIN_FIELDS: tuple[str, ...] = tuple(
    each.name
    for each in fields(SamplingParams)
    if each.name in _OF_PROTO
    and not _OF_PROTO[each.name].is_repeated
    and _OF_PROTO[each.name].type != FieldDescriptor.TYPE_MESSAGE
)
"""One value in the proto and in `SamplingParams`; absent, they take its default."""


def plain_fields_from_proto(message: sampling_pb2.SamplingParams) -> dict[str, Any]:
    """Return the plain fields that are there, by name."""
    return {name: getattr(message, name) for name in PLAIN_FIELDS if message.HasField(name)}


def sampling_params_to_proto(params: SamplingParams) -> sampling_pb2.SamplingParams:
    """Return every field; bad words travel as tokens, beside the proto."""
    values = {name: getattr(params, name) for name in PLAIN_FIELDS}
    return sampling_pb2.SamplingParams(
        **{name: value for name, value in values.items() if value is not None},
        stop=params.stop,
        stop_token_ids=sorted(params.stop_token_ids),
        logit_bias=params.logit_bias,
        allowed_token_ids=sorted(params.allowed_token_ids or ()),
    )


def sampling_params_from_proto(
    message: sampling_pb2.SamplingParams, bad_words: tuple[tuple[int, ...], ...] = ()
) -> SamplingParams:
    """Return the parameters. `n`, `prompt_logprobs` and constraints are for whoever reads a client's request."""
    return SamplingParams(
        **plain_fields_from_proto(message),
        stop=tuple(message.stop),
        stop_token_ids=frozenset(message.stop_token_ids),
        logit_bias=dict(message.logit_bias),
        allowed_token_ids=frozenset(message.allowed_token_ids) or None,
        bad_words=bad_words,
    )
