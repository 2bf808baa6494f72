"""Workers with a draft head, from their settings: which head, what it needs of the cache, what happens without one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from decode_service.settings import DecodeSettings
from engine.model.files.open import load_config
from engine.spec.head.format import load_head
from engine.spec.head.loader import shipped_heads
from engine.spec.head.port import NUM_STATE_TOKENS
from engine.training.settings import TrainingSettings
from kvrelay.errors import InvalidRequest
from prefill_service.settings import PrefillSettings
from tests.engine_driver import make_request, run_to_end
from tests.tiny_heads import write_tiny_head
from worker.compute.bootstrap import build_engine
from worker.settings import WorkerSettings


def _settings(kind: type[WorkerSettings], model: Path, **fields: Any) -> WorkerSettings:
    return kind.model_validate({"model": str(model), "num_blocks": 64, "threads": 1, "device": "cpu"} | fields)


@pytest.fixture
def head(tiny_folder: Callable[[str], Path], tmp_path: Path) -> str:
    return str(write_tiny_head(tmp_path / "head.safetensors", load_config(str(tiny_folder("llama")))))


@pytest.mark.parametrize("speculation", ["eagle", "auto"])
def test_decode_drafts_with_the_named_head(tiny_folder: Callable[[str], Path], head: str, speculation: str) -> None:
    request = make_request(1, range(4, 30), max_tokens=30, ignore_eos=True)
    tokens = []
    for fields in ({"speculation": "none"}, {"speculation": speculation, "draft_head": head}):
        engine = build_engine(_settings(DecodeSettings, tiny_folder("llama"), **fields))
        assert engine.kv_cache.layout.num_draft_layers == (fields["speculation"] != "none")
        engine.add(request)
        tokens.append(run_to_end(engine))
    assert tokens[0] == tokens[1]


def test_prefill_runs_the_head_and_drafts_nothing(tiny_folder: Callable[[str], Path], head: str) -> None:
    engine = build_engine(_settings(PrefillSettings, tiny_folder("llama"), speculation="eagle", draft_head=head))
    engine.add_handoff(make_request(1, range(4, 30)))
    outputs = engine.step()
    assert len(outputs[0].draft_state) == 4 * (64 + NUM_STATE_TOKENS)
    assert engine.kv_cache.layout.num_draft_layers == 1


def test_auto_without_a_head_looks_up(tiny_folder: Callable[[str], Path]) -> None:
    engine = build_engine(_settings(DecodeSettings, tiny_folder("llama"), speculation="auto"))
    assert engine.kv_cache.layout.num_draft_layers == 0
    engine.add(make_request(1, [*range(4, 12)] * 3, max_tokens=10, ignore_eos=True))
    assert len(run_to_end(engine)[1]) == 10


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"speculation": "eagle"}, "none of those"),
        ({"speculation": "eagle", "draft_head": "/nowhere"}, "no such file"),
        ({"speculation": "auto", "draft_head": "/nowhere"}, "no such file"),
    ],
)
def test_a_head_that_was_asked_for_must_be_there(
    tiny_folder: Callable[[str], Path], fields: dict[str, str], reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        build_engine(_settings(DecodeSettings, tiny_folder("llama"), **fields))
    assert caught.value.field == "draft_head"


def test_shipped_heads_fit_the_model_they_are_named_for(smollm2_gguf: Path) -> None:
    config = load_config(str(smollm2_gguf))
    for path in shipped_heads():
        assert path.name.startswith("smollm2-135m")
        assert load_head(path, config).vocab_ids.shape[0] == TrainingSettings().vocab_size < config.vocab_size / 3
        assert path.stat().st_size <= 12_000_000
