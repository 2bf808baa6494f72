"""In what order the copy stream of a device cache does things, as told to streams and events that only take notes."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from engine.config import KvDtype
from engine.model.cuda.cache import DeviceKvCache
from tests.oracle.triton.device_checks import LAYOUT, random_cache

CPU = torch.device("cpu")
NUM_BYTES = 2 * LAYOUT.block_bytes


@dataclass
class FakeEvent:
    """Notes when it is recorded."""

    notes: list[str]
    name: str

    def record(self, stream: object = None) -> None:
        self.notes.append(f"record {self.name}")

    def synchronize(self) -> None:
        self.notes.append(f"synchronize {self.name}")


@dataclass
class FakeStream:
    """Notes what it waits for."""

    notes: list[str]

    def wait_event(self, event: FakeEvent) -> None:
        self.notes.append(f"wait for {event.name}")


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> tuple[DeviceKvCache, list[str]]:
    """A cache in host memory that takes its streams and events for a device's."""
    notes: list[str] = []
    cache: Any = random_cache(LAYOUT, 4, CPU, seed=1)
    cache._stream, cache._step_end = FakeStream(notes), FakeEvent(notes, "the step's end")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", lambda: FakeEvent(notes, "the copy"))
    move = cache._move

    def noting(*args: Any, is_export: bool) -> None:
        notes.append("read blocks" if is_export else "write blocks")
        move(*args, is_export=is_export)

    monkeypatch.setattr(cache, "_move", noting)
    return cache, notes


def _host(cache: DeviceKvCache) -> None:
    cache.write_blocks(0, [1, 2], memoryview(bytes(NUM_BYTES)))


def _device(cache: DeviceKvCache) -> None:
    cache.write_device_blocks(0, [1, 2], cache.device_memory.take(NUM_BYTES))


@pytest.mark.parametrize("write", [_host, _device])
def test_a_write_begins_when_the_device_has_run_the_newest_step(
    noted: tuple[DeviceKvCache, list[str]], write: Callable[[DeviceKvCache], None]
) -> None:
    cache, notes = noted
    cache.end_step()
    write(cache)
    assert notes == [
        "record the step's end",
        "wait for the step's end",
        "write blocks",
        "record the copy",
        "synchronize the copy",
    ]


def test_a_converting_write_waits_as_well(noted: tuple[DeviceKvCache, list[str]]) -> None:
    cache, notes = noted
    source = replace(LAYOUT, dtype=KvDtype.FP32)
    cache.write_converted(0, 0, source.block_size, [1], memoryview(bytes(source.block_bytes)), source)
    assert notes == ["wait for the step's end", "record the copy", "synchronize the copy"]


def test_a_read_waits_for_no_step(noted: tuple[DeviceKvCache, list[str]]) -> None:
    cache, notes = noted
    cache.read_blocks(0, [1, 2], memoryview(bytearray(NUM_BYTES)))
    assert notes == ["read blocks", "record the copy", "synchronize the copy"]
