"""Brings a checkpoint into the native kernels: which matrices keep their GGUF blocks and which are quantized.

Q4_0, Q4_1 and Q8_0 blocks are kept bit for bit, only repacked. Every other type (F32, F16, BF16, K-quants, Q5) becomes
Q8_0: int8 with an fp16 scale per 32 inputs, symmetric. Norms and biases stay fp32. The forms are described in
`engine/kernels/cpu/src/weights.h`; nothing here knows how a step uses them.
"""

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import gguf
import numpy as np
import numpy.typing as npt

from engine.config import ModelConfig
from engine.kernels.cpu.build import KernelsUnavailable
from engine.kernels.cpu.library import (
    EMBEDDING,
    LM_HEAD,
    MAX_HEAD_DIM,
    MatrixSlot,
    ModelShape,
    NativeHandle,
    VectorSlot,
    WeightKind,
    matrix_bytes,
    vector_bytes,
)
from engine.model.files.gguf_file import GgufFile
from engine.model.files.gguf_weights import INTERLEAVED_ARCHITECTURES, INTERLEAVED_PARAMETERS, GgufWeights
from engine.model.weights import EMBEDDING as EMBEDDING_PARAMETER
from engine.model.weights import FINAL_NORM, WeightReader
from engine.model.weights import LM_HEAD as LM_HEAD_PARAMETER

_Bytes = npt.NDArray[np.uint8]
_Floats = npt.NDArray[np.float32]
_RowOrder = npt.NDArray[np.int32]

_EXACT_KINDS = {
    gguf.GGMLQuantizationType.Q4_0: WeightKind.Q4_0,
    gguf.GGMLQuantizationType.Q4_1: WeightKind.Q4_1,
    gguf.GGMLQuantizationType.Q8_0: WeightKind.Q8_0,
}
_FLOAT_TYPES = (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.BF16)
_HEAD_LANES = 16
"""Columns of a head are padded to whole tiles, so that a head is a whole number of them."""
_MATRICES = {
    MatrixSlot.Q: "self_attn.q_proj",
    MatrixSlot.K: "self_attn.k_proj",
    MatrixSlot.V: "self_attn.v_proj",
    MatrixSlot.O: "self_attn.o_proj",
    MatrixSlot.GATE: "mlp.gate_proj",
    MatrixSlot.UP: "mlp.up_proj",
    MatrixSlot.DOWN: "mlp.down_proj",
}
_VECTORS = {
    VectorSlot.INPUT_NORM: "input_layernorm.weight",
    VectorSlot.POST_NORM: "post_attention_layernorm.weight",
    VectorSlot.Q_NORM: "self_attn.q_norm.weight",
    VectorSlot.K_NORM: "self_attn.k_norm.weight",
    VectorSlot.Q_BIAS: "self_attn.q_proj.bias",
    VectorSlot.K_BIAS: "self_attn.k_proj.bias",
    VectorSlot.V_BIAS: "self_attn.v_proj.bias",
}


class BlockReader(Protocol):
    """A checkpoint's quantized matrices as they are stored."""

    def kind(self, parameter: str) -> WeightKind | None:
        """The kernels' kind whose blocks the parameter is stored in; None = it must be read as fp32."""

    def blocks(self, parameter: str) -> tuple[_Bytes, _RowOrder]:
        """Stored blocks [rows, bytes of a row], and for each row of the parameter the index of its stored row."""


class NoBlocks:
    """A checkpoint without quantized matrices."""

    def kind(self, parameter: str) -> WeightKind | None:
        """See `BlockReader.kind`."""
        return None

    def blocks(self, parameter: str) -> tuple[_Bytes, _RowOrder]:
        """See `BlockReader.blocks`."""
        raise KeyError(parameter)


