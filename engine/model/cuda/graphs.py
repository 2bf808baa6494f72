"""Decode steps as CUDA graphs: static buffers for a number of sequences and rows, filled and replayed step by step.

A graph is captured for `num_seqs` sequences of up to `max_rows` rows (1, or 1 + drafts). A smaller step is padded: its
padding sequences have no rows and context 0, its padding rows write no KV and their logits are not looked at. All
inputs of a step lie in two buffers, so that filling one is two copies from pinned memory.

On a device without graphs the same static step runs eagerly, launch by launch; that is how tests cover it on the CPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.triton.layer_cache import LayerCache
from engine.kernels.triton.paged_decode import DecodeTiles, decode_scratch_size
from engine.model.batch import StepBatch
from engine.model.cuda.attention import DecodeAttention, Sequences, decode_tiles
from engine.model.cuda.step import DeviceModel, StepRows, run_step

_WARM_UP_STEPS = 2


@dataclass(frozen=True, slots=True)
class GraphMemory:
    """What all graphs of a model share, since only one runs at a time."""

    attention_out: Tensor
    """[max_rows, num_heads, head_dim]."""
    scratch: Tensor
    """fp32, for the attention of any of them."""
    logits: Tensor
    """[max_rows, vocab_size] fp32."""
    max_context_len: int
    """Longest context of a step."""
    pool: "torch.cuda._POOL_HANDLE | None"
    """Where captured steps take their memory; None = there are no graphs on this device."""

    @classmethod
    def allocate(
        cls, model: DeviceModel, sizes: Sequence[tuple[int, int]], max_context_len: int, device: torch.device
    ) -> "GraphMemory":
        """Allocate for graphs of these sizes, as (sequences, rows of a sequence)."""
        config = model.config
        max_rows = max(num_seqs * rows for num_seqs, rows in sizes)
        num_scratch = max(
            decode_scratch_size(
                num_seqs * rows, config.num_heads, config.head_dim, max_context_len, _tiles(model, num_seqs)
            )
            for num_seqs, rows in sizes
        )
        # Zeros, because attention never writes padding rows, which go through the rest of the step.
        heads = torch.zeros(max_rows, config.num_heads, config.head_dim, dtype=model.settings.dtype, device=device)
        return cls(
            attention_out=heads,
            scratch=torch.empty(num_scratch, dtype=torch.float32, device=device),
            logits=torch.empty(max_rows, config.vocab_size, dtype=torch.float32, device=device),
            max_context_len=max_context_len,
            pool=torch.cuda.graph_pool_handle() if device.type == "cuda" else None,
        )


class DecodeGraph:
    """One captured decode step."""

    def __init__(
        self,
        model: DeviceModel,
        caches: Sequence[LayerCache],
        num_seqs: int,
        max_rows: int,
        memory: GraphMemory,
    ) -> None:
        """Allocate the buffers and capture.

        Args:
            model: The model.
            caches: The cache that the graph reads and writes, for its whole life.
            num_seqs: Most sequences of a step.
            max_rows: Most rows of a sequence.
            memory: Shared by all graphs, allocated for one of at least this size.
        """
        device, max_context_len = memory.logits.device, memory.max_context_len
        self.num_seqs = num_seqs
        self.max_rows = max_rows
        self.max_context_len = max_context_len
        num_rows = num_seqs * max_rows
        max_blocks = -(-max_context_len // caches[0].block_size)
        self._inputs = _StaticInputs(num_rows, num_seqs, max_blocks, device)
        attention = DecodeAttention(
            model.config,
            self._inputs.sequences,
            num_rows,
            max_rows,
            max_context_len,
            _tiles(model, num_seqs),
            memory.attention_out,
            memory.scratch,
        )
        rows, self._logits = self._inputs.rows, memory.logits[:num_rows]
        # Copied, because every graph's own result would stay allocated beside those of the others.
        self._step: Callable[[], Tensor] = lambda: self._logits.copy_(run_step(model, rows, attention, caches, None))
        self._captured = self._capture(memory) if device.type == "cuda" else None

    def fits(self, num_seqs: int, max_rows: int, max_context_len: int) -> bool:
        """Whether a step of this size can be replayed."""
        return num_seqs <= self.num_seqs and max_rows <= self.max_rows and max_context_len <= self.max_context_len

    def run(self, batch: StepBatch) -> Tensor:
        """Compute a step that fits.

        Args:
            batch: The step; `query_start`, `context_lens` and `block_tables` on the CPU.

        Returns:
            [num_logit_rows, vocab_size] fp32, a new tensor.
        """
        self._inputs.fill(batch)
        logits = self.replay()
        return logits.index_select(0, batch.logit_rows.to(logits.device, non_blocking=True))

    def replay(self) -> Tensor:
        """Compute the step that was filled in last, again.

        Returns:
            [num_seqs * max_rows, vocab_size] fp32, overwritten by the next call of any graph.
        """
        if self._captured is None:
            return self._step()
        self._captured.replay()
        return self._logits

    def _capture(self, memory: GraphMemory) -> torch.cuda.CUDAGraph:
        # Kernels are compiled and libraries make their handles before the capture, on another stream as it will be.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP_STEPS):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=memory.pool):
            self._step()
        return graph


def _tiles(model: DeviceModel, num_seqs: int) -> DecodeTiles:
    return decode_tiles(num_seqs, is_batch_invariant=model.settings.is_batch_invariant)


class _StaticInputs:
    """A step's inputs at fixed addresses: one int64 and one int32 buffer, on the host and on the device."""

    def __init__(self, num_rows: int, num_seqs: int, max_blocks: int, device: torch.device) -> None:
        is_pinned = device.type == "cuda"
        self._num_rows = num_rows
        self._num_seqs = num_seqs
        longs, ints = 3 * num_rows, 1 + (num_seqs + 1) + num_seqs + num_seqs * max_blocks
        self._host = (
            torch.zeros(longs, dtype=torch.int64, pin_memory=is_pinned),
            torch.zeros(ints, dtype=torch.int32, pin_memory=is_pinned),
        )
        self._device = (
            torch.zeros(longs, dtype=torch.int64, device=device),
            torch.zeros(ints, dtype=torch.int32, device=device),
        )
        self._copied = torch.cuda.Event() if is_pinned else None
        self._views = self._cut(*self._host, max_blocks)
        token_ids, positions, slots, num_tokens, query_start, context_lens, tables = self._cut(
            *self._device, max_blocks
        )
        self.rows = StepRows(token_ids, positions, slots, num_tokens)
        self.sequences = Sequences(query_start, context_lens, tables)

    def fill(self, batch: StepBatch) -> None:
        """Bring a step to the device; what the last one left becomes padding."""
        if self._copied is not None:
            # The copy of the step before reads the host buffers until then.
            self._copied.synchronize()
        token_ids, positions, slots, num_tokens, query_start, context_lens, tables = self._views
        num_rows, num_seqs = batch.token_ids.shape[0], batch.context_lens.shape[0]
        for view, values in ((token_ids, batch.token_ids), (positions, batch.positions), (slots, batch.slot_mapping)):
            view[:num_rows] = values
            view[num_rows:] = 0
        num_tokens[0] = num_rows
        query_start[: num_seqs + 1] = batch.query_start
        query_start[num_seqs + 1 :] = num_rows
        context_lens[:num_seqs] = batch.context_lens
        context_lens[num_seqs:] = 0
        tables[:num_seqs, : batch.block_tables.shape[1]] = batch.block_tables
        for device, host in zip(self._device, self._host, strict=True):
            device.copy_(host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def _cut(self, longs: Tensor, ints: Tensor, max_blocks: int) -> tuple[Tensor, ...]:
        rows, seqs = self._num_rows, self._num_seqs
        num_tokens, query_start, context_lens, tables = ints.split([1, seqs + 1, seqs, seqs * max_blocks])
        return *longs.split(rows), num_tokens, query_start, context_lens, tables.view(seqs, max_blocks)
