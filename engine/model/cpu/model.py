"""`TappedModel` on the CPU in native code: a whole step in one call.

Weights and activations are integers, so the result for a token is the same bits whatever is computed beside it: alone
or in a batch, in one chunk or many, decoded or verified, with any number of threads, and on any CPU. The kernels are in
`engine/kernels/cpu`, reading the weights in `weights.py`; here a step's tensors become pointers.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from engine.config import KvDtype, ModelConfig
from engine.kernels.cpu.library import CachePointer, CacheType, NativeHandle, StepPointers
from engine.model.batch import StepBatch
from engine.model.interface import LayerTaps
from engine.model.kv_cache import KvCache
from kvrelay.errors import InvalidRequest

_CPU = torch.device("cpu")
_CACHE_TYPES = {
    KvDtype.FP32: CacheType.FP32,
    KvDtype.BF16: CacheType.BF16,
    KvDtype.FP16: CacheType.FP16,
    KvDtype.INT8: CacheType.INT8,
}
_NUMERICS = "native-int8-group32-2"
"""Names the arithmetic. To be changed with anything that changes a bit of KV."""


class NativeModel:
    """`TappedModel` over the native kernels; supports every KV dtype but fp8."""

    def __init__(self, config: ModelConfig, weights_fingerprint: str, handle: NativeHandle) -> None:
        """Take over a built model; `loader.load_model` is the way to one.

        Args:
            config: Its shape.
            weights_fingerprint: From `weights.weights_fingerprint`.
            handle: The model inside the library.
        """
        self._config = config
        self._fingerprint = xxhash.xxh3_64_hexdigest(f"{weights_fingerprint}|{_NUMERICS}".encode())
        self._handle = handle
        self._cache_pointers: WeakKeyDictionary[KvCache, dict[int, CachePointer]] = WeakKeyDictionary()

    @property
    def config(self) -> ModelConfig:
        """See `LanguageModel.config`."""
        return self._config

    @property
    def fingerprint(self) -> str:
        """See `LanguageModel.fingerprint`. Another one than the torch path's: its KV differs by rounding."""
        return self._fingerprint

    @property
    def device(self) -> torch.device:
        """See `LanguageModel.device`."""
        return _CPU

    @property
    def handle(self) -> NativeHandle:
        """The model inside the library."""
        return self._handle

    def close(self) -> None:
        """End the threads and free the weights at once rather than with the object."""
        self._handle.close()

    def measure(self) -> npt.NDArray[np.int64]:
        """Start to measure steps: nanoseconds by `StepPart`, which every later `forward` adds to."""
        return self._handle.measure()

    def forward(
        self,
        batch: StepBatch,
        kv_cache: KvCache,
        on_layer: Callable[[int], None] | None = None,
        taps: LayerTaps | None = None,
    ) -> Tensor:
        """See `TappedModel.forward`.

        Raises:
            IndexError: A token, slot, block, row or tapped layer lies outside the model or the cache.
            InvalidRequest: The cache is another model's, or not on the CPU.
        """
        num_rows, num_logit_rows = batch.token_ids.shape[0], batch.logit_rows.shape[0]
        logits = torch.empty(num_logit_rows, self._config.vocab_size)
        if num_rows == 0:
            return logits
        batch = on_host(batch)
        tap_layers = _layer_array(taps.layers) if taps is not None else None
        pointers = step_pointers(
            batch,
            logits,
            taps=None if taps is None else self._tap_pointer(taps, num_rows),
            tap_layers=None if tap_layers is None else tap_layers.data_ptr(),
            num_taps=0 if taps is None else len(taps.layers),
        )
        self._handle.step(pointers, self.cache_pointer(kv_cache), on_layer)
        return logits

    def _tap_pointer(self, taps: LayerTaps, num_rows: int) -> int:
        shape = (num_rows, len(taps.layers), self._config.hidden_size)
        values = taps.values
        if values.shape != shape or values.dtype != torch.float32 or not values.is_contiguous():
            raise InvalidRequest("taps", f"must be {list(shape)} fp32 and contiguous, not {list(values.shape)}")
        return values.data_ptr()

    def cache_pointer(self, kv_cache: KvCache, num_more_layers: int = 0) -> CachePointer:
        """Return where a cache lies.

        Args:
            kv_cache: Of this model's geometry; it may have layers of others behind the model's own.
            num_more_layers: So many of them must be there.

        Raises:
            InvalidRequest: The cache is another model's, or not on the CPU.
        """
        known = self._cache_pointers.setdefault(kv_cache, {})
        pointer = known.get(num_more_layers)
        if pointer is None:
            pointer = known[num_more_layers] = self._find_cache(kv_cache, num_more_layers)
        return pointer

    def _find_cache(self, kv_cache: KvCache, num_more_layers: int) -> CachePointer:
        layout, config = kv_cache.layout, self._config
        is_too_small = layout.num_layers < config.num_layers + num_more_layers
        if is_too_small or (layout.num_kv_heads, layout.head_dim) != (config.num_kv_heads, config.head_dim):
            raise InvalidRequest("kv_cache", "has another model's geometry")
        storage = kv_cache.bytes
        if storage.device.type != "cpu":
            raise InvalidRequest("kv_cache", f"is on {storage.device}, the native kernels run on the CPU")
        if layout.dtype not in _CACHE_TYPES:
            known = ", ".join(_CACHE_TYPES)
            raise InvalidRequest("kv_dtype", f"{layout.dtype} needs a GPU; the native kernels have {known}")
        return CachePointer(
            address=storage.data_ptr(),
            layer_bytes=kv_cache.num_blocks * layout.block_bytes,
            block_bytes=layout.block_bytes,
            type=_CACHE_TYPES[layout.dtype],
            block_size=layout.block_size,
            num_blocks=kv_cache.num_blocks,
        )


