"""The unrolled head against the definition, one run and one row at a time."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from engine.spec.head import format as names
from engine.training.head import DraftHead, HeadBatch, Segment
from engine.training.target import TargetParts

NUM_STEPS = 3
LENGTHS = (9, 4, 7)
SEGMENTS = (Segment(0, 2, 5), Segment(0, 7, 9), Segment(9, 9, 13), Segment(13, 15, 16))
VOCAB_IDS = torch.tensor([1, 4, 5, 9, 20, 21, 39])


@pytest.fixture
def head(target: TargetParts) -> DraftHead:
    head = DraftHead(target, (0, 2), VOCAB_IDS)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in head.parameters():
            weight.normal_(0.3 if weight.dim() == 1 else 0.0, 0.3, generator=generator)
    return head


@pytest.fixture
def batch() -> HeadBatch:
    generator = torch.Generator().manual_seed(2)
    num_rows = sum(LENGTHS)
    return HeadBatch(
        torch.randint(40, (num_rows,), generator=generator),
        torch.randn(num_rows, 32, generator=generator),
        (0, 9, 13),
        SEGMENTS,
    )


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def _turn(head_values: Tensor, position: int, target: TargetParts) -> Tensor:
    angles = position * target.inverse_frequencies
    first, second = head_values.chunk(2, -1)
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
    )


def _run(head: DraftHead, tokens: Tensor, taps: Tensor, start: int, num_steps: int) -> list[Tensor]:
    """What the head gives for one sequence when it drafts on from row `start`, true features up to there."""
    target, config = head.target, head.target.config
    features = [torch.zeros(config.hidden_size), *(taps @ head.weight(names.FUSE).T)]
    previous = features[: start + 1]  # of the row before each row
    keys: list[Tensor] = []
    values: list[Tensor] = []
    given: list[Tensor] = []
    for row in range(start + num_steps):
        feature = previous[row] if row <= start else given[-1]
        own, newest, older = (
            _norm(target.embedding[tokens[each]], head.weight(names.EMBEDDING_NORM)) * (each >= 0)
            for each in (row, row - 1, row - 2)
        )
        x = torch.cat([own, _norm(feature, head.weight(names.FEATURE_NORM))])
        key = _turn((head.weight(names.K_PROJ) @ x).view(-1, config.head_dim), row, target)
        found = (head.weight(names.FIND_KEY) @ torch.cat([newest, older])).view(-1, config.head_dim)
        keys.append(torch.cat([found, key]))
        values.append((head.weight(names.V_PROJ) @ x).view(config.num_kv_heads, config.head_dim))
        query = _turn((head.weight(names.Q_PROJ) @ x).view(-1, config.head_dim), row, target)
        sought = (head.weight(names.FIND_QUERY) @ torch.cat([own, newest])).view(-1, config.head_dim)
        query = torch.cat([sought, query])
        attended = []
        for number in range(config.num_heads):
            kv = number // (config.num_heads // config.num_kv_heads)
            scores = torch.stack([query[number] @ each[kv] for each in keys]) / config.head_dim**0.5
            attended.append(sum(p * each[kv] for p, each in zip(scores.softmax(0), values, strict=True)))
        y = feature + head.weight(names.O_PROJ) @ torch.cat([torch.as_tensor(each) for each in attended])
        n = _norm(y, head.weight(names.MLP_NORM))
        inner = functional.silu(head.weight(names.GATE_PROJ) @ n) * (head.weight(names.UP_PROJ) @ n)
        g = y + head.weight(names.DOWN_PROJ) @ inner
        if row >= start:
            given.append(g)
    return [_norm(g, head.weight(names.OUTPUT_NORM)) for g in given]


def test_each_draft_step_is_what_drafting_from_that_row_gives(head: DraftHead, batch: HeadBatch) -> None:
    steps = head.unroll(batch, NUM_STEPS)
    bounds = [*batch.sequence_starts, len(batch.token_ids)]
    seen = 0
    for segment in batch.segments:
        begin = segment.sequence_start
        end = next(each for each in bounds if each > begin)
        tokens, taps = batch.token_ids[begin:end], batch.taps[begin:end]
        for row in range(segment.first, segment.end):
            expected = _run(head, tokens, taps, row - begin, min(NUM_STEPS, segment.end - row))
            for number, hidden in enumerate(expected):
                (place,) = torch.nonzero(steps[number].rows == row + number)[0].tolist()
                torch.testing.assert_close(steps[number].hidden[place], hidden, rtol=1e-4, atol=1e-4)
                seen += 1
    assert seen == sum(len(step.rows) for step in steps)


def test_products_in_bf16_stay_near_those_in_fp32(head: DraftHead, batch: HeadBatch) -> None:
    exact = torch.cat([step.hidden for step in head.unroll(batch, NUM_STEPS)])
    coarse = torch.cat([step.hidden for step in head.unroll(batch, NUM_STEPS, torch.bfloat16)])
    assert coarse.dtype == torch.float32
    assert 0 < (coarse - exact).norm() / exact.norm() < 0.02
    coarse.sum().backward()
    trained = [weight for weight in head.parameters() if weight.requires_grad]
    assert all(weight.grad is not None and weight.grad.dtype == torch.float32 for weight in trained)


def test_sequences_beside_it_do_not_change_a_row(head: DraftHead, batch: HeadBatch) -> None:
    together = head.unroll(batch, 2)
    alone = head.unroll(HeadBatch(batch.token_ids[9:13], batch.taps[9:13], (0,), (Segment(0, 0, 4),)), 2)
    for many, one in zip(together, alone, strict=True):
        inside = (many.rows >= 9) & (many.rows < 13)
        torch.testing.assert_close(many.hidden[inside], one.hidden)


def test_later_tokens_do_not_change_a_row(head: DraftHead, batch: HeadBatch) -> None:
    changed = batch.token_ids.clone()
    changed[8] = (changed[8] + 1) % 40
    before, after = (
        head.unroll(HeadBatch(tokens, batch.taps, batch.sequence_starts, batch.segments), 1)[0]
        for tokens in (batch.token_ids, changed)
    )
    is_earlier = before.rows < 8
    assert torch.equal(before.hidden[is_earlier], after.hidden[is_earlier])
    assert not torch.equal(before.hidden[before.rows == 8], after.hidden[after.rows == 8])


def test_fresh_head_starts_from_the_last_tap(target: TargetParts, batch: HeadBatch) -> None:
    head = DraftHead(target, (0, 2), VOCAB_IDS)
    head.initialise(torch.Generator().manual_seed(0), torch.ones(2))
    (step,) = head.unroll(batch, 1)
    # What the output rows would read of the hidden state one position earlier.
    expected = functional.normalize(batch.taps[step.rows[:3] - 1, 16:] * target.final_norm)
    assert (functional.cosine_similarity(step.hidden[:3], expected) > 0.9).all()
