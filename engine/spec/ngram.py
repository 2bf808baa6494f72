"""NgramDrafter: prompt lookup (Saxena 2023): what followed the last tokens the last time they stood somewhere.

Looks in the sequence's own prompt and output first, longest match first, then in finished requests of the same cache
salt. What followed the same tokens each time is told apart from what changes. Costs no model call; good where output
repeats input: retrieval, summaries, edits, code.
"""

from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from enum import IntEnum
from functools import cache

from engine.sequence import Sequence
from engine.spec.drafter import NO_PROPOSAL, Evidence, Proposal
from engine.spec.pace.pacer import DraftPacer
from engine.types import RequestId

MAX_N = 4
MAX_CANDIDATES = 6
"""Places that are kept of each longest n-gram; the one whose match reaches back furthest is taken, the latest first."""
MAX_MATCH = 32
"""Longer matches promise no more."""
SURE_N = 4
"""A match of so many tokens is not compared with what else could follow."""
SHARED_MIN_N = 2
SHARED_MAX_N = 4
MAX_SHARED_TOKENS = 65_536
"""Tokens of finished requests' outputs that are kept over all cache salts; some 50 MiB with what finds them."""
MAX_INDEXED_TOKENS = 256
"""Tokens of prompts that one step enters, so that no long prompt makes running streams wait."""
_COMPARED_TOKENS = 4
"""Of so many tokens the expected number accepted decides between two proposals."""


class _Record(IntEnum):
    """What followed an n-gram each time."""

    ONCE = 0
    """It stood there once."""
    CHANGED = 1
    """Another token followed the last time than the time before."""
    SAME = 2
    """The same token followed the last two times."""
    ALWAYS = 3
    """The same token followed the last three times."""


_GRADES = (1, 2, 3, 4, 5, 7, 10, 16, MAX_MATCH)
"""Lengths of a match that are told apart, each up to the next."""
_PRIORS = (
    (0.33, 0.14, 0.45, 0.7),
    (0.55, 0.25, 0.7, 0.85),
    (0.67, 0.27, 0.75, 0.9),
    (0.7, 0.35, 0.8, 0.95),
    (0.75, 0.4, 0.85, 0.97),
    (0.82, 0.5, 0.9, 0.98),
    (0.87, 0.6, 0.93, 0.98),
    (0.93, 0.75, 0.96, 0.99),
    (0.97, 0.9, 0.98, 0.99),
)
"""By grade and record: measured on Spec-Bench with SmolLM2."""
_SHARED_PRIORS = (0.15, 0.18, 0.28, 0.37, 0.53, 0.6, 0.6, 0.7, 0.8)


def _grade(length: int) -> int:
    return max(index for index, grade in enumerate(_GRADES) if grade <= length)


@cache
def _own_evidence(length: int, record: _Record) -> Evidence:
    place = _grade(length)
    return Evidence("ngram", 4 * _GRADES[place] + record, _PRIORS[place][record])


@cache
def _shared_evidence(length: int) -> Evidence:
    place = _grade(length)
    return Evidence("shared", _GRADES[place], _SHARED_PRIORS[place])


@dataclass(frozen=True, slots=True)
class _Match:
    """A place where the tail of a token list stood before."""

    end: int
    """Position behind that place."""
    length: int
    """Tokens that agree."""


