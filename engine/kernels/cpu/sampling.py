"""Native sampling on numpy arrays: draws and logprobs of a step's rows in one call, over several threads.

What is drawn is defined by `engine/sampling`; see src/sample.h for when a row is left to it.
"""

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_Row = np.dtype(
    [
        ("logits", np.uint64),
        ("seed", np.uint64),
        ("top_p", np.float64),
        ("temperature", np.float32),
        ("min_p_offset", np.float32),
        ("position", np.uint32),
        ("vocab_size", np.int32),
        ("top_k", np.int32),
        ("token", np.int32),
    ],
    align=True,
)
"""Mirrors `SampleRow` in src/sample.h."""
_Logprobs = np.dtype(
    [
        ("logits", np.uint64),
        ("top", np.uint64),
        ("normaliser", np.float64),
        ("vocab_size", np.int32),
        ("token", np.int32),
        ("num_top", np.int32),
        ("rank", np.int32),
    ],
    align=True,
)
"""Mirrors `LogprobRow` in src/sample.h."""
_UNDECIDED = -1
"""Mirrors src/sample.h."""


@dataclass(frozen=True, slots=True)
class RowDraw:
    """One row to draw a token from."""

    logits: npt.NDArray[np.float32]
    """[vocab_size], contiguous; -inf = banned."""
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    position: int


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """What is asked about one row, and the answer."""

    normaliser: float
    """ln of the sum of e^logit."""
    rank: int
    """Of the token that was asked for, from 1."""
    top: list[int]
    """The best tokens, best first; equal ones by id."""


@dataclass(frozen=True, slots=True)
class RowToken:
    """What a draw gave."""

    token_id: int | None
    """None: no token is allowed, or the row holds NaN or infinity; or it is not decided."""
    is_decided: bool
    """False where rounding could decide: the caller has to."""


class NativeSampler:
    """Threads and workspace for sampling. Used by one thread at a time; freed with the object."""

    def __init__(self, library: ctypes.CDLL, num_threads: int) -> None:
        """Start the threads.

        Args:
            library: From `open_library`.
            num_threads: Threads that share a step's rows, the calling one included.

        Raises:
            MemoryError: The system gives no more threads.
        """
        pointer, i32 = ctypes.c_void_p, ctypes.c_int32
        library.kvr_sampler_new.restype, library.kvr_sampler_new.argtypes = pointer, (i32,)
        library.kvr_sampler_free.restype, library.kvr_sampler_free.argtypes = None, (pointer,)
        library.kvr_draw.restype, library.kvr_draw.argtypes = None, (pointer, pointer, i32)
        library.kvr_logprobs.restype, library.kvr_logprobs.argtypes = None, (pointer, pointer, i32)
        # Tens of microseconds, so the interpreter's lock is kept: getting it back from the event loop's thread would
        # take longer.
        locked = ctypes.PyDLL(library._name)
        locked.kvr_best.restype, locked.kvr_best.argtypes = None, (pointer, pointer, i32, i32, pointer)
        self._best = locked.kvr_best
        self._library = library
        self._sampler = library.kvr_sampler_new(num_threads)
        if not self._sampler:
            raise MemoryError(f"{num_threads} threads are not to be had")
        weakref.finalize(self, library.kvr_sampler_free, self._sampler)

    def best(self, logits: npt.NDArray[np.float32]) -> list[int | None]:
        """Return where each row of [rows, vocab_size] is largest, the first of equals; None: NaN, or infinite."""
        logits = np.ascontiguousarray(logits, np.float32)
        best = np.empty(len(logits), np.int32)
        self._best(self._sampler, logits.ctypes.data, *logits.shape, best.ctypes.data)
        return [token if token >= 0 else None for token in best.tolist()]

    def draw(self, draws: Sequence[RowDraw]) -> list[RowToken]:
        """Draw each row's token."""
        rows = np.empty(len(draws), _Row)
        for row, draw in zip(rows, draws, strict=True):
            row["logits"] = draw.logits.ctypes.data
            row["seed"] = draw.seed
            row["top_p"] = draw.top_p
            row["temperature"] = draw.temperature
            row["min_p_offset"] = np.float32(np.log(draw.min_p)) if draw.min_p > 0 else -np.inf
            row["position"] = draw.position
            row["vocab_size"] = len(draw.logits)
            row["top_k"] = draw.top_k
        self._library.kvr_draw(self._sampler, rows.ctypes.data, len(rows))
        tokens: list[int] = rows["token"].tolist()
        return [RowToken(token if token >= 0 else None, token != _UNDECIDED) for token in tokens]

    def logprobs(self, asked: Sequence[tuple[npt.NDArray[np.float32], int, int]]) -> list[RowLogprobs]:
        """Answer (logits [vocab_size], token, number of best tokens) for each row."""
        rows = np.empty(len(asked), _Logprobs)
        tops = [np.empty(min(num_top, len(logits)), np.int32) for logits, _, num_top in asked]
        for row, top, (logits, token, _) in zip(rows, tops, asked, strict=True):
            row["logits"], row["top"] = logits.ctypes.data, top.ctypes.data
            row["vocab_size"], row["token"], row["num_top"] = len(logits), token, len(top)
        self._library.kvr_logprobs(self._sampler, rows.ctypes.data, len(rows))
        return [
            RowLogprobs(normaliser, rank, top.tolist())
            for normaliser, rank, top in zip(rows["normaliser"].tolist(), rows["rank"].tolist(), tops, strict=True)
        ]
