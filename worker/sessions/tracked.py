"""Request bookkeeping that both tiers' servicers share: which requests are here, and when the last one has gone."""

import asyncio
from collections.abc import Iterator
from typing import Generic, TypeVar

from engine.types import RequestId

Item = TypeVar("Item")


class TrackedRequests(Generic[Item]):
    """A dictionary by request id whose emptiness can be awaited."""

    def __init__(self) -> None:
        self._items: dict[RequestId, Item] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Item]:
        return iter(list(self._items.values()))

    def get(self, request_id: RequestId) -> Item | None:
        """Return the request's item, or None when it is not here."""
        return self._items.get(request_id)

    def put(self, request_id: RequestId, item: Item) -> None:
        """Start tracking a request."""
        self._items[request_id] = item
        self._idle.clear()

    def pop(self, request_id: RequestId) -> Item | None:
        """Stop tracking; returns its item, or None when it is not here."""
        item = self._items.pop(request_id, None)
        if not self._items:
            self._idle.set()
        return item

    async def wait_idle(self) -> None:
        """Return once no request is here."""
        await self._idle.wait()
