"""Values → protos → values is the identity for every family and field; a proto field that nobody converts is found."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from engine.cache.layout import KvLayout
from engine.types import EngineRequest, HandoffRecord, SamplingParams, SequenceOutput
from engine.worker_types import TICKET_BYTES, KvHandle, TransferPeer, TransferStats, WorkerInfo, WorkerLoad
from kvrelay.errors import CapacityError, EngineError, InvalidRequest, StepFailed
from kvrelay.v1 import decode_service_pb2, handoff_pb2, prefill_service_pb2
from kvrelay.wire.engine import commands, events
from kvrelay.wire.engine.handoff import (
    handoff_record_from_bytes,
    handoff_record_to_bytes,
    kv_handle_from_bytes,
    kv_handle_to_bytes,
    transfer_stats_from_proto,
    transfer_stats_to_proto,
)
from kvrelay.wire.engine.layout import layout_from_proto, layout_to_proto
from kvrelay.wire.engine.requests import TEXT_FIELDS
from kvrelay.wire.engine.sampling import sampling_params_from_proto, sampling_params_to_proto
from kvrelay.wire.engine.workers import (
    ModelInfo,
    load_from_proto,
    load_to_proto,
    model_info_from_proto,
    model_info_to_proto,
    peer_from_proto,
    peer_to_proto,
    worker_info_from_proto,
    worker_info_to_proto,
)
from tests.property.value_strategies import TEXT, full_value_of, values_of

NOW = 1000.0
ERRORS = (EngineError("broken"), InvalidRequest("prompt", "is empty"), CapacityError("full", 0.5), StepFailed("a step"))

LAYOUTS = st.builds(
    KvLayout,
    model_fingerprint=TEXT.filter(bool),
    num_layers=st.integers(2, 99),
    num_kv_heads=st.integers(1, 99),
    head_dim=st.integers(1, 99),
    block_size=st.integers(1, 99),
    dtype=values_of(KvLayout.__annotations__["dtype"]),
    num_draft_layers=st.integers(0, 1),
)


def a_layout() -> KvLayout:
    layout: KvLayout = full_value_of(KvLayout)
    return replace(layout, num_layers=9)


HANDLES = st.builds(
    lambda handle, start, more: replace(handle, start_token=start, num_tokens=start + more),
    values_of(KvHandle, ticket=st.binary(min_size=TICKET_BYTES, max_size=TICKET_BYTES)),
    st.integers(0, 99),
    st.integers(1, 99),
)


def a_handle() -> KvHandle:
    handle: KvHandle = full_value_of(KvHandle)
    return replace(handle, ticket=b"t" * TICKET_BYTES, num_tokens=5)


SAMPLING = values_of(SamplingParams, bad_words=st.just(()))
# A worker is told no text; bad words come to it as tokens.
REQUESTS = values_of(
    EngineRequest,
    sampling_params=values_of(
        SamplingParams,
        **{name: st.just(getattr(SamplingParams(), name)) for name in TEXT_FIELDS},
        bad_words=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9))).map(tuple),
    ),
    priority=st.integers(-(2**31), 2**31 - 1),
)
TIMES = st.none() | st.integers(1, 10**6).map(lambda timeout_ms: NOW + timeout_ms / 1000)
OUTPUTS = values_of(SequenceOutput, error=st.none(), draft_state=st.just(b""))


def a_request() -> EngineRequest:
    request: EngineRequest = full_value_of(EngineRequest)
    return request


def an_output() -> events.Output:
    return events.Output(3, full_value_of(SequenceOutput, error=lambda: None, draft_state=lambda: b""))


@dataclass(frozen=True)
class Family:
    """One kind of message."""

    values: st.SearchStrategy[Any]
    full: Callable[[], Any]
    """A value with no field at its default."""
    to_proto: Callable[[Any], Message]
    from_proto: Callable[[Any], Any]
    elsewhere: frozenset[str] = frozenset()
    """Fields of the message that are no part of this value."""


FAMILIES: dict[str, Family] = {
    "layout": Family(LAYOUTS, a_layout, layout_to_proto, layout_from_proto),
    "sampling": Family(
        SAMPLING,
        lambda: full_value_of(SamplingParams, bad_words=tuple),
        sampling_params_to_proto,
        sampling_params_from_proto,
        # Of the call or of the request around them; the last two are not served yet.
        frozenset({"n", "bad_words", "priority", "cache_salt", "prompt_logprobs", "constraint"}),
    ),
    "record": Family(
        values_of(HandoffRecord),
        lambda: full_value_of(HandoffRecord),
        lambda record: handoff_pb2.HandoffRecord.FromString(handoff_record_to_bytes(record)),
        lambda message: handoff_record_from_bytes(message.SerializeToString()),
    ),
    "handle": Family(
        HANDLES,
        a_handle,
        lambda handle: handoff_pb2.KvHandle.FromString(kv_handle_to_bytes(handle)),
        lambda message: kv_handle_from_bytes(message.SerializeToString(), message.num_tokens),
    ),
    "stats": Family(
        values_of(TransferStats),
        lambda: full_value_of(TransferStats),
        transfer_stats_to_proto,
        transfer_stats_from_proto,
    ),
    "load": Family(values_of(WorkerLoad), lambda: full_value_of(WorkerLoad), load_to_proto, load_from_proto),
    "worker": Family(
        values_of(WorkerInfo, layout=LAYOUTS),
        lambda: full_value_of(WorkerInfo, layout=a_layout),
        worker_info_to_proto,
        worker_info_from_proto,
    ),
    "model": Family(
        values_of(ModelInfo, layout=LAYOUTS),
        lambda: full_value_of(ModelInfo, layout=a_layout),
        model_info_to_proto,
        model_info_from_proto,
    ),
    "peer": Family(
        values_of(TransferPeer, layout=LAYOUTS),
        lambda: full_value_of(TransferPeer, layout=a_layout),
        peer_to_proto,
        peer_from_proto,
    ),
}

_REQUEST_ELSEWHERE = frozenset({"n", *TEXT_FIELDS, "bad_words", "prompt_logprobs", "constraint"})
_DECODE, _PREFILL = decode_service_pb2, prefill_service_pb2


def command_family(values: st.SearchStrategy[Any], full: Callable[[], Any], kind: Any) -> Family:
    return Family(
        values,
        full,
        lambda command: commands.command_to_proto(command, NOW, kind),
        lambda message: commands.command_from_proto(message, NOW),
        _REQUEST_ELSEWHERE,
    )


def event_family(values: st.SearchStrategy[Any], full: Callable[[], Any], kind: Any) -> Family:
    return Family(
        values, full, lambda event: events.event_to_proto(event, kind), lambda message: events.event_from_proto(message)
    )


COMMANDS: dict[str, tuple[st.SearchStrategy[Any], Callable[[], Any], tuple[Any, ...]]] = {
    "reserve": (
        values_of(commands.Reserve, request=REQUESTS, deadline=TIMES),
        lambda: full_value_of(commands.Reserve, request=a_request, deadline=lambda: NOW + 3),
        (_DECODE.DecodeServiceSessionRequest,),
    ),
    "prefill": (
        values_of(commands.Prefill, request=REQUESTS, deadline=TIMES, kv_handle=HANDLES.map(kv_handle_to_bytes)),
        lambda: full_value_of(
            commands.Prefill,
            request=a_request,
            deadline=lambda: NOW + 3,
            kv_handle=lambda: kv_handle_to_bytes(a_handle()),
        ),
        (_PREFILL.PrefillServiceSessionRequest,),
    ),
    "update_peers": (
        st.builds(commands.UpdatePeers, st.lists(values_of(TransferPeer, layout=LAYOUTS), max_size=2).map(tuple)),
        lambda: commands.UpdatePeers((full_value_of(TransferPeer, layout=a_layout),)),
        (_PREFILL.PrefillServiceSessionRequest,),
    ),
    **{
        name: (values_of(kind), lambda kind=kind: full_value_of(kind), messages)  # type: ignore[misc]  # one lambda each
        for name, kind, messages in (
            ("prefill_locally", commands.PrefillLocally, (_DECODE.DecodeServiceSessionRequest,)),
            ("supersede", commands.Supersede, (_DECODE.DecodeServiceSessionRequest,)),
            ("renew", commands.Renew, (_DECODE.DecodeServiceSessionRequest,)),
            (
                "abort",
                commands.Abort,
                (_DECODE.DecodeServiceSessionRequest, _PREFILL.PrefillServiceSessionRequest),
            ),
        )
    },
}
_BOTH = (_DECODE.DecodeServiceSessionResponse, _PREFILL.PrefillServiceSessionResponse)


def for_request(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return values_of(events.ForRequest, event=values)


EVENTS: dict[str, tuple[st.SearchStrategy[Any], Callable[[], Any], tuple[Any, ...]]] = {
    "ready": (values_of(events.Ready), lambda: full_value_of(events.Ready), _BOTH),
    "step": (
        st.builds(events.Step, st.lists(values_of(events.Output, output=OUTPUTS), max_size=2).map(tuple)),
        lambda: events.Step((an_output(),)),
        _BOTH,
    ),
    "load": (values_of(WorkerLoad), lambda: full_value_of(WorkerLoad), _BOTH),
    "ending": (values_of(events.Ending), lambda: full_value_of(events.Ending), _BOTH),
    "error": (
        for_request(values_of(events.Failed, error=st.sampled_from(ERRORS))),
        lambda: full_value_of(events.ForRequest, event=lambda: full_value_of(events.Failed, error=lambda: ERRORS[0])),
        _BOTH,
    ),
    "reserved": (
        for_request(values_of(events.Reserved, kv_handle=HANDLES.map(kv_handle_to_bytes))),
        lambda: full_value_of(
            events.ForRequest,
            event=lambda: full_value_of(events.Reserved, kv_handle=lambda: kv_handle_to_bytes(a_handle())),
        ),
        _BOTH[:1],
    ),
    "committed": (
        for_request(values_of(events.Committed)),
        lambda: full_value_of(events.ForRequest, event=lambda: full_value_of(events.Committed)),
        _BOTH[:1],
    ),
    "exported": (
        for_request(values_of(events.Exported)),
        lambda: full_value_of(events.ForRequest, event=lambda: full_value_of(events.Exported)),
        _BOTH[1:],
    ),
}
for _name, (_values, _full, _kinds) in COMMANDS.items():
    for _kind in _kinds:
        FAMILIES[f"{_name} of {_kind.__name__}"] = command_family(_values, _full, _kind)
for _name, (_values, _full, _kinds) in EVENTS.items():
    for _kind in _kinds:
        FAMILIES[f"{_name} of {_kind.__name__}"] = event_family(_values, _full, _kind)


def comparable(value: Any) -> Any:
    """Errors are no values: they are compared by type and text."""
    if isinstance(value, events.ForRequest) and isinstance(value.event, events.Failed):
        error = value.event.error
        return value.request_id, value.event.attempt, type(error), str(error), error.is_retryable
    return value


def unset_fields(message: Message, elsewhere: frozenset[str]) -> Iterator[str]:
    """Yield the fields that a message of a full value does not hold; of a oneof one is enough."""
    held = dict(message.ListFields())
    for field in message.DESCRIPTOR.fields:
        if field.name in elsewhere:
            continue
        if field not in held:
            alternatives = field.containing_oneof.fields if field.containing_oneof else ()
            if not any(each in held for each in alternatives):
                yield f"{message.DESCRIPTOR.name}.{field.name}"
        elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
            inner = held[field]
            for each in inner if field.is_repeated else [inner]:
                yield from unset_fields(each, elsewhere)


@pytest.mark.parametrize("name", FAMILIES)
@given(data=st.data())
def test_way_over_the_wire_changes_nothing(name: str, data: st.DataObject) -> None:
    family = FAMILIES[name]
    value = data.draw(family.values)
    message = family.to_proto(value)
    travelled = type(message).FromString(message.SerializeToString())
    assert comparable(family.from_proto(travelled)) == comparable(value)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_field_of_the_proto_is_converted(name: str) -> None:
    family = FAMILIES[name]
    value = family.full()
    message = family.to_proto(value)
    assert list(unset_fields(message, family.elsewhere)) == []


@pytest.mark.parametrize(
    ("kind", "oneof", "table"),
    [
        (_DECODE.DecodeServiceSessionRequest, "command", COMMANDS),
        (_PREFILL.PrefillServiceSessionRequest, "command", COMMANDS),
        (_DECODE.DecodeServiceSessionResponse, "event", EVENTS),
        (_PREFILL.PrefillServiceSessionResponse, "event", EVENTS),
    ],
)
def test_every_kind_of_session_message_is_converted(kind: Any, oneof: str, table: dict[str, Any]) -> None:
    known = {name for name, (_, _, kinds) in table.items() if kind in kinds}
    assert {field.name for field in kind.DESCRIPTOR.oneofs_by_name[oneof].fields} == known


def test_field_that_nobody_converts_is_noticed() -> None:
    message = load_to_proto(full_value_of(WorkerLoad))
    message.ClearField("num_leases")
    assert list(unset_fields(message, frozenset())) == ["WorkerLoad.num_leases"]
