"""A draft head inside the library: weights beside its target's, and the two calls that compute it.

What the calls mean is in src/head.h; where the weights come from, in `engine/spec/head/native.py`.
"""

import ctypes

import numpy as np
import numpy.typing as npt

from engine.kernels.cpu.library import (
    CachePointer,
    MatrixSlot,
    NativeHandle,
    StepArguments,
    StepPointers,
    VectorSlot,
    WeightKind,
    check_step,
    checked_rows,
    matrix_bytes,
    set_step,
    vector_bytes,
)

_KIND = WeightKind.Q4_1
"""How all of a head's weights are stored, output rows too: a pass takes as long as reading them does, and a draft
that rounding changes costs time only."""
_LAYER = 0
_FUSE, _FEATURE_NORM, _OUTPUT_NORM = -3, -3, -2
"""Layer indices of what lies outside the layer, mirroring src/api.cpp."""


class _HeadArguments(ctypes.Structure):
    """Mirrors `HeadArguments` in src/head_api.h."""

    _fields_ = (
        ("step", StepArguments),
        ("carried", ctypes.c_void_p),
        ("previous", ctypes.c_void_p),
        ("states", ctypes.c_void_p),
        ("best", ctypes.c_void_p),
        ("share", ctypes.c_void_p),
    )