class _Index:
    """Where each n-gram of one token list ended last, and whether the same token always followed.

    Invariant: an n-gram is entered only once a token follows it, so a hit always has a continuation.
    """

    def __init__(self) -> None:
        # By n - 1: n-gram -> position behind its last place, and position -> the one before it of the same n-gram.
        # 0 = none. Numbers only: lists by n-gram would keep the garbage collector busy.
        self._last: tuple[dict[tuple[int, ...], int], ...] = tuple({} for _ in range(MAX_N))
        self._before: tuple[list[int], ...] = tuple([0] * n for n in range(1, MAX_N + 1))
        self._num_seen = 0

    def update(self, tokens: SequenceOf[int], max_tokens: int) -> int:
        """Enter what came since the last call, at most `max_tokens` of it; returns how many were entered."""
        stop = min(len(tokens), self._num_seen + max_tokens)
        for n, (last, before) in enumerate(zip(self._last, self._before, strict=True), start=1):
            start = max(self._num_seen, n)
            if start >= stop:
                break
            columns = [tokens[start - n + place : stop - n + place] for place in range(n)]
            for end, key in enumerate(zip(*columns, strict=True), start):
                before.append(last.get(key, 0))
                last[key] = end
        num_entered = max(stop - self._num_seen, 0)
        self._num_seen += num_entered
        return num_entered

    def find(self, tokens: SequenceOf[int]) -> _Match | None:
        """Return the latest of the longest earlier occurrences of the tail of `tokens`."""
        for n in range(min(MAX_N, len(tokens) - 1), 0, -1):
            end = self._last[n - 1].get(tuple(tokens[-n:]), 0)
            if not end:
                continue
            best = _Match(end, n if n < MAX_N else _agreement(tokens, end))
            for _ in range(MAX_CANDIDATES - 1 if n == MAX_N else 0):
                end = self._before[n - 1][end]
                if not end or best.length >= MAX_MATCH:
                    break
                length = _agreement(tokens, end)
                if length > best.length:
                    best = _Match(end, length)
            return best
        return None

    def record(self, tokens: SequenceOf[int], tail: tuple[int, ...]) -> _Record:
        """Return what is known of an n-gram's followers."""
        n = len(tail)
        last = self._last[n - 1].get(tail, 0)
        second = self._before[n - 1][last] if last else 0
        if not second:
            return _Record.ONCE
        follower = tokens[last]
        if tokens[second] != follower:
            return _Record.CHANGED
        third = self._before[n - 1][second]
        return _Record.ALWAYS if third and tokens[third] == follower else _Record.SAME


def _agreement(tokens: SequenceOf[int], end: int) -> int:
    """Return how many tokens before `end` equal the last ones, from the known `MAX_N` on."""
    most = min(MAX_MATCH, end)
    length = MAX_N
    while length < most and tokens[end - length - 1] == tokens[-length - 1]:
        length += 1
    return length


class _SharedPool:
    """Outputs of finished requests of one cache salt, searchable by their n-grams."""

    def __init__(self) -> None:
        self._lists: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        self._ends: dict[tuple[int, ...], tuple[int, int]] = {}
        self._next_id = 0

    def add(self, tokens: tuple[int, ...]) -> None:
        """Keep an output."""
        list_id = self._next_id
        self._next_id += 1
        self._lists[list_id] = tokens
        for key, end in _shared_keys(tokens):
            self._ends[key] = (list_id, end)

    def drop_oldest(self) -> int:
        """Forget the output that came first; returns its tokens, 0 when none is left."""
        if not self._lists:
            return 0
        list_id, tokens = self._lists.popitem(last=False)
        for key, _ in _shared_keys(tokens):
            if self._ends.get(key, (-1, 0))[0] == list_id:
                del self._ends[key]
        return len(tokens)

    def find(self, tokens: SequenceOf[int], max_tokens: int) -> Proposal:
        """Propose what followed the tail of `tokens` the last time."""
        for n in range(min(SHARED_MAX_N, len(tokens)), SHARED_MIN_N - 1, -1):
            hit = self._ends.get(tuple(tokens[-n:]))
            if hit is not None:
                list_id, end = hit
                rest = self._lists[list_id][end : end + max_tokens]
                return Proposal(rest, tuple(_shared_evidence(n + place) for place in range(len(rest))))
        return NO_PROPOSAL


def _shared_keys(tokens: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], int]]:
    for end in range(SHARED_MIN_N, len(tokens)):
        for n in range(SHARED_MIN_N, min(SHARED_MAX_N, end) + 1):
            yield tokens[end - n : end], end


