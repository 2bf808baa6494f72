"""The verifier on hand-made rows, and mutants of it that the equality with plain sampling must catch."""

from typing import Any

import numpy as np
import pytest

from engine.sampling.distribution import TokenHistory
from engine.sampling.sampler import SampleRequest, sample_row
from engine.spec.verify import VerifyItem, verify
from engine.types import SamplingParams

VOCAB = 12


def _table(seed: int) -> np.ndarray:
    """Logits after each token: a first-order model."""
    return np.random.default_rng(seed).normal(0, 1.5, (VOCAB, VOCAB)).astype(np.float32)


def _plain(table: Any, params: SamplingParams, prompt: Any, count: int) -> Any:
    tokens = list(prompt)
    for _ in range(count):
        request = SampleRequest(params, TokenHistory(tokens, len(prompt)), frozenset({0}))
        tokens.append(sample_row(table[tokens[-1]], request))
    return tokens[len(prompt) :]


def _verify(table: Any, params: SamplingParams, prompt: Any, drafts: Any, function: Any = verify) -> Any:
    rows = table[[prompt[-1], *drafts]]
    request = SampleRequest(params, TokenHistory(list(prompt), len(prompt)), frozenset({0}))
    return function(rows, [VerifyItem(0, tuple(drafts), request)])[0]


PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.3, top_k=4),
    SamplingParams(temperature=1.0, top_p=0.8, min_p=0.05),
    SamplingParams(temperature=0.0, repetition_penalty=1.5),
    SamplingParams(temperature=0.7, presence_penalty=1.5, frequency_penalty=0.5),
    SamplingParams(temperature=1.0, logit_bias={3: 2.0}, bad_words=((1, 2), (4,))),
    SamplingParams(temperature=1.0, allowed_token_ids=frozenset({1, 2, 3, 5, 7})),
    SamplingParams(temperature=1.0, min_tokens=3),
]


def _with_seed(params: SamplingParams, seed: int) -> SamplingParams:
    return SamplingParams(**{name: getattr(params, name) for name in params.__slots__} | {"seed": seed})


@pytest.mark.parametrize("params", PARAMS)
def test_tokens_are_those_of_plain_sampling_however_good_the_guess(params: SamplingParams) -> None:
    for seed in range(60):
        table, seeded = _table(seed), _with_seed(params, seed)
        truth = _plain(table, seeded, [1, 5], 6)
        for num_right in range(6):
            wrong = [(truth[num_right] + 1) % VOCAB, 3]
            tokens = _verify(table, seeded, [1, 5], [*truth[:num_right], *wrong])
            assert list(tokens) == truth[: num_right + 1]
        assert list(_verify(table, seeded, [1, 5], truth[:5])) == truth


def test_sequences_of_one_step_do_not_mix() -> None:
    table, params = _table(3), SamplingParams(temperature=1.0, seed=9)
    prompts = [[1, 5], [2, 7], [3, 3]]
    drafts = [_plain(table, params, prompt, 4)[:count] for prompt, count in zip(prompts, (3, 0, 2), strict=True)]
    rows: list[Any] = []
    items: list[VerifyItem] = []
    for prompt, draft in zip(prompts, drafts, strict=True):
        request = SampleRequest(params, TokenHistory(prompt, 2), frozenset())
        items.append(VerifyItem(len(rows), tuple(draft), request))
        rows += [table[token] for token in [prompt[-1], *draft]]
    together = verify(np.stack(rows), items)
    assert [list(tokens) for tokens in together] == [
        _plain(table, params, prompt, len(draft) + 1) for prompt, draft in zip(prompts, drafts, strict=True)
    ]


def _accept_always(logits: np.ndarray[Any, np.dtype[np.float32]], items: Any) -> Any:
    return [(*item.draft_token_ids, verify(logits, [item])[0][-1]) for item in items]


def _forget_accepted_drafts_in_penalties(logits: np.ndarray[Any, np.dtype[np.float32]], items: Any) -> Any:
    tokens = []
    for item in items:
        for offset in range(len(item.draft_token_ids) + 1):
            tokens.append(sample_row(logits[item.first_row + offset], item.request))
            if offset == len(item.draft_token_ids) or tokens[-1] != item.draft_token_ids[offset]:
                break
    return [tuple(tokens)]


def _bonus_from_the_draft(logits: np.ndarray[Any, np.dtype[np.float32]], items: Any) -> Any:
    result = verify(logits, items)
    return [
        (*tokens[:-1], item.draft_token_ids[-1]) if len(tokens) > len(item.draft_token_ids) > 0 else tokens
        for tokens, item in zip(result, items, strict=True)
    ]


@pytest.mark.parametrize(
    "mutant", [_accept_always, _forget_accepted_drafts_in_penalties, _bonus_from_the_draft], ids=lambda f: f.__name__
)
def test_mutants_of_the_verifier_are_caught(mutant: Any) -> None:
    params = SamplingParams(temperature=0.8, repetition_penalty=1.4, frequency_penalty=0.6)
    differences = 0
    for seed in range(60):
        table, seeded = _table(seed), _with_seed(params, seed)
        truth = _plain(table, seeded, [1, 5], 6)
        for drafts in (truth[:5], [*truth[:2], (truth[2] + 1) % VOCAB]):
            tokens = list(_verify(table, seeded, [1, 5], drafts, mutant))
            differences += tokens != truth[: len(tokens)]
    assert differences > 10
