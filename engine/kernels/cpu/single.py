"""Single native kernels on numpy arrays, for tests and measurements. A model step does not pass here."""

import ctypes
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine.kernels.cpu.library import CacheType, WeightKind

_Floats = npt.NDArray[np.float32]
_GROUP = 32


class _Arguments(ctypes.Structure):
    """Mirrors `AttentionArguments` in src/kernels_api.h."""

    _fields_ = (
        ("query", ctypes.c_void_p),
        ("kv", ctypes.c_void_p),
        ("slot_mapping", ctypes.c_void_p),
        ("query_start", ctypes.c_void_p),
        ("context_lens", ctypes.c_void_p),
        ("block_tables", ctypes.c_void_p),
        ("cache", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("cache_block_bytes", ctypes.c_int64),
        ("cache_type", ctypes.c_int32),
        ("cache_block_size", ctypes.c_int32),
        ("num_seqs", ctypes.c_int32),
        ("max_blocks", ctypes.c_int32),
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("rows_at_once", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True)
class PagedCache:
    """One layer of a cache as bytes."""

    data: npt.NDArray[np.uint8]
    """[num_blocks, block_bytes], changed in place."""
    type: CacheType
    block_size: int


class Geometry(Protocol):
    """The arrays of a step that attention needs, as in `StepBatch`."""

    @property
    def slot_mapping(self) -> npt.NDArray[np.int64]:
        """[rows]."""

    @property
    def query_start(self) -> npt.NDArray[np.int32]:
        """[num_seqs + 1]."""

    @property
    def context_lens(self) -> npt.NDArray[np.int32]:
        """[num_seqs]."""

    @property
    def block_tables(self) -> npt.NDArray[np.int32]:
        """[num_seqs, max_blocks]."""


class SingleKernels:
    """The kernels of one compiled library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Declare the functions of a library from `open_library`."""
        pointer, i32 = ctypes.c_void_p, ctypes.c_int32
        self._library = library
        for name, arguments in (
            ("kvr_exp", (pointer, pointer, i32)),
            ("kvr_silu", (pointer, pointer, i32)),
            ("kvr_quantize_rows", (pointer, pointer, i32, i32, ctypes.c_float, pointer, pointer)),
            ("kvr_gemm", (i32, i32, i32, pointer, ctypes.c_int64, pointer, pointer, i32, pointer)),
            ("kvr_attention", (ctypes.POINTER(_Arguments),)),
        ):
            function = getattr(library, name)
            function.restype, function.argtypes = None, arguments
        library.kvr_noise_candidates.restype = i32
        library.kvr_noise_candidates.argtypes = (
            pointer,
            pointer,
            i32,
            ctypes.c_uint64,
            ctypes.c_uint32,
            pointer,
        )

    def exp(self, x: _Floats) -> _Floats:
        """e^x of values <= 0; their number is a multiple of 16."""
        return self._map(self._library.kvr_exp, x)

    def silu(self, x: _Floats) -> _Floats:
        """The product x * sigmoid(x); the number of values is a multiple of 16."""
        return self._map(self._library.kvr_silu, x)

    def quantize_rows(
        self, x: _Floats, norm_weight: _Floats | None = None, eps: float = 0.0
    ) -> tuple[npt.NDArray[np.int8], _Floats]:
        """Rows [M, K] as int8 [M, K up to a multiple of 32] and scales [M, groups]; RMS-normalised first if asked."""
        x = np.ascontiguousarray(x, np.float32)
        groups = -(-x.shape[1] // _GROUP)
        quants = np.empty((x.shape[0], groups * _GROUP), np.int8)
        scales = np.empty((x.shape[0], groups), np.float32)
        weight = None if norm_weight is None else np.ascontiguousarray(norm_weight, np.float32).ctypes.data
        self._library.kvr_quantize_rows(x.ctypes.data, weight, *x.shape, eps, quants.ctypes.data, scales.ctypes.data)
        return quants, scales

    def gemm(self, x: _Floats, kind: WeightKind, weights: npt.NDArray[np.uint8] | _Floats) -> _Floats:
        """Rows [M, K] times a matrix of N rows: GGUF blocks of `kind` [N, bytes], or fp32 values for Q8_0. [M, N]."""
        x = np.ascontiguousarray(x, np.float32)
        if not weights.flags.c_contiguous:
            raise ValueError("weights must be contiguous")
        num_columns = weights.shape[0]
        out = np.empty((x.shape[0], -(-num_columns // 16) * 16), np.float32)
        blocks, values = (weights.ctypes.data, None) if weights.dtype == np.uint8 else (None, weights.ctypes.data)
        self._library.kvr_gemm(
            kind, num_columns, x.shape[1], blocks, weights.shape[1], values, x.ctypes.data, x.shape[0], out.ctypes.data
        )
        return out[:, :num_columns]

    def noise_candidates(
        self, weights: _Floats, seed: int, position: int, token_ids: npt.NDArray[np.int64] | None = None
    ) -> npt.NDArray[np.int32]:
        """Indices that may have the largest weight + Gumbel noise: few, and the winner among them.

        Noise as in `engine/sampling/noise.py`, at a fraction of the cost for a whole vocabulary.

        Args:
            weights: [n] log-weights; -inf never wins.
            seed: 64-bit seed.
            position: Position that the noise is keyed by.
            token_ids: [n] token of each weight; None = the index itself.
        """
        weights = np.ascontiguousarray(weights, np.float32)
        ids = None if token_ids is None else np.ascontiguousarray(token_ids, np.int64)
        if ids is not None and ids.shape != weights.shape:
            raise ValueError(f"{ids.size} token ids for {weights.size} weights")
        out = np.empty(weights.size, np.int32)
        count = self._library.kvr_noise_candidates(
            weights.ctypes.data, None if ids is None else ids.ctypes.data, weights.size, seed, position, out.ctypes.data
        )
        if count < 0:
            raise MemoryError(f"no memory to sample from {weights.size} tokens")
        return out[:count]

    def attention(
        self, query: _Floats, kv: _Floats, cache: PagedCache, geometry: Geometry, window: int | None, rows_at_once: int
    ) -> _Floats:
        """Write K and V [rows, 2, kv heads, dim] into the cache and attend from query [rows, heads, dim]."""
        query, kv = np.ascontiguousarray(query, np.float32), np.ascontiguousarray(kv, np.float32)
        out = np.empty_like(query)
        arguments = _Arguments(
            query=query.ctypes.data,
            kv=kv.ctypes.data,
            slot_mapping=geometry.slot_mapping.ctypes.data,
            query_start=geometry.query_start.ctypes.data,
            context_lens=geometry.context_lens.ctypes.data,
            block_tables=geometry.block_tables.ctypes.data,
            cache=cache.data.ctypes.data,
            out=out.ctypes.data,
            cache_block_bytes=cache.data.shape[1],
            cache_type=cache.type,
            cache_block_size=cache.block_size,
            num_seqs=geometry.context_lens.size,
            max_blocks=geometry.block_tables.shape[1],
            num_heads=query.shape[1],
            num_kv_heads=kv.shape[2],
            head_dim=query.shape[2],
            window=window or 0,
            rows_at_once=rows_at_once,
        )
        self._library.kvr_attention(ctypes.byref(arguments))
        return out

    @staticmethod
    def _map(function: "ctypes._NamedFuncPointer", x: _Floats) -> _Floats:
        x = np.ascontiguousarray(x, np.float32)
        if x.size % 16:
            raise ValueError(f"{x.size} values are no multiple of 16")
        out = np.empty_like(x)
        function(x.ctypes.data, out.ctypes.data, x.size)
        return out
