"""A model of Llama 3 8B's shape with random weights: steps checked against each other, and timed end to end.

Prefill of 2048 tokens launch by launch, decode of 1, 8 and 64 sequences at 2048 tokens as CUDA graphs; weights in bf16,
int4 and fp8, KV in bf16 and fp8. Floor of a decode step: all weights and all KV it reads, once.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu_bench import Bench
from engine.cache.layout import KvLayout
from engine.config import KvDtype, ModelConfig, RopeConfig
from engine.kernels.torch_kernels import TorchKernels
from engine.kernels.triton.layer_cache import LayerCache, block_bytes
from engine.kernels.triton.split_k import SplitScratch
from engine.model.batch import StepBatch
from engine.model.cuda.attention import MixedAttention, Sequences
from engine.model.cuda.cache import DeviceKvCache
from engine.model.cuda.graphs import DecodeGraph, GraphMemory
from engine.model.cuda.linear import ByteLinear, DenseLinear, DeviceLinear, Int4Linear, LinearSettings, WeightFormat
from engine.model.cuda.model import CudaModel, CudaSettings
from engine.model.cuda.step import DeviceModel, StepRows, run_step
from engine.model.cuda.weights import DeviceLayer, DeviceWeights, make_linear
from engine.model.interface import LanguageModel
from engine.model.kv_cache import KvCache
from engine.model.llama import LlamaModel
from engine.model.rope import inverse_frequencies
from engine.model.weights import LayerWeights, LlamaWeights

_BLOCK = 16
_FP8 = torch.float8_e4m3fn
_BATCHES = (1, 8, 64)


def config_of(bench: Bench, num_layers: int) -> ModelConfig:
    """Llama 3 8B, or something tiny in a rehearsal."""
    return ModelConfig(
        architecture="llama",
        vocab_size=bench.size(128256, 300),
        hidden_size=bench.size(4096, 128),
        intermediate_size=bench.size(14336, 192),
        num_layers=bench.size(num_layers, 2),
        num_heads=bench.size(32, 4),
        num_kv_heads=bench.size(8, 2),
        head_dim=bench.size(128, 32),
        rms_norm_eps=1e-5,
        max_position=8192,
        rope=RopeConfig(theta=500000.0),
        tie_embeddings=False,
    )


def random_weights(bench: Bench, config: ModelConfig, weight_format: WeightFormat, seed: int) -> DeviceWeights:
    """Weights that keep activations at about the size of the input; the same for the same seed on the same device."""
    generator = torch.Generator(bench.device).manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator, device=bench.device, dtype=torch.float32)
        return values.mul_(shape[-1] ** -0.5)

    def linear(out_features: int, in_features: int) -> DeviceLinear:
        return make_linear(draw(out_features, in_features), None, weight_format, bench.dtype)

    ones = torch.ones(config.hidden_size, device=bench.device)
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layers = tuple(
        DeviceLayer(
            input_norm=ones,
            qkv=linear(query + 2 * kv, config.hidden_size),
            q_norm=None,
            k_norm=None,
            attention_output=linear(config.hidden_size, query),
            post_attention_norm=ones,
            gate_up=linear(2 * config.intermediate_size, config.hidden_size),
            down=linear(config.hidden_size, config.intermediate_size),
        )
        for _ in range(config.num_layers)
    )
    return DeviceWeights(
        embedding=draw(config.vocab_size, config.hidden_size).mul_(10.0).to(bench.dtype),
        layers=layers,
        final_norm=ones,
        lm_head=DenseLinear(draw(config.vocab_size, config.hidden_size).mul_(3.0).to(bench.dtype), None),
        inverse_frequencies=inverse_frequencies(config.rope, config.head_dim).to(bench.device),
    )


def linear_bytes(linear: DeviceLinear) -> int:
    """Bytes that a product reads of a weight."""
    match linear:
        case DenseLinear():
            tensors: list[Tensor | None] = [linear.weight]
        case ByteLinear():
            tensors = [linear.weight, linear.scales]
        case Int4Linear():
            tensors = [linear.weight.packed, linear.weight.scales, linear.weight.zeros, linear.weight.mins]
        case _:
            raise TypeError(f"{type(linear).__name__} is no weight format")
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def batch_of(rows: list[tuple[int, int, int]], vocab_size: int, tokens: Tensor | None = None) -> StepBatch:
    """A step of sequences as (first position, rows, first block); blocks of a sequence follow each other."""
    starts, contexts = [0], list[int]()
    positions, slots = list[int](), list[int]()
    for first, count, block in rows:
        starts.append(starts[-1] + count)
        positions += range(first, first + count)
        slots += [block * _BLOCK + position for position in range(first, first + count)]
        contexts.append(first + count)
    most = max(-(-context // _BLOCK) for context in contexts)
    tables = torch.tensor([[block + index for index in range(most)] for _, _, block in rows], dtype=torch.int32)
    return StepBatch(
        token_ids=torch.randint(0, vocab_size, (starts[-1],)) if tokens is None else tokens,
        positions=torch.tensor(positions),
        slot_mapping=torch.tensor(slots),
        query_start=torch.tensor(starts, dtype=torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        block_tables=tables,
        logit_rows=torch.arange(starts[-1]),
    )


class TimedModel:
    """One model in one weight format, its caches and its step times."""

    def __init__(self, bench: Bench, weight_format: WeightFormat) -> None:
        """Draw the weights; two layers are enough to compile everything."""
        self.bench = bench
        self.weight_format = weight_format
        self.config = config_of(bench, 2 if bench.is_warm_up else 32)
        weights = random_weights(bench, self.config, weight_format, seed=1)
        most = max(_BATCHES)
        settings = LinearSettings(bench.dtype, is_batch_invariant=False)
        sizes = [linear.scratch_size(most, settings) for layer in weights.layers for linear in layer.linears]
        scratch = SplitScratch.allocate(max(p for p, _ in sizes), max(t for _, t in sizes), bench.device)
        self.model = DeviceModel(self.config, weights, replace(settings, scratch=scratch, max_scratch_rows=most))
        self.weight_bytes = linear_bytes(weights.lm_head) + sum(
            linear_bytes(linear) for layer in weights.layers for linear in layer.linears
        )
        self.context = bench.size(2048, 18)
        self.blocks_of_sequence = -(-(self.context + _BLOCK) // _BLOCK)

    def caches(self, dtype: torch.dtype, num_seqs: int) -> list[LayerCache]:
        """A cache for `num_seqs` sequences at full context."""
        config = self.config
        shape = (num_seqs * self.blocks_of_sequence, block_bytes(config.num_kv_heads, _BLOCK, config.head_dim, dtype))
        return [
            LayerCache.from_bytes(
                torch.zeros(shape, dtype=torch.uint8, device=self.bench.device),
                config.num_kv_heads,
                _BLOCK,
                config.head_dim,
                dtype,
            )
            for _ in range(config.num_layers)
        ]

    def time_prefill(self, caches: list[LayerCache]) -> None:
        """2048 tokens of one sequence, launch by launch."""
        bench, device = self.bench, self.bench.device
        batch = batch_of([(0, self.context, 0)], self.config.vocab_size)
        sequences = Sequences(*(t.to(device) for t in (batch.query_start, batch.context_lens, batch.block_tables)))
        shape = (self.context, self.config.num_heads, self.config.head_dim)
        rows = StepRows(
            batch.token_ids.to(device),
            batch.positions.to(device),
            batch.slot_mapping.to(device),
            torch.tensor([self.context], dtype=torch.int32, device=device),
        )
        out = torch.zeros(shape, dtype=bench.dtype, device=device)
        attention = MixedAttention(self.config, sequences, batch.query_start, batch.context_lens, out)
        last = torch.tensor([self.context - 1], device=device)

        def step() -> Tensor:
            return run_step(self.model, rows, attention, caches, last)

        step()
        took = bench.event_seconds(step)
        weights = sum(a * b for layer in self.model.weights.layers for a, b in (li.shape for li in layer.linears))
        heads = self.config.num_heads * self.config.head_dim * self.config.num_layers
        flop = 2.0 * weights * self.context + 4.0 * heads * self.context**2 / 2
        self._emit("prefill", 1, caches, took, self.bench.ceilings.seconds(self.weight_bytes, flop), self.context)

    def time_decode(self, caches: list[LayerCache], num_seqs: int) -> None:
        """One step of `num_seqs` sequences at 2048 tokens, from a graph."""
        bench, config = self.bench, self.config
        context = self.blocks_of_sequence * _BLOCK
        memory = GraphMemory.allocate(self.model, [(num_seqs, 1)], context, bench.device)
        graph = DecodeGraph(self.model, caches, num_seqs, 1, memory)
        rows = [(self.context, 1, seq * self.blocks_of_sequence) for seq in range(num_seqs)]
        batch = batch_of(rows, config.vocab_size)
        graph.run(batch)
        took = bench.event_seconds(graph.replay, repeats=15)
        whole = bench.event_seconds(lambda: graph.run(batch), repeats=15)
        element = caches[0].elements.dtype.itemsize * config.head_dim + (0 if caches[0].scales is None else 4)
        kv_bytes = num_seqs * self.context * config.num_layers * 2 * config.num_kv_heads * element
        floor = bench.ceilings.seconds(self.weight_bytes + kv_bytes)
        self._emit("decode", num_seqs, caches, took, floor, num_seqs, with_inputs_ms=whole * 1e3)

    def _emit(
        self, phase: str, batch: int, caches: list[LayerCache], took: float, floor: float, tokens: int, **more: float
    ) -> None:
        kv = str(caches[0].elements.dtype).removeprefix("torch.")
        self.bench.emit(
            "model",
            f"{phase} {self.weight_format} weights, {kv} KV, batch {batch}",
            ok=True,
            phase=phase,
            weights=str(self.weight_format),
            kv=kv,
            batch=batch,
            ms=took * 1e3,
            floor_ms=floor * 1e3,
            share_of_floor=floor / took,
            tokens_per_s=tokens / took,
            **more,
        )


def time_model(bench: Bench, weight_format: WeightFormat) -> None:
    """All steps of one weight format."""
    timed = TimedModel(bench, weight_format)
    batches = _BATCHES if not bench.is_rehearsal else (1, 2)
    for dtype in (_FP8,) if bench.is_rehearsal else (bench.dtype, _FP8):
        caches = timed.caches(dtype, max(batches))
        bench.attempt("model", f"prefill {weight_format} {dtype}", partial(timed.time_prefill, caches))
        for num_seqs in batches:
            name = f"decode {weight_format} {dtype} batch {num_seqs}"
            bench.attempt("model", name, partial(timed.time_decode, caches, num_seqs))
        del caches


def check_model(bench: Bench) -> None:
    """Steps against each other and against the plain fp32 model, on a few layers of the same shape."""
    config = config_of(bench, 3)
    for weight_format in WeightFormat:
        bench.attempt("check", f"model {weight_format}", partial(_check_format, bench, config, weight_format))
    bench.attempt("check", "model batch-invariant", partial(_check_invariance, bench, config))
    bench.attempt("check", "device cache", partial(_check_device_cache, bench, config))


def cuda_model(
    bench: Bench, config: ModelConfig, weight_format: WeightFormat, *, is_invariant: bool = False
) -> CudaModel:
    """A model with the weights of seed 1."""
    settings = CudaSettings(
        dtype=bench.dtype,
        weight_format=weight_format,
        is_batch_invariant=is_invariant,
        max_context_len=2048,
        graph_batch_sizes=(2,) if bench.is_rehearsal else (1, 4),
        graph_rows=(1, 3),
    )
    weights = random_weights(bench, config, weight_format, seed=1)
    return CudaModel(config, weights, "random", settings, bench.device)


def new_cache(bench: Bench, model: LanguageModel, num_blocks: int, dtype: KvDtype | None = None) -> DeviceKvCache:
    """An empty cache for a model."""
    kind = dtype or (KvDtype.FP16 if bench.is_rehearsal else KvDtype.BF16)
    layout = KvLayout.of_model(model.fingerprint, model.config, _BLOCK, kind)
    return DeviceKvCache(layout, num_blocks, bench.device)


def _check_format(bench: Bench, config: ModelConfig, weight_format: WeightFormat) -> None:
    """A prompt at once, and the same prompt in chunks, by graph and beside others, give the same logits."""
    length = bench.size(300, 24)
    model = cuda_model(bench, config, weight_format)
    cache = new_cache(bench, model, 64)
    tokens = torch.randint(0, config.vocab_size, (length,))
    whole = model.forward(batch_of([(0, length, 0)], config.vocab_size, tokens), cache)
    if weight_format is WeightFormat.DENSE:
        plain = _plain_model(bench, config)
        plain_cache = KvCache(replace(cache.layout, dtype=KvDtype.FP32), 64, bench.device)
        wanted = plain.forward(batch_of([(0, length, 0)], config.vocab_size, tokens), plain_cache)
        bench.check("model dense against plain fp32", whole, wanted, 3e-2)
    model.capture(cache)
    first = length - 4
    other = torch.randint(0, config.vocab_size, (9,))
    parts = [model.forward(batch_of([(0, first, 30)], config.vocab_size, tokens[:first]), cache)]
    parts.append(model.forward(batch_of([(first, 1, 30)], config.vocab_size, tokens[first : first + 1]), cache))
    mixed = torch.cat([tokens[first + 1 : first + 2], other])
    parts.append(model.forward(batch_of([(first + 1, 1, 30), (0, 9, 60)], config.vocab_size, mixed), cache)[:1])
    parts.append(model.forward(batch_of([(first + 2, 2, 30)], config.vocab_size, tokens[first + 2 :]), cache))
    # int8 and fp8 round activations: what differs in a last bit before may differ by a step behind.
    tolerance = 2e-2 if weight_format in (WeightFormat.DENSE, WeightFormat.INT4) else 6e-2
    bench.check(f"model {weight_format}: chunks and graphs", torch.cat(parts), whole, tolerance)


def _check_invariance(bench: Bench, config: ModelConfig) -> None:
    length = bench.size(200, 20)
    model = cuda_model(bench, config, WeightFormat.DENSE, is_invariant=True)
    cache = new_cache(bench, model, 64)
    tokens = torch.randint(0, config.vocab_size, (length,))
    whole = model.forward(batch_of([(0, length, 0)], config.vocab_size, tokens), cache)
    first = length - 3
    parts = [model.forward(batch_of([(0, first, 30)], config.vocab_size, tokens[:first]), cache)]
    model.capture(cache)
    parts.append(model.forward(batch_of([(first, 1, 30)], config.vocab_size, tokens[first : first + 1]), cache))
    both = torch.cat([tokens[first + 1 :], torch.randint(0, config.vocab_size, (7,))])
    parts.append(model.forward(batch_of([(first + 1, 2, 30), (0, 7, 60)], config.vocab_size, both), cache)[:2])
    bench.expect("model batch-invariant: logits bit-equal", torch.equal(torch.cat(parts), whole))


def _check_device_cache(bench: Bench, config: ModelConfig) -> None:
    model = cuda_model(bench, config, WeightFormat.DENSE)
    for dtype in (None, KvDtype.INT8):
        cache = new_cache(bench, model, 20, dtype)
        cache.bytes.copy_(torch.randint(0, 120, cache.bytes.shape, device=bench.device).to(torch.uint8))
        ids = [7, 3, 4, 19, 0]
        buffer = bytearray(len(ids) * cache.layout.block_bytes)
        cache.mark_written(1, None)
        cache.read_blocks(1, ids, memoryview(buffer))
        is_equal = bytes(buffer) == cache.bytes[1, ids].cpu().numpy().tobytes()
        cache.write_blocks(0, ids[::-1], memoryview(buffer))
        is_equal &= torch.equal(cache.bytes[0, ids[::-1]], cache.bytes[1, ids])
        bench.expect(f"device cache {cache.layout.dtype} reads and writes blocks", is_equal)


def _plain_model(bench: Bench, config: ModelConfig) -> LlamaModel:
    """The fp32 model with the same weights."""
    kernels, weights = TorchKernels(), random_weights(bench, config, WeightFormat.DENSE, seed=1)

    def packed(linear: DeviceLinear) -> Tensor:
        if not isinstance(linear, DenseLinear):
            raise TypeError("only dense weights have an fp32 form")
        return linear.weight.float()

    layers = tuple(
        LayerWeights(
            input_norm=layer.input_norm,
            qkv=kernels.pack_linear(packed(layer.qkv), None),
            q_norm=None,
            k_norm=None,
            attention_output=kernels.pack_linear(packed(layer.attention_output), None),
            post_attention_norm=layer.post_attention_norm,
            gate_up=kernels.pack_linear(packed(layer.gate_up), None),
            down=kernels.pack_linear(packed(layer.down), None),
        )
        for layer in weights.layers
    )
    lm_head = kernels.pack_linear(packed(weights.lm_head), None)
    plain = LlamaWeights(weights.embedding.float(), layers, weights.final_norm, lm_head, weights.inverse_frequencies)
    return LlamaModel(config, plain, "random", kernels, bench.device)
