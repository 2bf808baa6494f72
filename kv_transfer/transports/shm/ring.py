"""Space management of a shared-memory ring: which bytes of it hold payloads that the receiver still reads.

The writing side owns the ring and is the only one to keep books; the reader only ever says which payload it is done
with. Pure; the memory itself is in `connection.py`.
"""

from collections import deque

from kvrelay.errors import TransferError

ALIGNMENT = 64


class RingAllocator:
    """Contiguous regions in a ring, reclaimed in the order in which they were given out.

    Invariants: live regions never overlap and lie inside the ring; with none live the next one starts at offset 0.
    """

    def __init__(self, num_bytes: int, warm_bytes: int | None = None) -> None:
        """Make an empty ring.

        Args:
            num_bytes: Its size.
            warm_bytes: The part at the front that is used again as soon as it is free, so that a receiver that keeps
                up lets payloads stay in the processor's cache; None = the whole ring.
        """
        self.num_bytes = num_bytes
        self._warm_bytes = num_bytes if warm_bytes is None else warm_bytes
        self._regions: deque[int] = deque()
        """Offsets in allocation order."""
        self._ends: dict[int, int] = {}
        self._is_freed: set[int] = set()
        self._next = 0

    @property
    def num_live(self) -> int:
        """Regions not yet freed."""
        return len(self._regions) - len(self._is_freed)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is allocated."""
        return not self._regions

    def allocate(self, num_bytes: int) -> int | None:
        """Return the offset of `num_bytes` contiguous bytes, or None when there is no room now."""
        size = -(-max(num_bytes, 1) // ALIGNMENT) * ALIGNMENT
        if not self._regions:
            # Starting over keeps a lightly used ring in the processor's cache.
            self._next = 0
        offset = self._next
        oldest = self._regions[0] if self._regions else None
        if oldest is None or offset > oldest:
            has_room_in_front = oldest is not None and size <= oldest
            if has_room_in_front and offset + size > self._warm_bytes:
                offset = 0
            elif offset + size > self.num_bytes:
                return None
        elif offset + size > oldest:
            return None
        self._regions.append(offset)
        self._ends[offset] = self._next = offset + size
        return offset

    def free(self, offset: int) -> None:
        """Take a region back.

        Raises:
            TransferError: No live region starts there.
        """
        if offset not in self._ends or offset in self._is_freed:
            raise TransferError(f"no payload lies at offset {offset} of the ring")
        self._is_freed.add(offset)
        while self._regions and self._regions[0] in self._is_freed:
            oldest = self._regions.popleft()
            self._is_freed.discard(oldest)
            del self._ends[oldest]
