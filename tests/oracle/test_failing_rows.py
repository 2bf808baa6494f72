"""A row that gives no token ends its own sequence; the others of the step get the tokens that they get alone."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import engine.spec.verify as verify_module
from engine.engine import Engine
from engine.sampling.distribution import TokenHistory, process_logits
from engine.types import EngineRequest, RequestId, SamplingParams, SequenceOutput
from kvrelay.errors import InvalidRequest, NoTokenAllowed, SamplingFailed
from tests.engine_driver import make_engine, make_request, run_alone

FolderOf = Callable[[str], Path]

PROMPTS = [[5, 9, 14, 6], [7] * 20, [11, 3, 8]]


def _requests() -> list[EngineRequest]:
    sampled = {"temperature": 0.8, "seed": 3, "top_k": 40}
    return [
        make_request(index + 1, prompt, max_tokens=12, ignore_eos=True, **(sampled if index % 2 else {}))
        for index, prompt in enumerate(PROMPTS)
    ]


def _run(engine: Engine, requests: list[EngineRequest]) -> tuple[dict[int, list[int]], dict[int, SequenceOutput]]:
    """Tokens, and the output that failed, by request."""
    tokens: dict[int, list[int]] = {}
    failed: dict[int, SequenceOutput] = {}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.error is not None:
                failed[output.request_id] = output
        engine.scheduler.check_invariants()
    return tokens, failed


def _poison(engine: Engine, monkeypatch: pytest.MonkeyPatch, request_id: int, value: float) -> None:
    """From its fifth token on the model gives a request rows with one `value` in them."""
    forward = engine.model.forward

    def poisoned(batch: Any, *arguments: Any) -> torch.Tensor:
        logits = forward(batch, *arguments)
        sequences = [chunk.sequence for chunk in plans[-1].chunks if chunk.samples]
        for row, sequence in enumerate(sequences):
            if sequence.request_id == request_id and sequence.num_output_tokens >= 4:
                logits[row, 17] = value
        return logits

    plans: list[Any] = []
    plan = engine.scheduler.plan

    def kept(*arguments: Any) -> Any:
        plans.append(plan(*arguments))
        return plans[-1]

    monkeypatch.setattr(engine.scheduler, "plan", kept)
    monkeypatch.setattr(engine.model, "forward", poisoned)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("victim", [1, 2])
def test_logits_that_are_not_finite_end_one_sequence(
    tiny_folder: FolderOf, monkeypatch: pytest.MonkeyPatch, value: float, victim: int
) -> None:
    requests = _requests()
    alone = run_alone(make_engine(tiny_folder("llama")), requests)
    engine = make_engine(tiny_folder("llama"))
    _poison(engine, monkeypatch, victim, value)
    tokens, failed = _run(engine, requests)
    assert list(failed) == [victim]
    assert isinstance(failed[victim].error, SamplingFailed)
    assert tokens[victim] == alone[victim][:4]
    assert {rid: tokens[rid] for rid in tokens if rid != victim} == {r: alone[r] for r in alone if r != victim}
    assert engine.pool.num_free_blocks == engine.pool.num_blocks


def test_fields_that_ban_the_last_token_in_mid_flight_end_one_sequence(tiny_folder: FolderOf) -> None:
    """Two tokens are allowed and neither may follow the other twice: allowed at first, impossible soon."""
    requests = _requests()
    pairs = tuple(itertools.product((20, 21), repeat=2))
    trapped = make_request(9, [4, 5], max_tokens=12, allowed_token_ids=frozenset({20, 21}), bad_words=pairs)
    alone = run_alone(make_engine(tiny_folder("llama")), requests)
    tokens, failed = _run(make_engine(tiny_folder("llama")), [*requests, trapped])
    assert list(failed) == [9]
    error = failed[9].error
    assert isinstance(error, NoTokenAllowed)
    assert error.field == "sampling_params.allowed_token_ids"
    assert "bad_words" in error.description
    assert len(tokens[9]) == 1
    assert {rid: tokens[rid] for rid in alone} == alone


def test_defect_in_one_requests_fields_ends_one_sequence(
    tiny_folder: FolderOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever slips through the checks: an exception over one row is that row's."""
    requests = _requests()
    odd = make_request(9, [4, 5], max_tokens=12, logit_bias={3: 1.0}, ignore_eos=True)

    def broken(logits: Any, params: SamplingParams, history: TokenHistory, stop_ids: frozenset[int]) -> Any:
        if params.logit_bias and history.num_output_tokens == 3:
            raise IndexError("index 99999 is out of bounds")
        return process_logits(logits, params, history, stop_ids)

    monkeypatch.setattr(verify_module, "process_logits", broken)
    alone = run_alone(make_engine(tiny_folder("llama")), requests)
    tokens, failed = _run(make_engine(tiny_folder("llama")), [*requests, odd])
    assert list(failed) == [9]
    assert isinstance(failed[9].error, SamplingFailed)
    assert len(tokens[9]) == 3
    assert {rid: tokens[rid] for rid in alone} == alone


def test_failed_handoff_keeps_its_blocks_until_the_export_is_over(
    tiny_folder: FolderOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(tiny_folder("llama"))
    forward = engine.model.forward

    def not_finite(*arguments: Any) -> torch.Tensor:
        return torch.full_like(forward(*arguments), torch.nan)

    monkeypatch.setattr(engine.model, "forward", not_finite)
    engine.add_handoff(make_request(1, [5] * 20))
    (output,) = engine.step()
    assert isinstance(output.error, SamplingFailed)
    assert engine.load().num_parked == 1
    assert engine.pool.num_free_blocks < engine.pool.num_blocks
    engine.remove([RequestId(1)])
    assert engine.pool.num_free_blocks == engine.pool.num_blocks


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"top_k": 3_000_000_000}, "top_k"),
        ({"num_draft_tokens": 2**31}, "num_draft_tokens"),
        ({"repetition_penalty": 1e-44}, "repetition_penalty"),
        ({"temperature": float("nan")}, "temperature"),
        ({"seed": -1}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"bad_words": ((999_999,),)}, "bad_words[0]"),
        ({"bad_words": ((),)}, "bad_words[0]"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias[1]"),
        ({"stop_token_ids": frozenset({999_999})}, "stop_token_ids"),
        ({"allowed_token_ids": frozenset({2}), "min_tokens": 1}, "allowed_token_ids"),
        ({"allowed_token_ids": frozenset({5, 6}), "bad_words": ((5,), (6,))}, "allowed_token_ids"),
    ],
)
def test_engine_refuses_what_its_kernels_cannot_take(tiny_folder: FolderOf, fields: dict[str, Any], field: str) -> None:
    """It trusts no gateway: the same checks stand at its own door."""
    engine = make_engine(tiny_folder("llama"))
    for admit in (engine.add, engine.add_handoff, engine.reserve):
        with pytest.raises(InvalidRequest) as caught:
            admit(make_request(1, [5, 6, 7], **fields))
        assert caught.value.field == f"sampling_params.{field}"
    assert not engine.has_work


@pytest.mark.parametrize("temperature", [1e-38, 3e-38, 1e-6, 9e-6])
def test_tiny_temperature_is_greedy(tiny_folder: FolderOf, temperature: float) -> None:
    engine = make_engine(tiny_folder("llama"))
    greedy = run_alone(engine, [make_request(1, PROMPTS[0], ignore_eos=True)])
    assert run_alone(engine, [make_request(1, PROMPTS[0], temperature=temperature, ignore_eos=True)]) == greedy
