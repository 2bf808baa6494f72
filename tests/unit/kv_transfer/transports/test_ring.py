"""Space in a shared-memory ring: regions never overlap, and everything comes back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.transports.shm.ring import ALIGNMENT, RingAllocator
from kvrelay.errors import TransferError

SIZE = 1024


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 700)), max_size=60), st.sampled_from([None, 0, 256, SIZE]))
def test_live_regions_never_overlap_and_stay_inside(steps: list[tuple[bool, int]], warm_bytes: int | None) -> None:
    ring = RingAllocator(SIZE, warm_bytes)
    live: dict[int, int] = {}
    for is_allocation, number in steps:
        if is_allocation:
            offset = ring.allocate(number)
            if offset is None:
                assert live, "an empty ring has room for anything that fits it"
                continue
            assert 0 <= offset <= SIZE - number
            for other, length in live.items():
                assert offset + number <= other or other + length <= offset
            live[offset] = max(number, 1)
        elif live:
            offset = list(live)[number % len(live)]
            ring.free(offset)
            del live[offset]
        assert ring.num_live == len(live)
    for offset in live:
        ring.free(offset)
    assert ring.is_empty
    assert ring.allocate(SIZE) == 0


def test_room_is_reused_from_the_front_when_the_end_is_too_short() -> None:
    ring = RingAllocator(10 * ALIGNMENT)
    first, second, third = (ring.allocate(3 * ALIGNMENT) for _ in range(3))
    assert (first, second, third) == (0, 3 * ALIGNMENT, 6 * ALIGNMENT)
    assert ring.allocate(2 * ALIGNMENT) is None
    ring.free(0)
    assert ring.allocate(2 * ALIGNMENT) == 0
    assert ring.allocate(2 * ALIGNMENT) is None
    assert ring.allocate(1 * ALIGNMENT) == 2 * ALIGNMENT
    assert ring.allocate(1) is None


def test_a_receiver_that_keeps_up_sees_only_the_front_of_the_ring() -> None:
    ring = RingAllocator(100 * ALIGNMENT, 4 * ALIGNMENT)
    offsets = []
    live: list[int] = []
    for _ in range(20):
        offset = ring.allocate(ALIGNMENT)
        assert offset is not None
        offsets.append(offset)
        live.append(offset)
        if len(live) > 2:
            ring.free(live.pop(0))
    assert max(offsets) < 4 * ALIGNMENT


def test_a_receiver_that_lags_gets_the_rest_of_the_ring() -> None:
    ring = RingAllocator(100 * ALIGNMENT, 4 * ALIGNMENT)
    assert None not in [ring.allocate(ALIGNMENT) for _ in range(100)]
    assert ring.allocate(1) is None


def test_a_region_freed_out_of_turn_waits_for_the_older_ones() -> None:
    ring = RingAllocator(4 * ALIGNMENT)
    for _ in range(4):
        ring.allocate(ALIGNMENT)
    ring.free(ALIGNMENT)
    assert ring.allocate(ALIGNMENT) is None
    ring.free(0)
    assert ring.allocate(2 * ALIGNMENT) == 0


def test_freeing_what_is_not_there_is_an_error() -> None:
    ring = RingAllocator(SIZE)
    ring.allocate(100)
    ring.allocate(100)
    ring.free(128)
    for offset in (128, 1, 4096, -1):
        with pytest.raises(TransferError):
            ring.free(offset)
