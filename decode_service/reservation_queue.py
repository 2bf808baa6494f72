"""ReservationQueue: who gets KV blocks next. Decisions only; time comes in as an argument."""

from decode_service.request import DecodeRequest
from kvrelay.errors import CapacityError, DeadlineExceeded, EngineError

RETRY_AFTER_S = 1.0


class ReservationQueue:
    """Requests that wait for blocks, earliest deadline first, then in order of arrival.

    The head is never overtaken: a large request would starve behind small ones otherwise. Bounded: what does not fit
    is shed at once, and so is what has waited too long.
    """

    def __init__(self, max_length: int) -> None:
        self._max_length = max_length
        self._entries: list[DecodeRequest] = []

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def head(self) -> DecodeRequest | None:
        """The next to get blocks."""
        return self._entries[0] if self._entries else None

    @property
    def entries(self) -> tuple[DecodeRequest, ...]:
        """All of them, in order."""
        return tuple(self._entries)

    def push(self, entry: DecodeRequest) -> None:
        """Queue a request.

        Raises:
            CapacityError: Too many are waiting.
        """
        # The one that can be granted at once passes through the queue too, so a limit of 0 still lets it in.
        if len(self._entries) > self._max_length:
            raise CapacityError(f"{len(self._entries)} requests wait for KV blocks already", RETRY_AFTER_S)
        key = _key(entry)
        position = next((i for i, other in enumerate(self._entries) if _key(other) > key), len(self._entries))
        self._entries.insert(position, entry)

    def remove(self, entry: DecodeRequest) -> None:
        """Take a request out, if it is here."""
        if entry in self._entries:
            self._entries.remove(entry)

    def expire(self, now: float) -> list[tuple[DecodeRequest, EngineError]]:
        """Take out the requests whose time is over and return them with the reason."""
        expired: list[tuple[DecodeRequest, EngineError]] = []
        for entry in list(self._entries):
            if entry.deadline is not None and entry.deadline <= now:
                expired.append((entry, DeadlineExceeded("the deadline passed while waiting for KV blocks")))
            elif entry.queued_until <= now:
                expired.append((entry, CapacityError("no KV blocks became free in time", RETRY_AFTER_S)))
            else:
                continue
            self._entries.remove(entry)
        return expired


def _key(entry: DecodeRequest) -> tuple[int, float]:
    """Sort key: priority first, then deadline; requests without one go by how long they may wait."""
    return entry.request.priority, entry.queued_until if entry.deadline is None else entry.deadline
