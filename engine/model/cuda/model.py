"""`LanguageModel` on a CUDA device: Triton kernels, decode steps as CUDA graphs, weights in 16, 8 or 4 bits.

A step whose sequences all have few rows is replayed from a graph; any other runs launch by launch. In the
batch-invariant mode every product and every attention has one fixed order of sums, so a row's bits do not depend on
what is computed beside it, nor on whether its tokens were prefilled or decoded; it costs speed for many rows.

Without a GPU the same steps run on the CPU under Triton's interpreter, for tests.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

import torch
import xxhash
from torch import Tensor

from engine.config import ModelConfig
from engine.kernels.triton.launch import is_interpreted
from engine.kernels.triton.layer_cache import LayerCache
from engine.kernels.triton.split_k import SplitScratch
from engine.model.batch import StepBatch
from engine.model.cuda.attention import InvariantAttention, MixedAttention, Sequences, StepAttention
from engine.model.cuda.cache import DeviceKvCache
from engine.model.cuda.graphs import DecodeGraph, GraphMemory
from engine.model.cuda.linear import LinearSettings, WeightFormat
from engine.model.cuda.step import DeviceModel, StepRows, run_step
from engine.model.cuda.weights import DeviceWeightLoader, DeviceWeights, QuantizedBlocks
from engine.model.kv_cache import KvCache
from engine.model.rope import inverse_frequencies
from engine.model.weights import WeightReader, rope_factors, weights_fingerprint
from kvrelay.errors import InvalidRequest

_NUMERICS = "triton-1"
"""Names the arithmetic. To be changed with anything that changes a bit of KV."""
_WARM_SEQS = (1, 8, 32)
"""Numbers of decodes for which attention is cut differently."""
_WARM_ROWS = (17, 33, 65, 129)
"""Numbers of rows from which products are cut differently, and attention of a prompt is tiled."""
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class CudaSettings:
    """How a model is computed."""

    dtype: torch.dtype = torch.bfloat16
    """Type of activations, embedding, lm_head and dense weights."""
    weight_format: WeightFormat = WeightFormat.DENSE
    is_batch_invariant: bool = False
    """Whether a row's bits must not depend on the rest of the step."""
    max_context_len: int = 8192
    """Longest context of a step that is replayed from a graph; scratch grows with it."""
    graph_batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    """Numbers of sequences for which decode steps are captured; () = none."""
    graph_rows: tuple[int, ...] = (1,)
    """Rows of a sequence for which they are captured: 1, and 1 + drafts for each draft length that is used."""

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise InvalidRequest("dtype", f"must be one of {', '.join(map(str, _DTYPES))}, not {self.dtype}")
        if self.max_context_len < 1 or min(self.graph_batch_sizes + self.graph_rows, default=1) < 1:
            raise InvalidRequest("graphs", "sizes of captured steps must be at least 1")