class _RunArguments(ctypes.Structure):
    """Mirrors `HeadRunArguments` in src/head_api.h."""

    _fields_ = (
        ("head", _HeadArguments),
        ("vocab_ids", ctypes.c_void_p),
        ("stop_ids", ctypes.c_void_p),
        ("chances", ctypes.c_void_p),
        ("least_reach", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("shares", ctypes.c_void_p),
        ("num_stop_ids", ctypes.c_int32),
        ("max_drafts", ctypes.c_int32),
        ("num_drafts", ctypes.c_int32),
        ("first_ns", ctypes.c_int64),
    )


class HeadMatrix:
    """One matrix [stored rows, inputs] fp32 and where it goes."""

    __slots__ = ("layer", "rows", "slot", "values")

    def __init__(
        self, slot: MatrixSlot | None, values: npt.NDArray[np.float32], rows: npt.NDArray[np.int32] | None = None
    ) -> None:
        """Name a matrix of the layer, or with None the one that fuses.

        Args:
            slot: Which one.
            values: [stored rows, inputs].
            rows: Stored row of each column of the product, -1 = zeros; None = as stored.
        """
        self.layer, self.slot = (_FUSE, 0) if slot is None else (_LAYER, int(slot))
        self.values = np.ascontiguousarray(values, np.float32)
        self.rows = checked_rows(np.arange(len(values), dtype=np.int32) if rows is None else rows, len(values))


class NativeHeadHandle:
    """A head inside the library. It shares its target's threads, and is freed with the target."""

    def __init__(
        self,
        target: NativeHandle,
        num_taps: int,
        num_finding: int,
        rms_norm_eps: float,
        matrices: list[HeadMatrix],
        vectors: dict[VectorSlot, npt.NDArray[np.float32]],
        feature_norm: npt.NDArray[np.float32],
        output_norm: npt.NDArray[np.float32],
        vocab_ids: npt.NDArray[np.int32],
    ) -> None:
        """Quantize and pack the weights.

        Args:
            target: The model whose hidden states the head takes.
            num_taps: Tapped layers.
            num_finding: KV heads that find, the first ones.
            rms_norm_eps: Of the head's norms.
            matrices: All of the layer and the one that fuses.
            vectors: `INPUT_NORM`, the embedding's, and `POST_NORM`, the MLP's.
            feature_norm: [hidden_size].
            output_norm: [hidden_size].
            vocab_ids: Rows of the target's output matrix that the head has, ascending.

        Raises:
            MemoryError: There is no room for the weights.
        """
        library = target.library
        pointer, i32, i64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
        for name, result, arguments in (
            ("kvr_head_new", pointer, (pointer, i32, i32, ctypes.c_float, i64)),
            ("kvr_head_take_rows", i32, (pointer, pointer, i32, pointer, i32)),
            ("kvr_head_absorb", i32, (pointer, pointer, ctypes.POINTER(_HeadArguments))),
            ("kvr_head_draft", i32, (pointer, pointer, ctypes.POINTER(_HeadArguments))),
            ("kvr_head_run", i32, (pointer, pointer, ctypes.POINTER(_RunArguments))),
        ):
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        self._library = library
        self._target = target
        hidden_size = feature_norm.size
        total = matrix_bytes(library, _KIND, len(vocab_ids), hidden_size) + 4 * vector_bytes(hidden_size)
        total += sum(matrix_bytes(library, _KIND, len(m.rows), m.values.shape[1]) for m in matrices)
        self._head = library.kvr_head_new(target.pointer, num_taps, num_finding, rms_norm_eps, total)
        if not self._head:
            raise MemoryError(f"{total} bytes for a draft head are not to be had")
        for matrix in matrices:
            num_columns, num_inputs = len(matrix.rows), matrix.values.shape[1]
            self._check(library.kvr_add_matrix(self._head, matrix.layer, matrix.slot, _KIND, num_columns, num_inputs))
            library.kvr_quantize_columns(
                self._head, matrix.layer, matrix.slot, matrix.rows.ctypes.data, matrix.values.ctypes.data
            )
        for slot, values in vectors.items():
            self._add_vector(_LAYER, slot, values)
        self._add_vector(_FEATURE_NORM, 0, feature_norm)
        self._add_vector(_OUTPUT_NORM, 0, output_norm)
        self._vocab_ids = np.ascontiguousarray(vocab_ids, np.int32)
        ids = self._vocab_ids.ctypes.data
        self._check(library.kvr_head_take_rows(self._head, target.pointer, _KIND, ids, len(vocab_ids)))
        self._arguments = _HeadArguments()
        self._run_arguments = _RunArguments(vocab_ids=ids)

    def absorb(self, pointers: StepPointers, cache: CachePointer, carried: int, states: int) -> None:
        """Fuse the taps of the target's step, which `pointers` describes, and write the head's K and V of its rows.

        Args:
            pointers: The target's step with `taps`, without logits.
            cache: The target's cache with a layer more.
            carried: Address of [num_seqs, state_size]: state before each sequence's first row.
            states: Address of [num_rows, state_size], to be filled.

        Raises:
            ValueError: The target is closed.
            IndexError: As `NativeHandle.step`.
            MemoryError: As `NativeHandle.step`.
        """
        arguments = self._arguments
        set_step(arguments.step, pointers, cache)
        arguments.carried, arguments.states = carried, states
        error = self._library.kvr_head_absorb(self._head, self._target.pointer, ctypes.byref(arguments))
        check_step(error, pointers.num_rows)

    def draft(
        self, pointers: StepPointers, cache: CachePointer, previous: int, states: int, best: int, share: int
    ) -> None:
        """Compute rows up to their logits.

        Args:
            pointers: The rows; all of them want logits, [num_rows, number of vocabulary ids].
            cache: The target's cache with a layer more.
            previous: Address of [num_rows, state_size]: state before each row.
            states: Address of [num_rows, state_size], to be filled; its features are what leaves the layer.
            best: Address of [num_rows] int32, to be filled with the index of each row's largest logit.
            share: Address of [num_rows] fp32, to be filled with its share of the sum of e^logit.

        Raises:
            ValueError: The target is closed.
            IndexError: As `NativeHandle.step`.
            MemoryError: As `NativeHandle.step`.
        """
        arguments = self._arguments
        set_step(arguments.step, pointers, cache)
        arguments.previous, arguments.states = previous, states
        arguments.best, arguments.share = best, share
        error = self._library.kvr_head_draft(self._head, self._target.pointer, ctypes.byref(arguments))
        check_step(error, pointers.num_rows)

    def run(
        self,
        pointers: StepPointers,
        cache: CachePointer,
        previous: int,
        state: int,
        chances: npt.NDArray[np.float32],
        least_reach: npt.NDArray[np.float32],
        stop_ids: npt.NDArray[np.int32],
    ) -> tuple[list[int], list[float], int]:
        """Draft one sequence's likeliest tokens.

        Returns:
            The tokens, their shares of the head's distribution, and the nanoseconds until the first was there.

        Args:
            pointers: One row with logits; its arrays are changed. Its block table covers a row for each draft.
            cache: The target's cache with a layer more.
            previous: Address of [1, state_size], state before the row; changed.
            state: Address of [1, state_size], to be filled with the state behind the last row.
            chances: [10] that a draft is accepted, by tenths of its share.
            least_reach: [most drafts] by drafts made so far; no more when the chance that all is accepted is less.
            stop_ids: Nothing is drafted behind these.

        Raises:
            ValueError: The target is closed.
            IndexError: As `NativeHandle.step`.
            MemoryError: As `NativeHandle.step`.
        """
        arguments, max_drafts = self._run_arguments, len(least_reach)
        best, share = np.empty(1, np.int32), np.empty(1, np.float32)
        tokens, shares = np.empty(max_drafts, np.int32), np.empty(max_drafts, np.float32)
        set_step(arguments.head.step, pointers, cache)
        arguments.head.previous, arguments.head.states = previous, state
        arguments.head.best, arguments.head.share = best.ctypes.data, share.ctypes.data
        arguments.chances, arguments.stop_ids = chances.ctypes.data, stop_ids.ctypes.data
        arguments.tokens, arguments.shares = tokens.ctypes.data, shares.ctypes.data
        arguments.num_stop_ids, arguments.max_drafts = len(stop_ids), max_drafts
        arguments.least_reach = least_reach.ctypes.data
        error = self._library.kvr_head_run(self._head, self._target.pointer, ctypes.byref(arguments))
        check_step(error, 1)
        count: int = arguments.num_drafts
        return tokens[:count].tolist(), shares[:count].tolist(), arguments.first_ns

    def _add_vector(self, layer: int, slot: int, values: npt.NDArray[np.float32]) -> None:
        values = np.ascontiguousarray(values, np.float32)
        self._check(self._library.kvr_add_vector(self._head, layer, slot, values.ctypes.data, values.size))

    def _check(self, error: int) -> None:
        if error:
            raise MemoryError("more weights than room was asked for")
