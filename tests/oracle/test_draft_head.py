"""Draft heads: the torch one is the definition, the native one is close to it, and row-exact to the bit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import gguf
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from engine.cache.layout import KvLayout
from engine.config import KvDtype
from engine.model.batch import SequenceRows, build_batch
from engine.model.cpu.model import NativeModel
from engine.model.interface import LayerTaps
from engine.model.kv_cache import KvCache
from engine.model.llama import LlamaModel
from engine.model.loader import load_model
from engine.spec.head.eager import TorchDraftHead
from engine.spec.head.format import DraftHeadFile
from engine.spec.head.loader import load_draft_head
from engine.spec.head.native import NativeDraftHead
from engine.spec.head.port import DraftHead, RunLimits
from engine.types import BlockId
from kvrelay.errors import InvalidRequest
from tests.oracle.native_runs import prompt_ids
from tests.tiny_heads import make_tiny_head, write_tiny_head
from tests.tiny_models import write_tiny_gguf

BLOCK_SIZE = 16
MAX_ROUNDING_COST = 0.15
"""Of logits, in the 2-norm: 8-bit activations and weights of the target, 4-bit weights of the head."""


@dataclass(slots=True)
class Line:
    """One sequence's tokens, blocks and newest state."""

    token_ids: list[int]
    block_table: list[BlockId]
    states: list[Tensor] = field(default_factory=list)
    """Behind each computed position, [state_size]."""