class CudaModel:
    """`LanguageModel` over Triton kernels."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DeviceWeights,
        fingerprint: str,
        settings: CudaSettings,
        device: torch.device,
    ) -> None:
        """Take over loaded weights; `build_cuda_model` is the way to them.

        Args:
            config: The model's shape.
            weights: Its parameters on the device.
            fingerprint: From `weights.weights_fingerprint`.
            settings: How to compute.
            device: A CUDA device, or the CPU under the interpreter.
        """
        if (device.type == "cuda") == is_interpreted():
            raise InvalidRequest("device", f"kernels for {device} need Triton's interpreter to be on for the CPU only")
        form = f"{_NUMERICS}|{settings.dtype}|{settings.weight_format}"
        self._fingerprint = xxhash.xxh3_64_hexdigest(f"{fingerprint}|{form}".encode())
        self._settings = settings
        self._device = device
        self._graphs: tuple[DecodeGraph, ...] = ()
        self._graph_cache: KvCache | None = None
        self._max_graph_rows = max(settings.graph_batch_sizes, default=0) * max(settings.graph_rows, default=0)
        self._model = DeviceModel(config, weights, self._linear_settings(weights))

    @property
    def config(self) -> ModelConfig:
        """See `LanguageModel.config`."""
        return self._model.config

    @property
    def fingerprint(self) -> str:
        """See `LanguageModel.fingerprint`. Another one than other paths': KV differs by rounding."""
        return self._fingerprint

    @property
    def device(self) -> torch.device:
        """See `LanguageModel.device`."""
        return self._device

    @torch.no_grad()
    def capture(self, kv_cache: KvCache) -> None:
        """Capture the decode graphs over a cache; called once, after the cache is allocated and before it serves.

        Capturing runs steps of padding only, which change nothing in the cache.
        """
        config, settings = self.config, self._settings
        caches = _layer_caches(kv_cache)
        context = min(settings.max_context_len, config.max_position, kv_cache.num_blocks * kv_cache.layout.block_size)
        sizes = sorted(product(settings.graph_batch_sizes, settings.graph_rows), key=prod, reverse=True)
        if sizes:
            memory = GraphMemory.allocate(self._model, sizes, context, self._device)
            # Largest first, so that the smaller ones find their memory in the shared pool.
            graphs = [DecodeGraph(self._model, caches, num_seqs, rows, memory) for num_seqs, rows in sizes]
            # Fewest rows first: the first that fits is the cheapest.
            self._graphs = tuple(reversed(graphs))
        self._graph_cache = kv_cache

    @torch.no_grad()
    def warm_up(self, kv_cache: KvCache, max_rows: int) -> None:
        """Compile what steps that are not captured need, so that no request waits for it; before the cache serves.

        Computes decodes of several numbers of sequences and prompts of several lengths over the cache's first blocks,
        and clears those again.

        Args:
            kv_cache: The cache that will serve, with no block in use.
            max_rows: Most rows of a step.
        """
        block_size = kv_cache.layout.block_size
        most = min(max_rows, self.config.max_position, kv_cache.num_blocks * block_size)
        steps = [(seqs, 1) for seqs in _WARM_SEQS if seqs <= min(max_rows, kv_cache.num_blocks)]
        steps += [(1, rows) for rows in (*_WARM_ROWS, most) if 1 < rows <= most]
        for num_seqs, rows in steps:
            # Sequence s has the blocks from s on; long ones are alone.
            first_slots = torch.arange(num_seqs)[:, None] * block_size
            blocks = torch.arange(-(-rows // block_size), dtype=torch.int32)
            batch = StepBatch(
                token_ids=torch.zeros(num_seqs * rows, dtype=torch.int64),
                positions=torch.arange(rows).repeat(num_seqs),
                slot_mapping=(first_slots + torch.arange(rows)).flatten(),
                query_start=torch.arange(0, num_seqs * rows + 1, rows, dtype=torch.int32),
                context_lens=torch.full((num_seqs,), rows, dtype=torch.int32),
                block_tables=torch.arange(num_seqs, dtype=torch.int32)[:, None] + blocks,
                logit_rows=torch.arange(rows - 1, num_seqs * rows, rows),
            )
            self.forward(batch, kv_cache)
        kv_cache.bytes[:, : max(-(-most // block_size), *_WARM_SEQS)].zero_()

    @torch.no_grad()
    def forward(self, batch: StepBatch, kv_cache: KvCache, on_layer: Callable[[int], None] | None = None) -> Tensor:
        """See `LanguageModel.forward`.

        With a `DeviceKvCache`, `on_layer` is called on a thread of its own as soon as the device has written a layer,
        while this thread goes on with the step; all calls have been made when this returns.
        """
        if batch.token_ids.shape[0] == 0:
            return torch.empty(0, self.config.vocab_size, dtype=torch.float32, device=self._device)
        batch = replace(
            batch,
            query_start=batch.query_start.cpu(),
            context_lens=batch.context_lens.cpu(),
            block_tables=batch.block_tables.cpu(),
        )
        written = self._written(kv_cache, on_layer)
        graph = self._fitting_graph(batch, kv_cache)
        if graph is None:
            logits = self._run_eagerly(batch, kv_cache, written)
        else:
            logits = graph.run(batch)
            for layer in range(self.config.num_layers):
                written(layer)
        if on_layer is not None and isinstance(kv_cache, DeviceKvCache):
            kv_cache.finish_reports()
        return logits

    def _run_eagerly(self, batch: StepBatch, kv_cache: KvCache, written: Callable[[int], None]) -> Tensor:
        num_rows = batch.token_ids.shape[0]
        sequences = Sequences(
            *(tensor.to(self._device) for tensor in (batch.query_start, batch.context_lens, batch.block_tables))
        )
        out = self._attention_out(num_rows)
        plan = InvariantAttention if self._settings.is_batch_invariant else MixedAttention
        attention: StepAttention = plan(self.config, sequences, batch.query_start, batch.context_lens, out)
        rows = StepRows(
            batch.token_ids.to(self._device),
            batch.positions.to(self._device),
            batch.slot_mapping.to(self._device),
            torch.tensor([num_rows], dtype=torch.int32, device=self._device),
        )
        logit_rows = batch.logit_rows.to(self._device)
        return run_step(self._model, rows, attention, _layer_caches(kv_cache), logit_rows, written)

    def _fitting_graph(self, batch: StepBatch, kv_cache: KvCache) -> DecodeGraph | None:
        if kv_cache is not self._graph_cache:
            return None
        num_seqs, max_rows = batch.context_lens.shape[0], int(batch.query_start.diff().max())
        longest = int(batch.context_lens.max())
        return next((graph for graph in self._graphs if graph.fits(num_seqs, max_rows, longest)), None)

    def _written(self, kv_cache: KvCache, on_layer: Callable[[int], None] | None) -> Callable[[int], None]:
        def written(layer: int) -> None:
            if isinstance(kv_cache, DeviceKvCache):
                kv_cache.mark_written(layer, on_layer)
            elif on_layer is not None:
                on_layer(layer)

        return written

    def _attention_out(self, num_rows: int) -> Tensor:
        # Zeros, because padding rows are never written and go through the rest of the step.
        shape = (num_rows, self.config.num_heads, self.config.head_dim)
        return torch.zeros(shape, dtype=self._settings.dtype, device=self._device)

    def _linear_settings(self, weights: DeviceWeights) -> LinearSettings:
        settings = LinearSettings(self._settings.dtype, self._settings.is_batch_invariant)
        linears = [linear for layer in weights.layers for linear in layer.linears] + [weights.lm_head]
        if not self._max_graph_rows:
            return settings
        sizes = [linear.scratch_size(self._max_graph_rows, settings) for linear in linears]
        scratch = SplitScratch.allocate(
            max(partials for partials, _ in sizes), max(tiles for _, tiles in sizes), self._device
        )
        return replace(settings, scratch=scratch, max_scratch_rows=self._max_graph_rows)


def build_cuda_model(
    config: ModelConfig,
    reader: WeightReader,
    device: torch.device,
    settings: CudaSettings,
    *,
    blocks: QuantizedBlocks | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> CudaModel:
    """Load a checkpoint to a device.

    Args:
        config: The model's shape.
        reader: Its parameters, checked to be complete.
        device: Where to compute.
        settings: How.
        blocks: The checkpoint's own 4-bit blocks, where it has them.
        progress: Called on this thread with (layers loaded, layers in all) after each.

    Raises:
        InvalidRequest: The device and the way Triton runs do not fit.
    """
    frequencies = inverse_frequencies(config.rope, config.head_dim, rope_factors(config, reader))
    loader = DeviceWeightLoader(config, reader, device, settings.dtype, settings.weight_format, blocks)
    weights = loader.load(frequencies, progress)
    return CudaModel(config, weights, weights_fingerprint(config, reader, frequencies), settings, device)


def _layer_caches(kv_cache: KvCache) -> Sequence[LayerCache]:
    elements, scales = kv_cache.elements, kv_cache.scales
    return [
        LayerCache(elements[layer], None if scales is None else scales[layer])
        for layer in range(kv_cache.layout.num_layers)
    ]
