"""How much a frame waits for follows measured costs."""

import pytest

from kv_transfer.handoff.pace import PRIOR_BYTE_S, PRIOR_FRAME_S, FrameCost


def observed(per_frame_s: float, per_byte_s: float, sizes: list[int]) -> FrameCost:
    cost = FrameCost()
    for size in sizes:
        cost.observe(size, per_frame_s + per_byte_s * size)
    return cost


def test_costs_are_recovered_from_frames_of_different_sizes() -> None:
    cost = observed(3e-4, 5e-10, [100_000, 2_000_000, 500_000, 50_000] * 5)
    assert cost.per_frame_s == pytest.approx(3e-4, rel=1e-6)
    assert cost.per_byte_s == pytest.approx(5e-10, rel=1e-6)


def test_frames_of_one_size_still_teach_the_speed() -> None:
    cost = observed(PRIOR_FRAME_S, 1e-8, [1 << 20] * 20)
    assert cost.per_byte_s == pytest.approx(1e-8, rel=1e-3)


def test_a_few_frames_change_nothing() -> None:
    cost = observed(1.0, 1.0, [1000] * 3)
    assert (cost.per_frame_s, cost.per_byte_s) == (PRIOR_FRAME_S, PRIOR_BYTE_S)


def test_old_frames_are_forgotten() -> None:
    cost = observed(1e-4, 1e-8, [10_000, 1_000_000] * 100)
    for size in [10_000, 1_000_000] * 300:
        cost.observe(size, 2e-4 + 1e-9 * size)
    assert cost.per_byte_s == pytest.approx(1e-9, rel=0.01)


def test_no_other_frame_size_is_cheaper() -> None:
    """Frames on both sides, and the time of the bytes that leave after the last layer."""
    cost = observed(2e-4, 1e-9, [10_000, 1_000_000] * 20)
    num_bytes = 1000 * 46_080

    def total_s(size: int) -> float:
        return num_bytes / size * 2 * 2e-4 + size * 1e-9

    best = cost.frame_bytes(num_bytes)
    assert best is not None
    assert total_s(best) < min(total_s(size) for size in range(20_000, num_bytes, 10_000)) * 1.001


def test_long_prompts_stream_and_short_ones_go_at_the_end() -> None:
    """Figures of a 30-layer model at 46 KiB a token, over a 2 GB/s path."""
    assert FrameCost().frame_bytes(1000 * 46_080) is not None
    assert FrameCost().frame_bytes(60 * 46_080) is None


def test_a_slower_link_makes_shorter_prompts_stream() -> None:
    slow = observed(1e-4, 1e-8, [10_000, 1_000_000] * 20)
    assert slow.frame_bytes(60 * 46_080) is not None


def test_a_slower_link_makes_frames_smaller() -> None:
    slow = observed(1e-4, 1e-8, [10_000, 1_000_000] * 20)
    fast = FrameCost().frame_bytes(1000 * 46_080)
    assert (slow.frame_bytes(1000 * 46_080) or 0) < (fast or 0) / 2


def test_a_frame_is_never_larger_than_everything() -> None:
    costly = observed(1.0, 1e-7, [10_000, 1_000_000] * 20)
    assert costly.frame_bytes(1_000_000) == 1_000_000


def test_where_bytes_cost_nothing_all_go_at_the_end() -> None:
    free = observed(1e-4, 0.0, [10_000, 1_000_000] * 20)
    assert free.frame_bytes(1000 * 46_080) is None


def test_nonsense_times_leave_the_costs_usable() -> None:
    cost = observed(0.0, 0.0, [1000, 1_000_000] * 20)
    assert cost.per_frame_s >= 0.0
    assert cost.per_byte_s >= 0.0
    cost.observe(0, 0.0)
    for _ in range(100):
        cost.observe(0, 1e-3)
    assert cost.per_byte_s >= 0.0
