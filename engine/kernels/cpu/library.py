"""The compiled kernels as Python functions: types of the C interface, and a model as an object.

Arrays are numpy's and are checked for type and order here, so that nothing but well-formed pointers reaches the
library; values (ids, ranges) are checked in the library. Every call releases the GIL. What the weights mean and where
they come from is `engine/model/cpu/weights.py`'s matter.
"""

import ctypes
import weakref
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import IntEnum
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine.kernels.cpu.build import KernelsUnavailable, build_library, choose_isa

_LayerCallback = ctypes.CFUNCTYPE(None, ctypes.c_int32)
_OK, _NO_MEMORY = 0, 1
MAX_HEAD_DIM = 512
"""Mirrors src/kv_cache.h."""


class WeightKind(IntEnum):
    """How a matrix is stored; see src/weights.h. GGUF's types of the same names, bit for bit."""

    Q4_0 = 0
    Q4_1 = 1
    Q8_0 = 2


class MatrixSlot(IntEnum):
    """A matrix of a layer."""

    Q = 0
    K = 1
    V = 2
    O = 3  # noqa: E741 - the field's name for it
    GATE = 4
    UP = 5
    DOWN = 6


class VectorSlot(IntEnum):
    """A vector of a layer."""

    INPUT_NORM = 0
    POST_NORM = 1
    Q_NORM = 2
    K_NORM = 3
    Q_BIAS = 4
    K_BIAS = 5
    V_BIAS = 6


EMBEDDING, LM_HEAD = -1, -2
"""Layer indices of the two matrices outside the layers."""
_FREQUENCIES, _FINAL_NORM = -1, -2
"""And of the two vectors."""


class CacheType(IntEnum):
    """Element type of a KV cache, in the library's numbers."""

    FP32 = 0
    BF16 = 1
    FP16 = 2
    INT8 = 3


class StepPart(IntEnum):
    """What a step's time is spent on; see `NativeHandle.measure`."""

    EMBED = 0
    NORM = 1
    QKV = 2
    ATTENTION = 3
    OUTPUT = 4
    GATE_UP = 5
    DOWN = 6
    LM_HEAD = 7