@cache
def _layer_array(layers: tuple[int, ...]) -> Tensor:
    return torch.tensor(layers, dtype=torch.int32)


_FORMS = {
    "token_ids": torch.int64,
    "positions": torch.int64,
    "slot_mapping": torch.int64,
    "query_start": torch.int32,
    "context_lens": torch.int32,
    "block_tables": torch.int32,
    "logit_rows": torch.int64,
}


def on_host(batch: StepBatch) -> StepBatch:
    """Return the batch with its tensors in the form the library reads; itself where they are so already."""
    changed: dict[str, Tensor] = {}
    for name, dtype in _FORMS.items():
        tensor: Tensor = getattr(batch, name)
        if tensor.dtype is not dtype or not tensor.is_cpu or not tensor.is_contiguous():
            changed[name] = tensor.to(dtype=dtype, device=_CPU).contiguous()
    return replace(batch, **changed) if changed else batch


def step_pointers(
    batch: StepBatch, logits: Tensor, *, taps: int | None = None, tap_layers: int | None = None, num_taps: int = 0
) -> StepPointers:
    """Return the addresses of a batch from `on_host`, which must stay alive while they are in use."""
    return StepPointers(
        token_ids=batch.token_ids.data_ptr(),
        positions=batch.positions.data_ptr(),
        slot_mapping=batch.slot_mapping.data_ptr(),
        query_start=batch.query_start.data_ptr(),
        context_lens=batch.context_lens.data_ptr(),
        block_tables=batch.block_tables.data_ptr(),
        logit_rows=batch.logit_rows.data_ptr(),
        logits=logits.data_ptr(),
        num_rows=batch.token_ids.shape[0],
        num_seqs=batch.context_lens.shape[0],
        max_blocks=batch.block_tables.shape[1],
        num_logit_rows=batch.logit_rows.shape[0],
        taps=taps,
        tap_layers=tap_layers,
        num_taps=num_taps,
    )
