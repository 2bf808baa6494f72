"""Attention that is taught to find: it comes to look at the right rows, and the head then says what stands there."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from engine.training.finding import finding_loss, teach_finding
from engine.training.head import DraftHead, HeadBatch, Segment
from engine.training.target import TargetParts

VOCAB_SIZE, HIDDEN, LENGTH = 64, 96, 60


@pytest.fixture
def wide(target: TargetParts) -> TargetParts:
    """A target with room enough in its heads to tell 64 tokens apart."""
    config = replace(target.config, vocab_size=VOCAB_SIZE, hidden_size=HIDDEN, num_heads=4, num_kv_heads=2, head_dim=64)
    generator = torch.Generator().manual_seed(7)
    rows = torch.nn.functional.normalize(torch.randn(VOCAB_SIZE, HIDDEN, generator=generator)) * 4
    frequencies = 1e4 ** -(torch.arange(32) / 32)
    return TargetParts(config, rows, rows, torch.ones(HIDDEN), frequencies)


def _batches(target: TargetParts) -> Iterator[HeadBatch]:
    """Sequences that go round in loops of ten random tokens; the first tap says which token a row has, not the next."""
    generator = torch.Generator().manual_seed(3)
    while True:
        loops = [torch.randperm(VOCAB_SIZE, generator=generator)[:10] for _ in range(4)]
        tokens = torch.cat([loop.repeat(LENGTH // 10) for loop in loops])
        noise = torch.randn(len(tokens), HIDDEN, generator=generator)
        taps = torch.cat([target.embedding[tokens], noise], dim=1)
        starts = tuple(range(0, len(tokens), LENGTH))
        yield HeadBatch(tokens, taps, starts, tuple(Segment(each, each + 20, each + LENGTH - 1) for each in starts))


def _fresh(target: TargetParts) -> DraftHead:
    head = DraftHead(target, (0, 1), torch.arange(VOCAB_SIZE))
    head.initialise(torch.Generator().manual_seed(1), torch.ones(2))
    with torch.no_grad():
        head.weight("fuse.weight")[:, :HIDDEN] = torch.eye(
            HIDDEN
        )  # keys are made of features: let those know the token
    return head


def _loss(head: DraftHead, batch: HeadBatch) -> float:
    return float(finding_loss(head, batch, torch.float32).detach())


def _hits(head: DraftHead, batch: HeadBatch) -> float:
    (step,) = head.unroll(batch, 1)
    choices = (step.hidden @ head.output_rows.T).argmax(1)
    return float((choices == batch.token_ids[step.rows + 1]).float().mean())


def test_head_that_was_taught_follows_loops(wide: TargetParts) -> None:
    head, batches = _fresh(wide), _batches(wide)
    before, hits_before = _loss(head, next(batches)), _hits(head, next(batches))
    lines: list[str] = []
    teach_finding(head, batches, torch.Generator().manual_seed(2), torch.float32, 150, lines.append)
    assert len(lines) == 150
    assert before > 2.0
    assert _loss(head, next(batches)) < 0.5
    assert hits_before < 0.1
    assert _hits(head, next(batches)) > 0.8
    assert all(weight.grad is None for weight in head.parameters())


def test_head_that_finds_already_stays_as_it_is(wide: TargetParts) -> None:
    head, batches = _fresh(wide), _batches(wide)
    teach_finding(head, batches, torch.Generator().manual_seed(2), torch.float32, 150, lambda line: None)
    before = {name: weight.detach().clone() for name, weight in head.weights.items()}
    lines: list[str] = []
    teach_finding(head, batches, torch.Generator().manual_seed(4), torch.float32, 150, lines.append)
    assert not lines
    assert all(torch.equal(head.weights[name], weight) for name, weight in before.items())


def test_only_rows_whose_next_token_stands_in_the_context_count(wide: TargetParts) -> None:
    head = _fresh(wide)
    tokens = torch.tensor([1, 2, 3, 1, 2, 9, 4])
    taps = torch.randn(7, 2 * HIDDEN, generator=torch.Generator().manual_seed(0))
    # Behind rows 2 and 3 come tokens 1 and 2, seen before; what follows row 6 is not in the batch.
    assert len(head.find(HeadBatch(tokens, taps, (0,), (Segment(0, 0, 7),)))) == 2
    # A second sequence does not see the first one's tokens.
    assert len(head.find(HeadBatch(tokens, taps, (0, 3), (Segment(0, 0, 3), Segment(3, 3, 7))))) == 0


def test_only_the_finding_heads_learn_from_it(wide: TargetParts) -> None:
    head = _fresh(wide)
    finding_loss(head, next(_batches(wide)), torch.float32).backward()
    moved = {name for name, weight in head.weights.items() if weight.grad is not None and bool(weight.grad.any())}
    assert moved == {"q_proj", "k_proj"}
    key = head.weight("k_proj.weight").grad
    assert key is not None
    assert not key[64:].any()