class HeadRun:
    """A target and a head over one cache."""

    def __init__(self, model: LlamaModel | NativeModel, head: DraftHead, dtype: KvDtype = KvDtype.FP32) -> None:
        config = model.config
        self.model, self.head = model, head
        layout = KvLayout("", config.num_layers + 1, config.num_kv_heads, config.head_dim, BLOCK_SIZE, dtype)
        self.cache = KvCache(layout, 64, torch.device("cpu"))
        self._num_blocks = 0

    def add(self, token_ids: Sequence[int], room: int = 16) -> Line:
        count = -(-(len(token_ids) + room) // BLOCK_SIZE)
        first = self._num_blocks
        self._num_blocks += count
        return Line(list(token_ids), [BlockId(first + index) for index in range(count)])

    def prefill(self, work: Sequence[tuple[Line, int]]) -> None:
        """Compute so many further tokens of each sequence in one step."""
        parts = [
            SequenceRows(
                line.token_ids[len(line.states) : len(line.states) + count],
                len(line.states),
                line.block_table,
                0,
            )
            for line, count in work
        ]
        batch = build_batch(parts, BLOCK_SIZE)
        hidden = self.model.config.hidden_size
        taps = LayerTaps(self.head.tap_layers, torch.empty(len(batch.token_ids), len(self.head.tap_layers), hidden))
        self.model.forward(batch, self.cache, None, taps)
        nothing = torch.zeros(self.head.state_size)
        carried = torch.stack([line.states[-1] if line.states else nothing for line, _ in work])
        rows = iter(self.head.absorb(batch, taps.values, carried, self.cache))
        for line, count in work:
            line.states += [next(rows) for _ in range(count)]

    def prefill_alone(self, line: Line, chunk: int) -> None:
        while (left := len(line.token_ids) - len(line.states)) > 0:
            self.prefill([(line, min(chunk, left))])

    def draft(self, lines: Sequence[Line], first_ids: Sequence[int], count: int) -> Tensor:
        """Draft `count` tokens greedily behind `first_ids`; returns logits [count, num_lines, vocabulary ids]."""
        previous = torch.stack([line.states[-1] for line in lines])
        token_ids = list(first_ids)
        found: list[Tensor] = []
        for offset in range(count):
            parts = [
                SequenceRows([token_id], len(line.states) + offset, line.block_table, 1)
                for line, token_id in zip(lines, token_ids, strict=True)
            ]
            rows = self.head.draft(build_batch(parts, BLOCK_SIZE), previous, self.cache)
            previous = rows.states
            found.append(torch.from_numpy(rows.logits.copy()))
            token_ids = [int(self.head.vocab_ids[best]) for best in rows.logits.argmax(axis=1)]
        return torch.stack(found)


@pytest.fixture(scope="module")
def checkpoint(tiny_folder: Callable[[str], Path]) -> Callable[[str], Path]:
    def write(family: str) -> Path:
        folder = tiny_folder(family)
        path = folder.with_suffix(".head.gguf")
        return path if path.exists() else write_tiny_gguf(folder, path, gguf.GGMLQuantizationType.Q8_0)

    return write


def torch_run(path: Path, file: DraftHeadFile | None = None) -> HeadRun:
    model = load_model(str(path), compute="torch")
    assert isinstance(model, LlamaModel)
    return HeadRun(model, TorchDraftHead(model, file or make_tiny_head(model.config)))


def native_run(path: Path, num_threads: int = 1, dtype: KvDtype = KvDtype.FP32) -> HeadRun:
    model = load_model(str(path), compute="native", num_threads=num_threads)
    assert isinstance(model, NativeModel)
    return HeadRun(model, NativeDraftHead(model, make_tiny_head(model.config)), dtype)


def dense_logits(run: HeadRun, file: DraftHeadFile, token_ids: Sequence[int], taps: Tensor) -> Tensor:
    """The definition written down once more, over whole sequences without a cache; the last row's logits."""
    assert isinstance(run.model, LlamaModel)
    config, weights = run.model.config, {name: weight.float() for name, weight in file.weights.items()}

    def norm(name: str, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + file.rms_norm_eps).sqrt() * weights[name]

    features = taps.flatten(1) @ weights["fuse.weight"].T  # of positions 0..n-2
    before = torch.cat([torch.zeros(1, config.hidden_size), features])
    embedded = run.model.weights.embedding[torch.tensor(token_ids)]
    own = norm("embedding_norm.weight", embedded)
    x = torch.cat([own, norm("feature_norm.weight", before)], dim=1)
    newest, older = (torch.cat([torch.zeros(back, config.hidden_size), own[:-back]]) for back in (1, 2))
    angles = torch.arange(len(token_ids))[:, None].float() * run.model.weights.inverse_frequencies

    def heads(name: str, x: Tensor = x, *, is_rotated: bool = False) -> Tensor:
        y = (x @ weights[name].T).view(len(token_ids), -1, config.head_dim).transpose(0, 1)
        if not is_rotated:
            return y
        first, second = y.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    query, key = heads("q_proj.weight", is_rotated=True), heads("k_proj.weight", is_rotated=True)
    if config.num_kv_heads > 1:
        query = torch.cat([heads("find_query.weight", torch.cat([own, newest], dim=1)), query])
        key = torch.cat([heads("find_key.weight", torch.cat([newest, older], dim=1)), key])
    value = heads("v_proj.weight")
    group = config.num_heads // config.num_kv_heads
    attended = functional.scaled_dot_product_attention(
        query[None], key.repeat_interleave(group, 0)[None], value.repeat_interleave(group, 0)[None], is_causal=True
    )[0]
    y = before + attended.transpose(0, 1).flatten(1) @ weights["o_proj.weight"].T
    n = norm("mlp_norm.weight", y)
    inner = functional.silu(n @ weights["gate_proj.weight"].T) * (n @ weights["up_proj.weight"].T)
    g = y + inner @ weights["down_proj.weight"].T
    normed = norm("output_norm.weight", g)
    return run.model.weights.lm_head(normed)[-1, torch.from_numpy(run.head.vocab_ids)]


@pytest.mark.parametrize("family", ["llama", "llama3", "qwen2"])
def test_torch_head_follows_its_definition(family: str, tiny_folder: Callable[[str], Path]) -> None:
    model = load_model(str(tiny_folder(family)))
    assert isinstance(model, LlamaModel)
    file = make_tiny_head(model.config)
    run = HeadRun(model, TorchDraftHead(model, file))
    prompt = prompt_ids(1, 40)
    line = run.add(prompt[:-1])
    run.prefill_alone(line, 7)
    found = run.draft([line], [prompt[-1]], 1)[0, 0]
    taps = LayerTaps(file.tap_layers, torch.empty(39, 2, model.config.hidden_size))
    fresh = HeadRun(model, run.head)
    batch = build_batch([SequenceRows(prompt[:-1], 0, fresh.add(prompt).block_table, 0)], BLOCK_SIZE)
    model.forward(batch, fresh.cache, None, taps)
    expected = dense_logits(run, file, prompt, taps.values)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert expected.std().item() > 0.3, "flat logits show little"


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "llama_tied"])
def test_native_head_equals_the_torch_one_up_to_rounding(family: str, checkpoint: Callable[[str], Path]) -> None:
    logits = []
    for run in (torch_run(checkpoint(family)), native_run(checkpoint(family), 2)):
        line = run.add(prompt_ids(2, 60))
        run.prefill_alone(line, 60)
        found = [run.draft([line], [first_id], 1)[0, 0] for first_id in prompt_ids(3, 20)]
        logits.append(torch.stack(found))
    assert float((logits[1] - logits[0]).norm() / logits[0].norm()) < MAX_ROUNDING_COST