class GgufBlocks:
    """The blocks of a GGUF file, mapped."""

    def __init__(self, file: GgufFile, reader: GgufWeights, config: ModelConfig) -> None:
        self._file = file
        self._reader = reader
        self._is_interleaved = config.architecture in INTERLEAVED_ARCHITECTURES
        self._head_dim = config.head_dim
        self._data: _Bytes = np.memmap(file.path, np.uint8, "r")

    def kind(self, parameter: str) -> WeightKind | None:
        """See `BlockReader.kind`."""
        return _EXACT_KINDS.get(self._file.tensors[self._reader.stored_name(parameter)].type)

    def blocks(self, parameter: str) -> tuple[_Bytes, _RowOrder]:
        """See `BlockReader.blocks`."""
        tensor = self._file.tensors[self._reader.stored_name(parameter)]
        rows = self._data[tensor.offset : tensor.offset + tensor.num_bytes].reshape(tensor.shape[0], -1)
        order = np.arange(tensor.shape[0], dtype=np.int32)
        if self._is_interleaved and parameter.endswith(INTERLEAVED_PARAMETERS):
            # Stored order within a head: 0, half, 1, half + 1, ...
            order = order.reshape(-1, self._head_dim // 2, 2).swapaxes(1, 2).reshape(-1)
        return rows, np.ascontiguousarray(order)


@dataclass(frozen=True, slots=True)
class _Matrix:
    layer: int
    slot: int
    parameter: str
    shape: tuple[int, int]
    head_size: int | None
    """Columns of a head where heads are padded."""


def has_float_matrices(file: GgufFile) -> bool:
    """Whether any matrix of a GGUF file is not quantized, so that running it natively would round it."""
    return any(len(tensor.shape) > 1 and tensor.type in _FLOAT_TYPES for tensor in file.tensors.values())


def check_head_dim(config: ModelConfig) -> None:
    """Raise `KernelsUnavailable` if the model's heads are too large for the kernels."""
    if config.head_dim > MAX_HEAD_DIM:
        raise KernelsUnavailable(f"heads of {config.head_dim} elements are above {MAX_HEAD_DIM}")


def load_native_weights(
    library: ctypes.CDLL,
    config: ModelConfig,
    reader: WeightReader,
    blocks: BlockReader,
    inverse_frequencies: _Floats,
    num_threads: int,
    progress: Callable[[int, int], None],
) -> NativeHandle:
    """Build the model inside the library.

    Args:
        library: From `load_library`.
        config: The model's shape.
        reader: Its parameters; checked to be complete.
        blocks: Those of them that are stored quantized.
        inverse_frequencies: [head_dim / 2].
        num_threads: Threads of a step.
        progress: Called with (bytes loaded, bytes in all) as they lie in memory, after each part.

    Raises:
        KernelsUnavailable: The model's heads are too large for the kernels.
        MemoryError: There is no room for the weights.
    """
    check_head_dim(config)
    matrices = tuple(_matrices(config))
    sizes = [_packed_bytes(library, matrix, blocks) for matrix in matrices]
    vectors = {name: reader.read(name).numpy() for name in _vector_parameters(config)}
    vector_total = sum(vector_bytes(v.size) for v in vectors.values()) + vector_bytes(inverse_frequencies.size)
    total = sum(sizes) + vector_total
    handle = NativeHandle(library, _shape(config), num_threads, total)
    for name, values in vectors.items():
        _add_vector(handle, name, values)
    handle.add_frequencies(inverse_frequencies)
    done = vector_total
    for matrix, size in zip(matrices, sizes, strict=True):
        _add_matrix(handle, matrix, reader, blocks)
        done += size
        progress(done, total)
    if config.tie_embeddings:
        handle.tie_lm_head()
    return handle


def _shape(config: ModelConfig) -> ModelShape:
    return ModelShape(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        window=config.sliding_window or 0,
        rms_norm_eps=config.rms_norm_eps,
    )


def _matrices(config: ModelConfig) -> Iterator[_Matrix]:
    """Every matrix of the model, in the order in which a step reads them."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes = {
        MatrixSlot.Q: (query, hidden),
        MatrixSlot.K: (kv, hidden),
        MatrixSlot.V: (kv, hidden),
        MatrixSlot.O: (hidden, query),
        MatrixSlot.GATE: (inner, hidden),
        MatrixSlot.UP: (inner, hidden),
        MatrixSlot.DOWN: (hidden, inner),
    }
    yield _Matrix(EMBEDDING, 0, EMBEDDING_PARAMETER, (config.vocab_size, hidden), None)
    for layer in range(config.num_layers):
        for slot, name in _MATRICES.items():
            heads = config.head_dim if slot in (MatrixSlot.Q, MatrixSlot.K, MatrixSlot.V) else None
            yield _Matrix(layer, slot, f"model.layers.{layer}.{name}.weight", shapes[slot], heads)
    if not config.tie_embeddings:
        yield _Matrix(LM_HEAD, 0, LM_HEAD_PARAMETER, (config.vocab_size, hidden), None)


def _vector_parameters(config: ModelConfig) -> Iterator[str]:
    for layer in range(config.num_layers):
        for slot, name in _VECTORS.items():
            is_there = True
            if slot in (VectorSlot.Q_NORM, VectorSlot.K_NORM):
                is_there = config.qk_norm
            elif slot in (VectorSlot.Q_BIAS, VectorSlot.K_BIAS, VectorSlot.V_BIAS):
                is_there = config.attention_bias
            if is_there:
                yield f"model.layers.{layer}.{name}"
    yield FINAL_NORM


def _add_vector(handle: NativeHandle, parameter: str, values: _Floats) -> None:
    if parameter == FINAL_NORM:
        handle.add_final_norm(values)
        return
    layer, name = parameter.removeprefix("model.layers.").split(".", 1)
    slot = next(slot for slot, suffix in _VECTORS.items() if suffix == name)
    handle.add_vector(int(layer), slot, values)


def _columns(matrix: _Matrix, order: _RowOrder) -> _RowOrder:
    """Stored row of each column of the product, -1 for the padding of a head."""
    if matrix.head_size is None:
        return order
    return pad_heads(order, matrix.head_size)


def pad_heads(order: _RowOrder, head_size: int) -> _RowOrder:
    """Put columns of nothing, -1, behind each head, so that a head is whole tiles."""
    padding = -head_size % _HEAD_LANES
    return np.pad(order.reshape(-1, head_size), ((0, 0), (0, padding)), constant_values=-1).reshape(-1)


def _packed_bytes(library: ctypes.CDLL, matrix: _Matrix, blocks: BlockReader) -> int:
    num_columns = len(_columns(matrix, np.arange(matrix.shape[0], dtype=np.int32)))
    kind = blocks.kind(matrix.parameter)
    return matrix_bytes(library, WeightKind.Q8_0 if kind is None else kind, num_columns, matrix.shape[1])


def _add_matrix(handle: NativeHandle, matrix: _Matrix, reader: WeightReader, blocks: BlockReader) -> None:
    kind = blocks.kind(matrix.parameter)
    if kind is None:
        values: _Floats = reader.read(matrix.parameter).numpy()
        order = np.arange(matrix.shape[0], dtype=np.int32)
        handle.add_values(matrix.layer, matrix.slot, values, _columns(matrix, order))
        return
    stored, order = blocks.blocks(matrix.parameter)
    handle.add_blocks(matrix.layer, matrix.slot, kind, matrix.shape[1], stored, _columns(matrix, order))
