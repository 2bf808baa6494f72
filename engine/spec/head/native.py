"""`DraftHead` beside a `NativeModel`: 4-bit weights, the target's kernels and threads, one call a pass."""

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.cpu.head import HeadMatrix, NativeHeadHandle
from engine.kernels.cpu.library import MatrixSlot, VectorSlot
from engine.model.batch import StepBatch
from engine.model.cpu.model import NativeModel, on_host, step_pointers
from engine.model.cpu.weights import pad_heads
from engine.model.kv_cache import KvCache
from engine.spec.head import format as names
from engine.spec.head.format import DraftHeadFile, num_finding_kv_heads
from engine.spec.head.port import NUM_STATE_TOKENS, HeadRows, HeadRun, RunLimits

_MATRICES = {
    MatrixSlot.Q: names.Q_PROJ,
    MatrixSlot.K: names.K_PROJ,
    MatrixSlot.V: names.V_PROJ,
    MatrixSlot.O: names.O_PROJ,
    MatrixSlot.GATE: names.GATE_PROJ,
    MatrixSlot.UP: names.UP_PROJ,
    MatrixSlot.DOWN: names.DOWN_PROJ,
}
_FINDING = {MatrixSlot.Q: names.FIND_QUERY, MatrixSlot.K: names.FIND_KEY}
_BY_HEAD = (MatrixSlot.Q, MatrixSlot.K, MatrixSlot.V)


class NativeDraftHead:
    """See the module. Lives no longer than its target."""

    def __init__(self, model: NativeModel, file: DraftHeadFile) -> None:
        """Quantize the head's weights into the library.

        Args:
            model: The target, which the head fits.
            file: From `load_head`.
        """
        config = model.config

        def values(name: str) -> NDArray[np.float32]:
            return file.weights[name].to(torch.float32).numpy()

        matrices = [HeadMatrix(None, values(names.FUSE))]
        num_finding = num_finding_kv_heads(config)
        for slot, name in _MATRICES.items():
            # The finding heads come first, see src/head.h.
            found = [values(_FINDING[slot])] if num_finding and slot in _FINDING else []
            matrix = np.concatenate([*found, values(name)])
            order = np.arange(len(matrix), dtype=np.int32)
            matrices.append(HeadMatrix(slot, matrix, pad_heads(order, config.head_dim) if slot in _BY_HEAD else order))
        self._model = model
        self._tap_layers = file.tap_layers
        self._vocab_ids: NDArray[np.int64] = file.vocab_ids.numpy().astype(np.int64)
        self._handle = NativeHeadHandle(
            model.handle,
            len(file.tap_layers),
            num_finding,
            file.rms_norm_eps,
            matrices,
            {VectorSlot.INPUT_NORM: values(names.EMBEDDING_NORM), VectorSlot.POST_NORM: values(names.MLP_NORM)},
            values(names.FEATURE_NORM),
            values(names.OUTPUT_NORM),
            file.vocab_ids.to(torch.int32).numpy(),
        )

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """See `DraftHead.tap_layers`."""
        return self._tap_layers

    @property
    def vocab_ids(self) -> NDArray[np.int64]:
        """See `DraftHead.vocab_ids`."""
        return self._vocab_ids

    @property
    def hidden_size(self) -> int:
        """See `DraftHead.hidden_size`."""
        return self._model.config.hidden_size

    @property
    def state_size(self) -> int:
        """See `DraftHead.state_size`."""
        return self.hidden_size + NUM_STATE_TOKENS

    def absorb(self, batch: StepBatch, taps: Tensor, carried: Tensor, kv_cache: KvCache) -> Tensor:
        """See `DraftHead.absorb`."""
        batch = on_host(batch)
        num_rows = batch.token_ids.shape[0]
        states = torch.empty(num_rows, self.state_size)
        if num_rows:
            self._check(taps, (num_rows, len(self._tap_layers), self.hidden_size))
            self._check(carried, (batch.context_lens.shape[0], self.state_size))
            if batch.logit_rows.shape[0]:
                batch = replace(batch, logit_rows=batch.logit_rows[:0])
            pointers = step_pointers(batch, states, taps=taps.data_ptr())
            cache = self._model.cache_pointer(kv_cache, 1)
            self._handle.absorb(pointers, cache, carried.data_ptr(), states.data_ptr())
        return states

    def draft(self, batch: StepBatch, previous: Tensor, kv_cache: KvCache) -> HeadRows:
        """See `DraftHead.draft`."""
        batch = on_host(batch)
        num_rows = batch.token_ids.shape[0]
        self._check(previous, (num_rows, self.state_size))
        logits = torch.empty(num_rows, len(self._vocab_ids))
        states = torch.empty(num_rows, self.state_size)
        best, shares = np.empty(num_rows, np.int32), np.empty(num_rows, np.float32)
        pointers = step_pointers(batch, logits)
        self._handle.draft(
            pointers,
            self._model.cache_pointer(kv_cache, 1),
            previous.data_ptr(),
            states.data_ptr(),
            best.ctypes.data,
            shares.ctypes.data,
        )
        return HeadRows(logits.numpy(), states, best, shares)

    def run(self, batch: StepBatch, previous: Tensor, kv_cache: KvCache, limits: RunLimits) -> HeadRun:
        """See `DraftHead.run`."""
        batch = on_host(batch)
        self._check(previous, (1, self.state_size))
        logits, state = torch.empty(1, len(self._vocab_ids)), torch.empty(1, self.state_size)
        tokens, shares, first_ns = self._handle.run(
            step_pointers(batch, logits),
            self._model.cache_pointer(kv_cache, 1),
            previous.data_ptr(),
            state.data_ptr(),
            np.array(limits.chances, np.float32),
            np.array(limits.least_reach, np.float32),
            np.array(sorted(limits.stop_ids), np.int32),
        )
        return HeadRun(list(zip(tokens, shares, strict=True)), first_ns / 1e9)

    def _check(self, tensor: Tensor, shape: tuple[int, ...]) -> None:
        if tensor.shape != shape or tensor.dtype != torch.float32 or not tensor.is_contiguous():
            raise ValueError(f"{list(tensor.shape)} {tensor.dtype} is not {list(shape)} fp32, contiguous")