@pytest.mark.parametrize("dtype", [KvDtype.FP32, KvDtype.INT8], ids=str)
def test_native_head_gives_the_same_bits_however_rows_are_computed(
    dtype: KvDtype, checkpoint: Callable[[str], Path]
) -> None:
    """Whole or in chunks, alone or among others, with one thread or more."""
    prompt, others = prompt_ids(4, 90), [prompt_ids(10 + index, 20 + 9 * index) for index in range(5)]
    plain = native_run(checkpoint("llama"), 1, dtype)
    line = plain.add(prompt)
    plain.prefill_alone(line, 90)
    expected = plain.draft([line], [7], 6)[:, 0]
    for num_threads, chunk in ((1, 1), (2, 17), (3, 8)):
        run = native_run(checkpoint("llama"), num_threads, dtype)
        line = run.add(prompt)
        run.prefill_alone(line, chunk)
        assert torch.equal(run.draft([line], [7], 6)[:, 0], expected), f"chunks of {chunk}, {num_threads} threads"
        neighbours = [run.add(other) for other in others]
        line = run.add(prompt)
        run.prefill([(neighbours[0], 5), (line, 30), (neighbours[1], 20)])
        run.prefill([(line, 60), *((each, len(each.token_ids) - len(each.states)) for each in neighbours)])
        found = run.draft([*neighbours, line], [4, 5, 6, 8, 9, 7], 6)[:, -1]
        assert torch.equal(found, expected), f"among others, {num_threads} threads"


def test_a_run_is_one_pass_after_the_other(checkpoint: Callable[[str], Path]) -> None:
    for run in (torch_run(checkpoint("llama")), native_run(checkpoint("llama"), 2)):
        line = run.add(prompt_ids(5, 30))
        run.prefill_alone(line, 30)
        logits = run.draft([line], [9], 8)[:, 0]
        shares = logits.softmax(1).amax(1).tolist()
        expected = [int(run.head.vocab_ids[best]) for best in logits.argmax(1).tolist()]

        def drafts(limits: RunLimits, run: HeadRun = run, line: Line = line, shares: list[float] = shares) -> list[int]:
            batch = build_batch([SequenceRows([9], 30, line.block_table, 1)], BLOCK_SIZE)
            batch = replace(batch, block_tables=torch.tensor([line.block_table], dtype=torch.int32))
            ran = run.head.run(batch, line.states[-1][None].clone(), run.cache, limits)
            found = ran.drafts
            assert ran.first_s > 0
            assert [share for _, share in found] == pytest.approx(shares[: len(found)], rel=1e-4)
            return [token_id for token_id, _ in found]

        chances = tuple((grade + 1) / 10 for grade in range(10))
        assert drafts(RunLimits((0.0,) * 8, chances, frozenset())) == expected
        assert drafts(RunLimits((0.0,) * 3, chances, frozenset())) == expected[:3]
        first = expected.index(expected[4]) + 1
        assert drafts(RunLimits((0.0,) * 8, chances, frozenset({expected[4]}))) == expected[:first]
        reaches = torch.tensor([chances[min(int(share * 10), 9)] for share in shares]).cumprod(0)
        least = float(reaches[3]) * 0.999
        count = min(int((reaches >= least).sum()) + 1, 8)
        assert drafts(RunLimits((least,) * 8, chances, frozenset())) == expected[:count]
        assert drafts(RunLimits((1.1,) * 8, chances, frozenset())) == expected[:1]
        assert drafts(RunLimits((0.0, 0.0, 1.1, 0.0), chances, frozenset())) == expected[:2]


