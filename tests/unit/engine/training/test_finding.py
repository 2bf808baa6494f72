"""Heads that find: built, not trained, they look at what followed the newest two tokens before, whatever tokens."""

from dataclasses import replace

import pytest
import torch

from engine.spec.head import format as names
from engine.training.finding import build_finding
from engine.training.head import DraftHead, HeadBatch, Segment
from engine.training.target import TargetParts

VOCAB_SIZE, HIDDEN, NUM_KNOWN = 256, 96, 200


@pytest.fixture
def wide(target: TargetParts) -> TargetParts:
    """A target with room enough in its heads to tell its tokens apart."""
    config = replace(target.config, vocab_size=VOCAB_SIZE, hidden_size=HIDDEN, num_heads=6, num_kv_heads=2, head_dim=64)
    generator = torch.Generator().manual_seed(7)
    rows = torch.nn.functional.normalize(torch.randn(VOCAB_SIZE, HIDDEN, generator=generator)) * 4
    return TargetParts(config, rows, rows, torch.ones(HIDDEN), 1e4 ** -(torch.arange(32) / 32))


def _built(target: TargetParts, num_known: int = NUM_KNOWN) -> DraftHead:
    """A head that can propose the first tokens only; its features tell nothing."""
    head = DraftHead(target, (0, 1), torch.arange(num_known))
    head.initialise(torch.Generator().manual_seed(1), torch.ones(2))
    build_finding(head, torch.randn(50, 2 * HIDDEN, generator=torch.Generator().manual_seed(5)))
    return head


def _choices(head: DraftHead, token_ids: list[int], num_steps: int = 1) -> list[int]:
    """The head's choices behind the last token, with noise for features, one for each draft step along the text."""
    taps = torch.randn(len(token_ids), 2 * HIDDEN, generator=torch.Generator().manual_seed(3)) * 0.1
    batch = HeadBatch(torch.tensor(token_ids), taps, (0,), (Segment(0, len(token_ids) - num_steps, len(token_ids)),))
    steps = head.unroll(batch, num_steps)
    return [int(head.vocab_ids[(step.hidden[-1] @ head.output_rows.T).argmax()]) for step in steps]


@pytest.mark.parametrize("seed", range(5))
def test_text_that_comes_again_is_followed(wide: TargetParts, seed: int) -> None:
    """Also behind tokens that the head has no codes of: the lookup compares embeddings, not ids it was built for."""
    text = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))[:60].tolist()
    head, place = _built(wide), next(at for at in range(20, 60) if text[at] < NUM_KNOWN)
    assert _choices(head, text + text[:place]) == [text[place]]


def test_the_token_before_decides_between_two_places(wide: TargetParts) -> None:
    head = _built(wide)
    text = [1, 2, 3, 9, 4, 2, 5, 9]
    assert _choices(head, [*text, 1, 2]) == [3]
    assert _choices(head, [*text, 4, 2]) == [5]


def test_later_drafts_find_as_well(wide: TargetParts) -> None:
    head = _built(wide)
    text = torch.randperm(NUM_KNOWN, generator=torch.Generator().manual_seed(2))[:40].tolist()
    assert _choices(head, text + text[:20], num_steps=3) == [text[20]] * 3


def test_sequences_do_not_find_in_one_another(wide: TargetParts) -> None:
    head = _built(wide)
    tokens, taps = torch.tensor([1, 2, 3, 4, 1, 2]), torch.zeros(6, 2 * HIDDEN)
    alone = head.unroll(HeadBatch(tokens[4:], taps[4:], (0,), (Segment(0, 0, 2),)), 1)[0].hidden
    among = head.unroll(HeadBatch(tokens, taps, (0, 4), (Segment(4, 4, 6),)), 1)[0].hidden
    torch.testing.assert_close(among, alone, rtol=1e-4, atol=1e-4)


def test_training_leaves_what_is_built_alone(wide: TargetParts) -> None:
    head = _built(wide)
    step = head.unroll(HeadBatch(torch.tensor([1, 2, 3]), torch.ones(3, 2 * HIDDEN), (0,), (Segment(0, 0, 3),)), 1)[0]
    step.hidden.square().sum().backward()
    untouched = {name for name in (names.FIND_QUERY, names.FIND_KEY) if head.weight(name).grad is None}
    assert untouched == {names.FIND_QUERY, names.FIND_KEY}
    assert head.weight(names.O_PROJ).grad is not None


def test_target_with_one_kv_head_has_no_finding_heads(wide: TargetParts) -> None:
    head = _built(replace(wide, config=replace(wide.config, num_kv_heads=1)))
    assert names.FIND_QUERY.removesuffix(".weight") not in head.weights
    batch = HeadBatch(torch.tensor([1, 2, 3]), torch.ones(3, 2 * HIDDEN), (0,), (Segment(0, 0, 3),))
    assert head.unroll(batch, 2)[1].hidden.shape == (2, HIDDEN)
