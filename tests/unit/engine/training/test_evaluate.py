"""Held-out figures against greedy drafting that is done one run after the other."""

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.training.corpus import Conversation
from engine.training.evaluate import NUM_POSITIONS, Evaluator, HeldOut
from engine.training.features import NUM_TEACHER_TOKENS, Features
from engine.training.head import DraftHead
from engine.training.target import TargetParts

VOCAB_IDS = torch.arange(0, 40, 2)


@pytest.fixture
def features(tmp_path: Path, target: TargetParts) -> Features:
    """Random hidden states, under which half of the tokens are the target's most likely ones."""
    generator = torch.Generator().manual_seed(9)
    conversations = []
    taps = torch.randn(3 * 40, 32, generator=generator).half()
    best = (target.output_features(taps[:, 16:].float()) @ target.lm_head.T).argmax(1)
    for number in range(3):
        tokens = torch.randint(40, (40,), generator=generator)
        is_best = torch.rand(39, generator=generator) < 0.7
        tokens[1:][is_best] = best[number * 40 : number * 40 + 39][is_best]
        conversations.append(Conversation(number, f"kind{number % 2}", tuple(tokens.tolist()), ((4, 15), (20, 40))))
    (tmp_path / "taps.f16").write_bytes(taps.numpy().tobytes())
    rows = sum(each.num_answer_tokens for each in conversations)
    (tmp_path / "teacher_ids.i16").write_bytes(np.zeros((rows, NUM_TEACHER_TOKENS), np.int16).tobytes())
    (tmp_path / "teacher_shares.f16").write_bytes(np.zeros((rows, NUM_TEACHER_TOKENS), np.float16).tobytes())
    return Features(tmp_path, conversations, VOCAB_IDS, 32)


def test_acceptance_is_that_of_drafting_from_every_row(features: Features, target: TargetParts) -> None:
    head = DraftHead(target, (0, 2), VOCAB_IDS)
    head.initialise(torch.Generator().manual_seed(0), torch.ones(2))
    with torch.no_grad():  # a head that foresees the last tap of the row it is at would always be right
        head.weights["fuse"].mul_(3)
    numbers = [0, 1, 2]
    measured = Evaluator(head, features, numbers).evaluate(head)

    tried, accepted = [0] * NUM_POSITIONS, [0] * NUM_POSITIONS
    for number in numbers:
        batch = features.batch([number])
        best = (target.output_features(batch.taps[:, 16:]) @ target.lm_head.T).argmax(1)
        steps = head.unroll(batch, NUM_POSITIONS)
        drafts = [dict(zip(step.rows.tolist(), _choices(head, step.hidden), strict=True)) for step in steps]
        for segment in batch.segments:
            for start in range(segment.first, segment.end):
                for position in range(NUM_POSITIONS):
                    row = start + position
                    if row >= segment.end:
                        break
                    tried[position] += 1
                    if drafts[position][row] != best[row]:
                        break
                    accepted[position] += 1
                    if row + 1 < len(batch.token_ids) and batch.token_ids[row + 1] != best[row]:
                        break
    expected = [hit / max(1, count) for hit, count in zip(accepted, tried, strict=True)]
    assert measured.acceptance == pytest.approx(expected)
    assert sum(accepted) > 0
    assert set(measured.acceptance_by_kind) == {"kind0", "kind1"}


def _choices(head: DraftHead, hidden: torch.Tensor) -> list[int]:
    chosen: list[int] = head.vocab_ids[(hidden @ head.output_rows.T).argmax(1)].tolist()
    return chosen


def test_accepted_drafts_are_the_sum_of_the_chances_to_get_so_far() -> None:
    held_out = HeldOut((0.5, 0.5, 1.0, 0.0, 0.0, 0.0), {})
    assert held_out.accepted_drafts(1) == pytest.approx(0.5)
    assert held_out.accepted_drafts(3) == pytest.approx(0.5 + 0.25 + 0.25)
    assert held_out.accepted_drafts(6) == pytest.approx(1.0)