class _Known:
    """What is kept of one running sequence."""

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.index = _Index()


class NgramDrafter:
    """See the module. Keeps one index per running sequence."""

    name = "ngram"

    def __init__(self, pacer: DraftPacer) -> None:
        """Make a drafter that asks the pacer which of several guesses is better, and how far to guess."""
        self._pacer = pacer
        self._known: dict[RequestId, _Known] = {}
        # From the salt that was added to least recently.
        self._shared: OrderedDict[str, _SharedPool] = OrderedDict()
        self._num_shared_tokens = 0

    def propose(self, sequences: SequenceOf[Sequence], max_tokens: SequenceOf[int]) -> list[Proposal]:
        """See `Drafter.propose`."""
        budget = MAX_INDEXED_TOKENS
        proposals: list[Proposal] = []
        for sequence, limit in zip(sequences, max_tokens, strict=True):
            if limit <= 0:
                proposals.append(NO_PROPOSAL)
                continue
            index = self._index(sequence)
            budget -= index.update(sequence.token_ids, budget)
            proposals.append(self._propose_one(sequence, index, limit))
        return proposals

    def forget(self, request_id: RequestId) -> None:
        """See `Drafter.forget`; the tokens stay searchable for later requests of the same salt."""
        known = self._known.pop(request_id, None)
        if known is None:
            return
        sequence = known.sequence
        # What led to the output is what it will be found by.
        tokens = tuple(sequence.token_ids[max(sequence.num_prompt_tokens - SHARED_MAX_N, 0) :])
        salt = sequence.request.cache_salt
        pool = self._shared.pop(salt, None) or _SharedPool()
        self._shared[salt] = pool
        pool.add(tokens)
        self._num_shared_tokens += len(tokens)
        while self._num_shared_tokens > MAX_SHARED_TOKENS:
            oldest_salt, oldest = next(iter(self._shared.items()))
            num_dropped = oldest.drop_oldest()
            self._num_shared_tokens -= num_dropped
            if not num_dropped:
                del self._shared[oldest_salt]

    def _index(self, sequence: Sequence) -> _Index:
        known = self._known.get(sequence.request_id)
        if known is None:
            known = self._known[sequence.request_id] = _Known(sequence)
        return known.index

    def _propose_one(self, sequence: Sequence, index: _Index, max_tokens: int) -> Proposal:
        tokens = sequence.token_ids
        match = index.find(tokens)
        own = NO_PROPOSAL if match is None else self._own_proposal(index, tokens, match, max_tokens)
        if match is not None and match.length >= SURE_N:
            return own
        pool = self._shared.get(sequence.request.cache_salt)
        shared = NO_PROPOSAL if pool is None else pool.find(tokens, max_tokens)
        if not shared.token_ids:
            return own
        return max(own, shared, key=lambda proposal: self._promise(sequence.request_id, proposal))

    def _promise(self, request_id: RequestId, proposal: Proposal) -> float:
        return sum(self._pacer.acceptance.chances(request_id, proposal.evidence[:_COMPARED_TOKENS]))

    def _own_proposal(self, index: _Index, tokens: SequenceOf[int], match: _Match, max_tokens: int) -> Proposal:
        """Propose what follows a match, going round when the end is reached: a period goes on as it did."""
        period = len(tokens) - match.end
        tail = list(tokens[-MAX_N:])
        num_before = len(tail)
        evidence: list[Evidence] = []
        reach, least = 1.0, self._pacer.least_chance
        for place in range(max_tokens):
            # A token behind k accepted ones continues a match that is k longer.
            length = min(match.length + place, MAX_MATCH)
            evidence.append(_own_evidence(length, index.record(tokens, tuple(tail[-min(length, MAX_N) :]))))
            tail.append(tokens[match.end + place % period])
            reach *= evidence[-1].prior
            if reach < least:
                break
        return Proposal(tuple(tail[num_before:]), tuple(evidence))
