"""Sampling on the device: the same tokens as the CPU path for the same logits, for every sampling field."""

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.kernels import reference_sampling
from engine.kernels.triton.sampling import sample_rows
from engine.kernels.triton.sampling_rows import SamplingRow, SamplingRows
from engine.sampling import noise
from engine.sampling.distribution import TokenHistory
from engine.sampling.sampler import SampleRequest
from engine.spec.device_sampling import DeviceSampler, position_logprobs
from engine.spec.sampling import HostSampler, NewTokens
from engine.spec.verify import VerifyItem, verify
from engine.types import SamplingParams
from kvrelay.errors import SamplingFailed

CPU = torch.device("cpu")


def logits_of(num_rows: int, vocab_size: int, *, spread: float = 2.0, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


def history(length: int, vocab_size: int, seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, vocab_size, length).tolist())


def on_cpu(logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    items = [item_of(row, index) for index, row in enumerate(rows)]
    return [token_id for (token_id,) in verify(logits.numpy(), items)]


def item_of(row: SamplingRow, first_row: int, draft_token_ids: tuple[int, ...] = ()) -> VerifyItem:
    request = SampleRequest(row.params, TokenHistory(row.token_ids, row.num_prompt_tokens), row.stop_ids)
    return VerifyItem(first_row, draft_token_ids, request)


def on_device(logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    found = sample_rows(logits.clone(), SamplingRows.build(rows, logits.shape[1], CPU))
    assert found.is_valid.all()
    return found.token_ids.tolist()


def rows_with(params: Sequence[SamplingParams], vocab_size: int, *, length: int = 12) -> list[SamplingRow]:
    return [
        SamplingRow(p, history(length + index, vocab_size, index), length // 2, frozenset({0, 5}))
        for index, p in enumerate(params)
    ]


def seeded(params: SamplingParams, count: int = 1) -> list[SamplingParams]:
    rng = np.random.default_rng(7)
    return [replace(params, seed=int(rng.integers(0, 2**64, dtype=np.uint64))) for _ in range(count)]


def changed(params: object) -> str:
    """The fields that are not at their defaults."""
    assert isinstance(params, SamplingParams)
    names = [
        field.name for field in fields(params) if getattr(params, field.name) != getattr(SamplingParams(), field.name)
    ]
    return ",".join(f"{name}={getattr(params, name)}" for name in names) or "defaults"


CASES = [
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=5.0),
    SamplingParams(top_k=1),
    SamplingParams(top_k=7),
    SamplingParams(temperature=0.8, top_k=100000),
    SamplingParams(top_p=0.9),
    SamplingParams(temperature=1.5, top_p=0.05),
    SamplingParams(min_p=0.2),
    SamplingParams(temperature=2.0, min_p=1.0),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.8),
    SamplingParams(temperature=1.3, top_k=50, top_p=0.5, min_p=0.01),
    SamplingParams(repetition_penalty=1.7),
    SamplingParams(temperature=0.0, presence_penalty=1.3, frequency_penalty=-0.7),
    SamplingParams(repetition_penalty=0.6, presence_penalty=-1.0, frequency_penalty=0.9, top_k=30),
    SamplingParams(logit_bias={3: 9.5, 17: -100.0, 250: 8.0}),
    SamplingParams(temperature=0.0, logit_bias={3: 30.0}, bad_words=((3,),)),
    SamplingParams(allowed_token_ids=frozenset({1, 2, 31, 32, 63, 64, 200})),
    SamplingParams(min_tokens=100, logit_bias={5: 50.0}, top_p=0.9),
]


@pytest.mark.parametrize("params", CASES, ids=changed)
def test_tokens_equal_those_of_the_cpu_path(params: SamplingParams) -> None:
    vocab_size = 257
    logits, rows = logits_of(6, vocab_size), rows_with(seeded(params, 6), vocab_size)
    assert on_device(logits, rows) == on_cpu(logits, rows)


def test_mixed_rows_over_several_chunks_equal_the_cpu_path() -> None:
    vocab_size = 5003
    params = [seeded(case)[0] for case in CASES]
    logits, rows = logits_of(len(params), vocab_size, seed=3), rows_with(params, vocab_size)
    assert on_device(logits, rows) == on_cpu(logits, rows)


def test_bad_words_are_banned_only_behind_their_prefix() -> None:
    params = SamplingParams(temperature=0.0, bad_words=((4, 5, 6), (4, 7, 8)))
    logits = torch.zeros(1, 64)
    logits[0, 6], logits[0, 8], logits[0, 9] = 3.0, 2.0, 1.0
    rows = [SamplingRow(params, (1, 4, 5), 1, frozenset())]
    assert on_device(logits, rows) == on_cpu(logits, rows) == [8]


TIES = [
    SamplingParams(top_k=5),
    SamplingParams(top_p=0.3),
    SamplingParams(top_k=9, top_p=0.4, min_p=0.5),
    SamplingParams(temperature=0.0),
]


@pytest.mark.parametrize("params", TIES, ids=changed)
def test_ties_go_to_the_smaller_token(params: SamplingParams) -> None:
    """All weights are equal, or there are only a few different ones: what top_k and top_p keep is decided by ids."""
    flat = torch.zeros(4, 300)
    steps = (logits_of(4, 300) * 0.8).round()
    steps[steps == 0] = -0.0  # which must not differ from 0
    steps[:, ::3] += 0.0
    for logits in (flat, steps):
        rows = rows_with(seeded(params, 4), 300)
        assert on_device(logits, rows) == on_cpu(logits, rows)


def test_noise_is_that_of_the_cpu_path() -> None:
    ids = np.arange(0, 500_000, 997)
    for seed, position in ((0, 0), (2**64 - 1, 131_071), (0x0123456789ABCDEF, 17)):
        wanted = noise.gumbel_noise(seed, position, ids)
        found = reference_sampling.gumbel_noise(seed, position, torch.from_numpy(ids))
        assert found.numpy() == pytest.approx(wanted, rel=1e-14)


def test_oracle_equals_the_cpu_path() -> None:
    params = [seeded(case)[0] for case in CASES[:13]]  # those without edits
    logits, rows = logits_of(len(params), 400), rows_with(params, 400)
    built = SamplingRows.build(rows, 400, CPU)
    found = reference_sampling.sample_rows(
        logits, built.temperature, built.top_k, built.top_p, built.log_min_p, built.seeds, built.positions
    )
    assert found.tolist() == on_cpu(logits, rows)


@pytest.mark.parametrize("value", [float("-inf"), float("nan")])
def test_rows_without_a_token_are_told(value: float) -> None:
    logits = logits_of(3, 100)
    logits[1] = value if value != value else float("-inf")
    logits[1, 50] = value
    rows = rows_with(seeded(SamplingParams(top_k=3, top_p=0.9), 3), 100)
    found = sample_rows(logits.clone(), SamplingRows.build(rows, 100, CPU))
    assert found.is_valid.tolist() == [True, False, True]
    good = [0, 2]
    assert found.token_ids[good].tolist() == on_cpu(logits[good], [rows[index] for index in good])


def test_no_rows_and_wrong_masks() -> None:
    assert sample_rows(torch.empty(0, 50), SamplingRows.build([], 50, CPU)).token_ids.shape == (0,)
    rows = rows_with(seeded(SamplingParams(allowed_token_ids=frozenset({1}))), 100)
    with pytest.raises(ValueError, match="mask is for other logits"):
        sample_rows(logits_of(1, 200), SamplingRows.build(rows, 100, CPU))


def sampled_by_both(logits: Tensor, items: Sequence[VerifyItem]) -> tuple[list[NewTokens], list[NewTokens]]:
    return DeviceSampler().sample(logits.clone(), items), HostSampler().sample(logits.clone(), items)


@pytest.mark.parametrize("params", [*CASES[:3], CASES[12], CASES[15], *CASES[17:]], ids=changed)
def test_device_sampler_verifies_drafts_as_the_host_does(params: SamplingParams) -> None:
    """Drafts are right at first, in part or not at all; rows of different sequences stand side by side."""
    vocab_size = 257
    logits = logits_of(9, vocab_size, spread=3.0)
    row = rows_with(seeded(replace(params, logprobs=None)), vocab_size)[0]
    true = list(row.token_ids)
    for place in range(3):  # what comes after the history, one token after the other
        here = replace(row, token_ids=tuple(true))
        true += on_cpu(logits[place : place + 1], [here])
    drafts = tuple(true[len(row.token_ids) :][:2])
    items = [
        item_of(row, 0, drafts),
        item_of(row, 3, ((drafts[0] + 1) % vocab_size,)),
        item_of(row, 5),
        item_of(row, 6, (drafts[0], (drafts[1] + 1) % vocab_size)),
    ]
    logits[6:9] = logits[0:3]
    found, wanted = sampled_by_both(logits, items)
    assert found == wanted
    assert len(found[0].token_ids) == 3
    assert len(found[3].token_ids) == 2


def test_device_sampler_reports_the_logprobs_of_the_host() -> None:
    vocab_size = 97
    logits = logits_of(5, vocab_size).round()  # many ties
    logits[2, :4] = torch.tensor([-0.0, 0.0, -0.0, 0.0])
    base = seeded(SamplingParams(logit_bias={3: 5.0}, top_k=9))[0]
    rows = rows_with([replace(base, logprobs=count) for count in (0, 4, None, 97)], vocab_size)
    items = [item_of(rows[0], 0), item_of(rows[1], 1, (4,)), item_of(rows[2], 3), item_of(rows[3], 4)]
    for mine, other in zip(*sampled_by_both(logits, items), strict=True):
        assert mine.token_ids == other.token_ids
        assert len(mine.logprobs) == len(other.logprobs)
        for found, wanted in zip(mine.logprobs, other.logprobs, strict=True):
            for left, right in zip((found.sampled, *found.top), (wanted.sampled, *wanted.top), strict=True):
                assert (left.token_id, left.rank) == (right.token_id, right.rank)
                assert left.logprob == pytest.approx(right.logprob, rel=1e-12)


def test_device_sampler_minds_only_rows_that_decide() -> None:
    """A row behind a wrong draft may hold anything; one that decides and gives nothing fails its own sequence only."""
    logits = logits_of(2, 50)
    logits[1] = float("nan")
    row = rows_with([SamplingParams(temperature=0.0)], 50)[0]
    best = int(logits[0].argmax())
    found, wanted = sampled_by_both(logits, [item_of(row, 0, ((best + 1) % 50,))])
    assert found == wanted == [NewTokens((best,))]
    # Behind a right draft it would decide the next token: what came before it stands, the next step tells of it.
    assert sampled_by_both(logits, [item_of(row, 0, (best,))]) == ([NewTokens((best,))], [NewTokens((best,))])
    # Where it decides the first, its sequence has nothing; beside it stands one that has nothing to do with it.
    logits = torch.cat([logits, logits_of(1, 50)])
    items = [item_of(row, 1), item_of(row, 2)]
    for results in sampled_by_both(logits, items):
        failed, unharmed = results
        assert failed.token_ids == ()
        assert isinstance(failed.error, SamplingFailed)
        assert unharmed == NewTokens((int(logits[2].argmax()),))
    assert DeviceSampler().sample(torch.empty(0, 50), []) == []


def test_logprobs_of_one_row_do_not_depend_on_the_others() -> None:
    logits = logits_of(3, 64)
    together = position_logprobs(logits, [5, 6, 7], [0, 3, 1])
    alone = [position_logprobs(logits[row : row + 1], [5 + row], [count])[0] for row, count in enumerate((0, 3, 1))]
    assert together == alone