class ModelShape(ctypes.Structure):
    """Mirrors `ModelShape` in src/model.h."""

    _fields_ = (
        ("num_layers", ctypes.c_int32),
        ("hidden_size", ctypes.c_int32),
        ("intermediate_size", ctypes.c_int32),
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("vocab_size", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("rms_norm_eps", ctypes.c_float),
    )


class StepArguments(ctypes.Structure):
    """Mirrors `StepArguments` in src/api.cpp."""

    _fields_ = (
        ("token_ids", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("slot_mapping", ctypes.c_void_p),
        ("query_start", ctypes.c_void_p),
        ("context_lens", ctypes.c_void_p),
        ("block_tables", ctypes.c_void_p),
        ("logit_rows", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
        ("cache", ctypes.c_void_p),
        ("on_layer", ctypes.c_void_p),
        ("part_ns", ctypes.c_void_p),
        ("taps", ctypes.c_void_p),
        ("tap_layers", ctypes.c_void_p),
        ("cache_layer_bytes", ctypes.c_int64),
        ("cache_block_bytes", ctypes.c_int64),
        ("cache_type", ctypes.c_int32),
        ("cache_block_size", ctypes.c_int32),
        ("cache_num_blocks", ctypes.c_int32),
        ("num_rows", ctypes.c_int32),
        ("num_seqs", ctypes.c_int32),
        ("max_blocks", ctypes.c_int32),
        ("num_logit_rows", ctypes.c_int32),
        ("num_taps", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True)
class CachePointer:
    """Where a KV cache lies in memory."""

    address: int
    layer_bytes: int
    block_bytes: int
    type: CacheType
    block_size: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class StepPointers:
    """The arrays of one step by address; all contiguous, of the types in `StepBatch`."""

    token_ids: int
    positions: int
    slot_mapping: int
    query_start: int
    context_lens: int
    block_tables: int
    logit_rows: int
    logits: int
    num_rows: int
    num_seqs: int
    max_blocks: int
    num_logit_rows: int
    taps: int | None = None
    """[num_rows, num_taps, hidden_size] fp32, to be filled."""
    tap_layers: int | None = None
    """[num_taps] int32."""
    num_taps: int = 0


_POINTER_FIELDS = tuple(field.name for field in fields(StepPointers))


@cache
def load_library() -> ctypes.CDLL:
    """Load the library for this CPU, compiling it at first use.

    Raises:
        KernelsUnavailable: See `build_library`.
    """
    return open_library(build_library(choose_isa()))


def open_library(path: Path) -> ctypes.CDLL:
    """Load a compiled library and declare its functions."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelsUnavailable(f"{path} cannot be loaded: {error}") from error
    pointer, i32, i64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    for name, result, arguments in (
        ("kvr_matrix_bytes", i64, (i32, i32, i32)),
        ("kvr_model_new", pointer, (ctypes.POINTER(ModelShape), i32, i64)),
        ("kvr_model_free", None, (pointer,)),
        ("kvr_add_matrix", i32, (pointer, i32, i32, i32, i32, i32)),
        ("kvr_pack_columns", None, (pointer, i32, i32, pointer, pointer, i64)),
        ("kvr_quantize_columns", None, (pointer, i32, i32, pointer, pointer)),
        ("kvr_tie_lm_head", None, (pointer,)),
        ("kvr_add_vector", i32, (pointer, i32, i32, pointer, i32)),
        ("kvr_step", i32, (pointer, ctypes.POINTER(StepArguments))),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class NativeHandle:
    """A model inside the library: weights, threads and workspace. Freed with the object."""

    def __init__(self, library: ctypes.CDLL, shape: ModelShape, num_threads: int, weight_bytes: int) -> None:
        """Allocate room for the weights and start the threads.

        Args:
            library: From `load_library`.
            shape: The model's.
            num_threads: Threads of a step, the calling one included.
            weight_bytes: Sum of `matrix_bytes` and `vector_bytes` over what will be added.

        Raises:
            MemoryError: The system gives no such memory.
        """
        self._library = library
        self._model: int | None = library.kvr_model_new(ctypes.byref(shape), num_threads, weight_bytes)
        if not self._model:
            raise MemoryError(f"{weight_bytes} bytes for weights and {num_threads} threads are not to be had")
        self._finalizer = weakref.finalize(self, library.kvr_model_free, self._model)
        self._arguments = StepArguments()

    def close(self) -> None:
        """End the threads and free the memory. The handle is unusable then; closing again does nothing."""
        self._finalizer()
        self._model = None

    @property
    def library(self) -> ctypes.CDLL:
        """What the model lives in."""
        return self._library

    @property
    def pointer(self) -> int:
        """The model inside the library.

        Raises:
            ValueError: The handle is closed.
        """
        if self._model is None:
            raise ValueError("the model is closed")
        return self._model

    def add_blocks(
        self,
        layer: int,
        slot: int,
        kind: WeightKind,
        num_inputs: int,
        blocks: npt.NDArray[np.uint8],
        rows: npt.NDArray[np.int32],
    ) -> None:
        """Pack a matrix from GGUF blocks of its own kind.

        Args:
            layer: Layer, `EMBEDDING` or `LM_HEAD`.
            slot: `MatrixSlot` in a layer, else 0.
            kind: The blocks' type.
            num_inputs: Input features.
            blocks: [stored rows, bytes of a row], contiguous.
            rows: [columns of the product] the stored row of each; -1 = a column of zeros.
        """
        blocks, rows = np.ascontiguousarray(blocks, np.uint8), checked_rows(rows, len(blocks))
        self._add_matrix(layer, slot, kind, len(rows), num_inputs)
        self._library.kvr_pack_columns(self._model, layer, slot, rows.ctypes.data, blocks.ctypes.data, blocks.shape[1])

    def add_values(self, layer: int, slot: int, values: npt.NDArray[np.float32], rows: npt.NDArray[np.int32]) -> None:
        """Quantize a matrix [stored rows, inputs] fp32 to Q8_0; otherwise as `add_blocks`."""
        values, rows = np.ascontiguousarray(values, np.float32), checked_rows(rows, len(values))
        self._add_matrix(layer, slot, WeightKind.Q8_0, len(rows), values.shape[1])
        self._library.kvr_quantize_columns(self._model, layer, slot, rows.ctypes.data, values.ctypes.data)

    def tie_lm_head(self) -> None:
        """Use the embedding, which must be there, as lm_head too."""
        self._library.kvr_tie_lm_head(self._model)

    def add_vector(self, layer: int, slot: VectorSlot, values: npt.NDArray[np.float32]) -> None:
        """Copy a vector of a layer."""
        self._add_vector(layer, slot, values)

    def add_final_norm(self, values: npt.NDArray[np.float32]) -> None:
        """Copy the final norm's weight."""
        self._add_vector(_FINAL_NORM, 0, values)

    def add_frequencies(self, values: npt.NDArray[np.float32]) -> None:
        """Copy the rotary frequencies, [head_dim / 2]."""
        self._add_vector(_FREQUENCIES, 0, values)

    def measure(self) -> npt.NDArray[np.int64]:
        """Start to measure steps: returns nanoseconds by `StepPart`, which every later step adds to."""
        self._part_ns = np.zeros(len(StepPart), np.int64)
        self._arguments.part_ns = self._part_ns.ctypes.data
        return self._part_ns

    def step(self, pointers: StepPointers, cache: CachePointer, on_layer: Callable[[int], None] | None) -> None:
        """Compute a step. The arrays must stay alive and unchanged until it returns.

        Raises:
            ValueError: The handle is closed.
            IndexError: A token, slot, block or row lies outside the model, the cache or the step.
            MemoryError: There is no workspace for so many rows.
        """
        model, arguments = self.pointer, self._arguments
        set_step(arguments, pointers, cache)
        failures: list[BaseException] = []
        callback = None
        if on_layer is not None:
            callback = _LayerCallback(_guarded(on_layer, failures))
        arguments.on_layer = ctypes.cast(callback, ctypes.c_void_p) if callback is not None else None
        error = self._library.kvr_step(model, ctypes.byref(arguments))
        if failures:
            raise failures[0]
        check_step(error, pointers.num_rows)

    def _add_matrix(self, layer: int, slot: int, kind: WeightKind, num_columns: int, num_inputs: int) -> None:
        if self._library.kvr_add_matrix(self._model, layer, slot, kind, num_columns, num_inputs) != _OK:
            raise MemoryError("more weights than room was asked for")

    def _add_vector(self, layer: int, slot: int, values: npt.NDArray[np.float32]) -> None:
        values = np.ascontiguousarray(values, np.float32)
        if self._library.kvr_add_vector(self._model, layer, slot, values.ctypes.data, values.size) != _OK:
            raise MemoryError("more weights than room was asked for")


def matrix_bytes(library: ctypes.CDLL, kind: WeightKind, num_columns: int, num_inputs: int) -> int:
    """Memory that a packed matrix takes, 64-byte aligned."""
    return -(-int(library.kvr_matrix_bytes(kind, num_columns, num_inputs)) // 64) * 64


def vector_bytes(size: int) -> int:
    """Memory that a vector takes."""
    return -(-size // 32) * 128


def set_step(arguments: StepArguments, pointers: StepPointers, cache: CachePointer) -> None:
    """Fill in a step's arguments, all but who listens to it."""
    for name in _POINTER_FIELDS:
        setattr(arguments, name, getattr(pointers, name))
    arguments.cache, arguments.cache_type = cache.address, cache.type
    arguments.cache_layer_bytes, arguments.cache_block_bytes = cache.layer_bytes, cache.block_bytes
    arguments.cache_block_size, arguments.cache_num_blocks = cache.block_size, cache.num_blocks


def check_step(error: int, num_rows: int) -> None:
    """Raise what a step's error number means; see `NativeHandle.step`."""
    if error == _NO_MEMORY:
        raise MemoryError(f"no workspace for a step of {num_rows} rows")
    if error != _OK:
        raise IndexError("a token, slot, block or row of the step lies outside the model or the cache")


def checked_rows(rows: npt.NDArray[np.int32], num_stored: int) -> npt.NDArray[np.int32]:
    """Return the rows, contiguous; raises IndexError where there is none, or one that is not stored."""
    rows = np.ascontiguousarray(rows, np.int32)
    if rows.size == 0 or int(rows.max()) >= num_stored:
        raise IndexError(f"row {int(rows.max(initial=-1))} of a matrix of {num_stored}")
    return rows


def _guarded(on_layer: Callable[[int], None], failures: list[BaseException]) -> Callable[[int], None]:
    """Keep what `on_layer` raises for the caller of the step: an exception cannot pass through C."""

    def call(layer: int) -> None:
        if failures:
            return
        try:
            on_layer(layer)
        except BaseException as error:  # raised again by `step`
            failures.append(error)

    return call
