"""The registry: incarnations, keep-alives, expiry, and who is refused why."""

from dataclasses import replace
from typing import Any

import pytest
import structlog

from engine.types import Incarnation, WorkerId
from engine.worker_types import WorkerRole
from kvrelay.errors import InvalidRequest, LayoutMismatch, NameTaken
from tests.unit.gateway.builders import LAYOUT, ManualClock, make_info, make_registry

DECODE, PREFILL = WorkerId("decode"), WorkerId("prefill")


def test_listeners_hear_of_changes_only() -> None:
    registry = make_registry(ManualClock())
    heard: list[int] = []
    registry.subscribe(lambda: heard.append(len(registry.workers())))
    registry.register(make_info("decode"))
    registry.register(make_info("decode"))
    registry.register(make_info("prefill", WorkerRole.PREFILL))
    assert heard == [1, 2]
    registry.keep_alive(DECODE, Incarnation(1), is_draining=False)
    assert heard == [1, 2]
    registry.keep_alive(DECODE, Incarnation(1), is_draining=True)
    assert registry.is_draining(DECODE)
    registry.deregister(DECODE, Incarnation(1))
    assert heard == [1, 2, 2, 1]


def test_newer_incarnation_replaces_the_older_and_fences_its_messages() -> None:
    registry = make_registry(ManualClock())
    registry.register(make_info("decode"))
    registry.register(make_info("decode", incarnation=2))
    assert [info.incarnation for info in registry.workers()] == [2]
    assert not registry.keep_alive(DECODE, Incarnation(1), is_draining=True)
    assert not registry.deregister(DECODE, Incarnation(1))
    assert not registry.is_draining(DECODE)
    assert registry.keep_alive(DECODE, Incarnation(2), is_draining=False)


def test_drained_worker_that_registers_again_drains_no_more() -> None:
    registry = make_registry(ManualClock())
    registry.register(make_info("decode"))
    registry.keep_alive(DECODE, Incarnation(1), is_draining=True)
    registry.register(make_info("decode"))
    assert not registry.is_draining(DECODE)


def test_three_missed_keep_alives_end_a_registration() -> None:
    clock = ManualClock()
    registry = make_registry(clock)
    registry.register(make_info("decode"))
    registry.register(make_info("prefill", WorkerRole.PREFILL))
    for _ in range(3):
        clock.time += 1.0
        registry.keep_alive(PREFILL, Incarnation(1), is_draining=False)
        assert registry.expire() == ()
    clock.time += 0.5
    assert registry.expire() == (DECODE,)
    assert not registry.keep_alive(DECODE, Incarnation(1), is_draining=False)
    assert [info.worker_id for info in registry.workers()] == [PREFILL]


def test_time_in_which_this_process_stood_still_expires_nobody() -> None:
    clock = ManualClock()
    registry = make_registry(clock)
    registry.register(make_info("decode"))
    clock.time += 60.0
    assert registry.expire() == ()
    for _ in range(4):
        clock.time += 1.0
        registry.expire()
    assert registry.workers() == ()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_name": "other"}, "other"),
        ({"vocab_size": 89}, "vocab_size"),
        ({"vocab_size": 128}, "vocab_size"),
        ({"layout": replace(LAYOUT, num_layers=3)}, "num_model_layers"),
        ({"layout": replace(LAYOUT, model_fingerprint="x")}, "model_fingerprint"),
        ({"layout": replace(LAYOUT, head_dim=16)}, "head_dim"),
    ],
)
@pytest.mark.parametrize("role", list(WorkerRole))
def test_worker_that_does_not_fit_is_refused_with_the_reason(
    role: WorkerRole, changes: dict[str, Any], reason: str
) -> None:
    registry = make_registry(ManualClock())
    other = WorkerRole.PREFILL if role is WorkerRole.DECODE else WorkerRole.DECODE
    registry.register(make_info("first", other))
    with pytest.raises(LayoutMismatch, match=reason):
        registry.register(make_info("second", role, **changes))
    assert len(registry.workers()) == 1


def test_model_with_fewer_tokens_than_the_tokenizer_is_served() -> None:
    registry = make_registry(ManualClock())
    with structlog.testing.capture_logs() as lines:
        registry.register(make_info("decode", vocab_size=89))
        registry.register(make_info("decode", vocab_size=89))
    assert [info.vocab_size for info in registry.workers()] == [89]
    (line,) = [line for line in lines if line["event"] == "worker.vocab_below_tokenizers"]
    assert (line["vocab_size"], line["tokenizer_vocab_size"]) == (89, 90)


def test_other_block_size_fits_because_it_is_converted() -> None:
    registry = make_registry(ManualClock())
    registry.register(make_info("decode"))
    registry.register(make_info("prefill", WorkerRole.PREFILL, layout=replace(LAYOUT, block_size=32)))
    assert len(registry.workers()) == 2


def test_only_worker_may_come_back_with_another_layout() -> None:
    registry = make_registry(ManualClock())
    registry.register(make_info("decode"))
    registry.register(make_info("decode", incarnation=2, layout=replace(LAYOUT, num_layers=3)))
    assert registry.workers()[0].layout.num_layers == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("worker_id", ""),
        ("incarnation", 0),
        ("address", "no-port"),
        ("address", ":50"),
        ("address", "host:0"),
        ("address", "host:70000"),
        ("address", "0.0.0.0:5000"),
        ("address", "[::]:5000"),
        ("num_blocks", 0),
        ("max_num_seqs", 0),
        ("context_length", 0),
        ("vocab_size", 0),
    ],
)
def test_unusable_field_is_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        make_registry(ManualClock()).register(replace(make_info("decode"), **{field: value}))
    assert caught.value.field == field


def test_longest_sequence_is_limited_by_context_and_by_pool() -> None:
    assert make_info("decode", context_length=512, num_blocks=64).max_sequence_tokens == 512
    assert make_info("decode", context_length=512, num_blocks=4).max_sequence_tokens == 64


def test_name_of_a_live_worker_is_refused_until_its_process_is_gone() -> None:
    registry = make_registry(ManualClock())
    connected = {DECODE}
    registry.ask_for_connections(connected.__contains__)
    registry.register(make_info("decode"))
    with pytest.raises(NameTaken, match=r"127\.0\.0\.1:1234.*--worker-id"):
        registry.register(make_info("decode", incarnation=2))
    assert [info.incarnation for info in registry.workers()] == [1]
    registry.register(make_info("decode"))  # the same process, e.g. after this gateway's restart
    assert registry.keep_alive(DECODE, Incarnation(1), is_draining=False)
    connected.clear()
    registry.register(make_info("decode", incarnation=2))
    assert [info.incarnation for info in registry.workers()] == [2]


def test_stall_is_kept_until_it_is_taken_back() -> None:
    registry = make_registry(ManualClock())
    changes: list[bool] = []
    registry.register(make_info("decode"))
    registry.subscribe(lambda: changes.append(registry.is_stalled(DECODE)))
    for is_stalled in (False, True, True, False):
        registry.keep_alive(DECODE, Incarnation(1), is_draining=False, is_stalled=is_stalled)
    assert changes == [True, False]
