"""The choice between layer-wise streaming and one frame set follows measured costs."""

import pytest

from kv_transfer.pace import PRIOR_BYTE_S, PRIOR_FRAME_S, FrameCost


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


def test_long_prompts_stream_and_short_ones_go_at_once() -> None:
    """Figures of a 30-layer model at 46 KiB a token, over a 2 GB/s path."""
    cost = FrameCost()
    assert cost.is_layerwise(1000 * 46_080, 30)
    assert not cost.is_layerwise(60 * 46_080, 30)


def test_a_slower_link_makes_shorter_prompts_stream() -> None:
    slow = observed(1e-4, 1e-8, [10_000, 1_000_000] * 20)
    assert slow.is_layerwise(60 * 46_080, 30)


def test_nonsense_times_leave_the_costs_usable() -> None:
    cost = observed(0.0, 0.0, [1000, 1_000_000] * 20)
    assert cost.per_frame_s >= 0.0
    assert cost.per_byte_s >= 0.0
    cost.observe(0, 0.0)
    for _ in range(100):
        cost.observe(0, 1e-3)
    assert cost.per_byte_s >= 0.0
