"""All sampling fields at their extremes and in combination: always a token or a typed error, and never an exception.

Whatever passes the checks goes through the real samplers, plain and native, which must give the same answer.
"""

import math
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request_checks import INT32_MAX, MIN_REPETITION_PENALTY, check_leaves_a_token, check_sampling_params
from engine.sampling.distribution import TokenHistory
from engine.sampling.rows import NumpyRows, RowSampler, row_sampler
from engine.sampling.sampler import SampleRequest
from engine.spec.sampling import HostSampler, NewTokens
from engine.spec.verify import VerifyItem
from engine.types import SamplingParams
from kvrelay.errors import EngineError, InvalidRequest
from kvrelay.values import TokenLogprob

VOCAB = 96
EOS = frozenset({2, 90})

_tokens = st.integers(-1, VOCAB)
_in_vocab = st.integers(0, VOCAB - 1)


def _floats(*values: float) -> st.SearchStrategy[float]:
    extremes = [0.0, -0.0, 1e-45, 1e-38, 3e-38, 9.9e-6, 1.1e-5, 1.0, 2.0, -2.0, 3.4e38, math.inf, -math.inf, math.nan]
    return st.sampled_from([*extremes, *values]) | st.floats(-3, 3, width=32)


def _ints(*values: int) -> st.SearchStrategy[int]:
    return st.sampled_from([0, 1, 2, VOCAB - 1, VOCAB, INT32_MAX, INT32_MAX + 1, 3_000_000_000, 2**32 - 1, *values])


EXTREMES: dict[str, st.SearchStrategy[object]] = {
    "max_tokens": st.sampled_from([0, 1, 5, INT32_MAX]),
    "min_tokens": st.sampled_from([0, 1, 4, INT32_MAX]),
    "temperature": _floats(0.7),
    "top_p": _floats(0.5, 0.9999999),
    "top_k": _ints(7),
    "min_p": _floats(0.05, 0.9999999),
    "seed": st.sampled_from([0, 1, 2**63, 2**64 - 1, 2**64, -1]),
    "repetition_penalty": _floats(1e-44, MIN_REPETITION_PENALTY, 1.3),
    "presence_penalty": _floats(0.5),
    "frequency_penalty": _floats(0.5),
    "stop_token_ids": st.frozensets(_tokens, max_size=4),
    "ignore_eos": st.booleans(),
    "logit_bias": st.dictionaries(_tokens, _floats(100.0, -100.0, 100.5), max_size=4),
    "allowed_token_ids": st.frozensets(_in_vocab, min_size=1, max_size=3),
    "bad_words": st.lists(st.lists(_in_vocab, min_size=1, max_size=2).map(tuple), max_size=4).map(tuple),
    "logprobs": st.sampled_from([0, 1, 20, 21]),
    "num_draft_tokens": _ints(),
}
UNBOUNDED = {"stop", "include_stop_str", "skip_special_tokens"}
"""Not the engine's business: the gateway cuts text."""


@st.composite
def params_at_extremes(draw: st.DrawFn) -> SamplingParams:
    """Some fields at an extreme, the others at their defaults: so most draws pass the checks, and some don't."""
    names = draw(st.lists(st.sampled_from(sorted(EXTREMES)), max_size=6, unique=True))
    return SamplingParams(**{name: draw(EXTREMES[name]) for name in names})  # type: ignore[arg-type]  # by name


PARAMS = params_at_extremes()
SPREADS = st.sampled_from([0.0, 1.0, 40.0, 1e4, 1e30])


@pytest.fixture(scope="module", name="native")
def fixture_native() -> RowSampler:
    sampler = row_sampler(1)
    assert not isinstance(sampler, NumpyRows)
    return sampler


def _sample(rows: RowSampler, logits: np.ndarray, items: list[VerifyItem]) -> list[NewTokens]:
    return HostSampler(rows).sample(torch.from_numpy(logits.copy()), items)


def _told(results: list[NewTokens]) -> list[tuple[object, ...]]:
    """All that is said of each row but logprobs, whose last digit is nobody's business."""
    ranks = [[(entry.token_id, entry.rank) for entry in _entries(one)] for one in results]
    return [(one.token_ids, rank, type(one.error), str(one.error)) for one, rank in zip(results, ranks, strict=True)]


def _entries(result: NewTokens) -> list[TokenLogprob]:
    return [entry for position in result.logprobs for entry in (position.sampled, *position.top)]


def test_every_field_is_drawn() -> None:
    assert set(EXTREMES) | UNBOUNDED == {field.name for field in fields(SamplingParams)}


@settings(max_examples=600, deadline=None)
@given(
    params=PARAMS,
    others=st.lists(PARAMS, max_size=2),
    spread=SPREADS,
    seed=st.integers(0, 2**31),
    history=st.lists(_in_vocab, min_size=1, max_size=6),
    drafts=st.lists(_in_vocab, max_size=2),
    poison=st.none() | st.sampled_from([math.nan, math.inf]),
)
def test_token_or_typed_error(
    native: RowSampler,
    params: SamplingParams,
    others: list[SamplingParams],
    spread: float,
    seed: int,
    history: list[int],
    drafts: list[int],
    poison: float | None,
) -> None:
    taken: list[SamplingParams] = []
    refused: list[str] = []
    for one in (params, *others):
        try:
            check_sampling_params(one, VOCAB)
            check_leaves_a_token(one, VOCAB, one.all_stop_ids(EOS))
        except InvalidRequest as error:
            refused.append(error.field)
        else:
            taken.append(one)
    assert all(field.startswith("sampling_params.") for field in refused)
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((len(taken) * (1 + len(drafts)), VOCAB)) * spread).astype(np.float32)
    if poison is not None and len(logits):
        logits[0, 5] = poison
    items = [
        VerifyItem(
            index * (1 + len(drafts)),
            tuple(drafts),
            SampleRequest(one, TokenHistory(history, 1), one.all_stop_ids(EOS)),
        )
        for index, one in enumerate(taken)
    ]
    plain = _sample(NumpyRows(), logits, items)
    fast = _sample(native, logits, items)
    assert _told(fast) == _told(plain)
    for left, right in zip(fast, plain, strict=True):
        pairs = zip(_entries(left), _entries(right), strict=True)
        assert all(math.isclose(one.logprob, other.logprob, rel_tol=1e-9, abs_tol=1e-9) for one, other in pairs)
    assert len(plain) == len(items)
    for item, result in zip(items, plain, strict=True):
        assert bool(result.token_ids) != isinstance(result.error, EngineError)
        assert all(0 <= token_id < VOCAB for token_id in result.token_ids)
        wanted = item.request.params
        if wanted.allowed_token_ids is not None:
            assert set(result.token_ids) <= wanted.allowed_token_ids
        if wanted.logprobs is not None and result.token_ids:
            assert len(result.logprobs) == len(result.token_ids)
