"""NgramDrafter: prompt lookup (Saxena 2023): what followed the last n tokens the last time they stood somewhere.

Looks in the sequence's own prompt and output first, longest match first, then in finished requests of the same cache
salt. Costs no model call; good where output repeats input: retrieval, summaries, edits, code.
"""

from collections import OrderedDict
from collections.abc import Sequence as SequenceOf

from engine.sequence import Sequence
from engine.types import RequestId

MAX_N = 4
MIN_N = 2
SHARED_N = 4
"""Finished requests are searched for runs of this length only: shorter ones match by chance."""
MAX_SHARED_TOKENS = 65_536
"""Tokens of finished requests that are kept per cache salt, oldest dropped first."""
MAX_SALTS = 64


class _Index:
    """Where each n-gram of one token list ended last.

    Invariant: an n-gram is entered only once a token follows it, so a hit always has a continuation.
    """

    def __init__(self) -> None:
        self._ends: tuple[dict[tuple[int, ...], int], ...] = tuple({} for _ in range(MIN_N, MAX_N + 1))
        self._num_seen = 0

    def update(self, tokens: SequenceOf[int]) -> None:
        """Enter what came since the last call."""
        for end in range(max(self._num_seen, MIN_N), len(tokens)):
            for n in range(MIN_N, min(MAX_N, end) + 1):
                self._ends[n - MIN_N][tuple(tokens[end - n : end])] = end
        self._num_seen = max(self._num_seen, len(tokens))

    def find(self, tokens: SequenceOf[int]) -> int | None:
        """Return the position after the latest earlier occurrence of the longest possible tail of `tokens`."""
        for n in range(min(MAX_N, len(tokens) - 1), MIN_N - 1, -1):
            end = self._ends[n - MIN_N].get(tuple(tokens[-n:]))
            if end is not None:
                return end
        return None


class _SharedPool:
    """Finished token lists of one cache salt, searchable by their n-grams."""

    def __init__(self) -> None:
        self._lists: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        self._ends: dict[tuple[int, ...], tuple[int, int]] = {}
        self._num_tokens = 0
        self._next_id = 0

    def add(self, tokens: tuple[int, ...]) -> None:
        """Keep a finished request's tokens."""
        list_id = self._next_id
        self._next_id += 1
        self._lists[list_id] = tokens
        self._num_tokens += len(tokens)
        for end in range(SHARED_N, len(tokens)):
            self._ends[tokens[end - SHARED_N : end]] = (list_id, end)
        while self._num_tokens > MAX_SHARED_TOKENS and len(self._lists) > 1:
            oldest_id, oldest = self._lists.popitem(last=False)
            self._num_tokens -= len(oldest)
            for end in range(SHARED_N, len(oldest)):
                key = oldest[end - SHARED_N : end]
                if self._ends.get(key, (-1, 0))[0] == oldest_id:
                    del self._ends[key]

    def find(self, tail: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
        """Return what followed `tail` the last time, or ()."""
        hit = self._ends.get(tail)
        if hit is None:
            return ()
        list_id, end = hit
        return self._lists[list_id][end : end + max_tokens]


class NgramDrafter:
    """See the module. Keeps one index per running sequence."""

    name = "ngram"

    def __init__(self) -> None:
        self._indexes: dict[RequestId, tuple[Sequence, _Index]] = {}
        self._shared: OrderedDict[str, _SharedPool] = OrderedDict()

    def propose(self, sequences: SequenceOf[Sequence], max_tokens: SequenceOf[int]) -> list[tuple[int, ...]]:
        """See `Drafter.propose`."""
        return [
            self._propose_one(sequence, limit) if limit > 0 else ()
            for sequence, limit in zip(sequences, max_tokens, strict=True)
        ]

    def forget(self, request_id: RequestId) -> None:
        """See `Drafter.forget`; the tokens stay searchable for later requests of the same salt."""
        entry = self._indexes.pop(request_id, None)
        if entry is None:
            return
        sequence = entry[0]
        salt = sequence.request.cache_salt
        pool = self._shared.pop(salt, None) or _SharedPool()
        self._shared[salt] = pool
        pool.add(tuple(sequence.token_ids))
        while len(self._shared) > MAX_SALTS:
            self._shared.popitem(last=False)

    def _propose_one(self, sequence: Sequence, max_tokens: int) -> tuple[int, ...]:
        tokens = sequence.token_ids
        _, index = self._indexes.setdefault(sequence.request_id, (sequence, _Index()))
        index.update(tokens)
        position = index.find(tokens)
        if position is not None:
            return _continue(tokens, position, max_tokens)
        pool = self._shared.get(sequence.request.cache_salt)
        return () if pool is None else pool.find(tuple(tokens[-SHARED_N:]), max_tokens)


def _continue(tokens: SequenceOf[int], position: int, max_tokens: int) -> tuple[int, ...]:
    """Return the tokens from `position` on, going round when the end is reached: a period goes on as it did."""
    period = len(tokens) - position
    return tuple(tokens[position + offset % period] for offset in range(max_tokens))
