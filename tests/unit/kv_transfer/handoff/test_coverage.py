"""Coverage: what was accounted for, and a digest that does not depend on the order."""

import itertools

import pytest

from kv_transfer.blocks import BlockRange
from kv_transfer.handoff.coverage import Coverage
from kvrelay.errors import TransferError


def test_coverage_is_complete_when_every_cell_is_there() -> None:
    coverage = Coverage(3, 10, 4)
    assert coverage.num_missing == 12
    assert coverage.add(BlockRange(10, 4, 0, 2), 1)
    assert coverage.add(BlockRange(10, 1, 2, 1), 2)
    before = coverage.is_complete
    assert coverage.add(BlockRange(11, 3, 2, 1), 3)
    assert (before, coverage.is_complete) == (False, True)
    assert (coverage.num_missing, coverage.num_frames) == (0, 3)
    coverage.check_invariants()


def test_a_repeated_range_counts_once() -> None:
    coverage = Coverage(1, 0, 2)
    assert coverage.add(BlockRange(0, 1, 0, 1), 1)
    assert not coverage.add(BlockRange(0, 1, 0, 1), 1)
    assert coverage.num_missing == 1
    with pytest.raises(TransferError, match="twice"):
        coverage.add(BlockRange(0, 1, 0, 1), 2)


@pytest.mark.parametrize(
    "blocks",
    [
        BlockRange(4, 1, 0, 1),
        BlockRange(5, 3, 0, 1),
        BlockRange(7, 1, 0, 1),
        BlockRange(5, 1, 1, 2),
        BlockRange(5, 1, 2, 1),
    ],
)
def test_ranges_outside_the_handoff_are_refused(blocks: BlockRange) -> None:
    coverage = Coverage(2, 5, 2)
    with pytest.raises(TransferError, match="outside"):
        coverage.add(blocks, 1)
    assert coverage.num_cells == 0


def test_overlaps_are_refused() -> None:
    coverage = Coverage(2, 0, 4)
    coverage.add(BlockRange(1, 2, 0, 2), 1)
    for blocks in (BlockRange(0, 2, 0, 1), BlockRange(2, 1, 1, 1), BlockRange(0, 4, 0, 2)):
        with pytest.raises(TransferError, match="overlap"):
            coverage.add(blocks, 1)
    assert coverage.add(BlockRange(3, 1, 0, 2), 1)
    coverage.check_invariants()


def test_the_digest_depends_on_content_and_place_but_not_on_order() -> None:
    frames = [(BlockRange(0, 1, 0, 1), 11), (BlockRange(1, 1, 0, 1), 22), (BlockRange(0, 2, 1, 1), 33)]

    def digest(frames: list[tuple[BlockRange, int]]) -> int:
        coverage = Coverage(2, 0, 2)
        for blocks, number in frames:
            coverage.add(blocks, number)
        return coverage.digest()

    digests = {digest(list(order)) for order in itertools.permutations(frames)}
    assert len(digests) == 1
    swapped = [(frames[0][0], 22), (frames[1][0], 11), frames[2]]
    assert digest(swapped) not in digests
    assert digest(frames[:2]) not in digests


def test_broken_books_are_noticed() -> None:
    coverage = Coverage(1, 0, 2)
    coverage.add(BlockRange(0, 1, 0, 1), 1)
    coverage.num_cells = 2
    with pytest.raises(RuntimeError):
        coverage.check_invariants()