def test_drafting_leaves_the_targets_layers_alone(checkpoint: Callable[[str], Path]) -> None:
    for run in (torch_run(checkpoint("llama")), native_run(checkpoint("llama"))):
        line = run.add(prompt_ids(5, 20))
        run.prefill_alone(line, 20)
        before = run.cache.bytes.clone()
        run.draft([line], [9], 5)
        assert torch.equal(run.cache.bytes[:-1], before[:-1])
        assert not torch.equal(run.cache.bytes[-1], before[-1])


def test_head_rows_outside_the_cache_are_refused(checkpoint: Callable[[str], Path]) -> None:
    run = native_run(checkpoint("llama"))
    line = run.add(prompt_ids(5, 20))
    run.prefill_alone(line, 20)
    batch = build_batch([SequenceRows([257], 20, line.block_table, 1)], BLOCK_SIZE)
    with pytest.raises(IndexError, match="outside"):
        run.head.draft(batch, line.states[-1][None], run.cache)
    layout = KvLayout("", 3, 2, 16, BLOCK_SIZE, KvDtype.FP32)
    batch = build_batch([SequenceRows([5], 20, line.block_table, 1)], BLOCK_SIZE)
    with pytest.raises(InvalidRequest, match="geometry"):
        run.head.draft(batch, line.states[-1][None], KvCache(layout, 64, torch.device("cpu")))


@pytest.mark.parametrize("token", [float("nan"), -3.0, 1e9, 258.0])
def test_state_with_tokens_of_no_vocabulary_is_one_without_tokens(
    token: float, checkpoint: Callable[[str], Path]
) -> None:
    """States come over the wire."""
    for run in (torch_run(checkpoint("llama")), native_run(checkpoint("llama"))):
        line = run.add(prompt_ids(5, 20))
        run.prefill_alone(line, 20)
        true, hidden = line.states[-1].clone(), run.head.hidden_size
        line.states[-1][hidden:] = 0.0
        expected = run.draft([line], [9], 1)
        line.states[-1][hidden:] = token
        assert torch.equal(run.draft([line], [9], 1), expected)
        line.states[-1] = true
        assert not torch.equal(run.draft([line], [9], 1), expected)


def test_heads_are_loaded_for_the_models_kernels(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    native = load_model(str(checkpoint("llama")), num_threads=1)
    plain = load_model(str(checkpoint("llama")), compute="torch")
    path = str(write_tiny_head(tmp_path / "head.safetensors", native.config))
    assert isinstance(load_draft_head(native, path), NativeDraftHead)
    assert isinstance(load_draft_head(plain, path), TorchDraftHead)
    with pytest.raises(InvalidRequest, match="none of those") as caught:
        load_draft_head(native, "")
    assert caught.value.field == "draft_head"
    with pytest.raises(InvalidRequest, match="no such file"):
        load_draft_head(native, str(tmp_path / "other.safetensors"))
    with pytest.raises(InvalidRequest, match="another model"):
        load_draft_head(load_model(str(checkpoint("qwen3")), num_threads=1), path)
