"""Draft heads on both tiers, on one of them or on none: the same tokens, and drafting goes on where prefill was."""

from pathlib import Path

import gguf
import pytest

from engine.engine import Engine
from engine.types import EngineRequest
from prefill_service.servicer import LayerListener
from tests.drafting import Drafting, make_drafting, make_plain
from tests.engine_driver import make_request, run_alone, run_to_end
from tests.tiny_models import write_tiny_gguf, write_tiny_model
from tests.worker_harness import Driver, run_decode, run_prefill


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_model(tmp_path_factory.mktemp("draft-head") / "llama", "llama")
    return write_tiny_gguf(folder, folder.with_suffix(".gguf"), gguf.GGMLQuantizationType.Q8_0)


def _requests() -> list[EngineRequest]:
    prompts = [range(4, 5), range(4, 40), range(9, 90)]
    fields = ({"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.9}, {"temperature": 0.0, "repetition_penalty": 1.2})
    return [
        make_request(index, prompt, **params | {"max_tokens": 24, "seed": index, "ignore_eos": True})
        for index, (prompt, params) in enumerate(zip(prompts, fields, strict=True), 1)
    ]


async def _hand_off(
    model: Path, requests: list[EngineRequest], transport: str, *, on_prefill: bool, on_decode: bool
) -> tuple[dict[int, list[int]], list[Drafting]]:
    """Run requests one after the other; returns their tokens and what drafted on decode."""
    drafting: list[Drafting] = []

    def decode_engine() -> Engine:
        if not on_decode:
            return make_plain(model)
        drafting.append(make_drafting(model))
        return drafting[0].engine

    def prefill_engine(listener: LayerListener) -> Engine:
        if not on_prefill:
            return make_plain(model, listener=listener)
        return make_drafting(model, drafter=None, listener=listener).engine

    tokens: dict[int, list[int]] = {}
    async with (
        run_decode(decode_engine, transport=transport) as decode,
        run_prefill(prefill_engine, transport=transport) as prefill,
    ):
        driver = Driver()
        await driver.connect(decode, prefill)
        for request in requests:
            tokens[request.request_id] = (await driver.generate(request)).token_ids
        await driver.close()
    return tokens, drafting


@pytest.mark.parametrize("transport", ["shm", "grpc"])
@pytest.mark.parametrize("on_decode", [True, False], ids=["decode", "-"])
@pytest.mark.parametrize("on_prefill", [True, False], ids=["prefill", "-"])
async def test_tokens_do_not_depend_on_which_tier_has_a_head(
    model: Path, on_prefill: bool, on_decode: bool, transport: str
) -> None:
    requests = _requests()
    expected = run_alone(make_plain(model), requests)
    tokens, drafting = await _hand_off(model, requests, transport, on_prefill=on_prefill, on_decode=on_decode)
    assert tokens == expected
    # A head whose KV did not come does not draft.
    drafted = sum(each.speculation.num_draft_tokens for each in drafting)
    assert (drafted > 0) == (on_prefill and on_decode)


async def test_drafts_after_a_hand_off_are_those_of_one_process(model: Path) -> None:
    request = make_request(1, range(4, 90), max_tokens=120, ignore_eos=True)
    alone = make_drafting(model)
    alone.engine.add(request)
    expected = run_to_end(alone.engine)
    tokens, drafting = await _hand_off(model, [request], "shm", on_prefill=True, on_decode=True)
    assert tokens == expected
    found = drafting[0].speculation
    assert found.num_draft_tokens == alone.speculation.num_draft_tokens
    assert found.num_accepted_tokens == alone.speculation.num_accepted_tokens > 0
