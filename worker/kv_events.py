"""KvEventLog: what enters and leaves a worker's prefix cache, for subscribers that route by prefix.

Nothing is recorded while nobody listens. Belongs to the event loop; asks the engine's thread for changes.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator

from engine.cache.block_pool import CacheEvents
from engine.cache.prefix_index import CachedBlock
from engine.engine import Engine
from engine.loop import EngineLoop
from engine.types import BlockHash
from kvrelay.v1 import worker_service_pb2 as pb

POLL_INTERVAL_S = 0.2
MAX_KEPT_BATCHES = 1024


class KvEventLog:
    """Numbers batches of changes and replays the last ones.

    Invariant: sequence numbers of kept batches are consecutive and end with `_last`.
    """

    def __init__(self, engine_loop: EngineLoop) -> None:
        self._engine_loop = engine_loop
        self._kept: deque[pb.SubscribeKvEventsResponse] = deque(maxlen=MAX_KEPT_BATCHES)
        self._last = 0
        self._num_subscribers = 0
        self._lock = asyncio.Lock()

    @property
    def _oldest(self) -> int:
        """Number of the oldest batch that can be replayed; of the next one where none can."""
        return self._kept[0].sequence_number if self._kept else self._last + 1

    async def subscribe(self, start_sequence_number: int) -> AsyncGenerator[pb.SubscribeKvEventsResponse, None]:
        """Yield batches from the number on; a snapshot wherever the next one is not kept any more, or the number is 0.

        So a subscriber that does not keep up loses the single changes, and nothing grows meanwhile.
        """
        self._num_subscribers += 1
        try:
            await self._poll()
            position = start_sequence_number - 1
            while True:
                if not self._oldest - 1 <= position <= self._last:
                    # Read after the position: what changes in between comes twice rather than never.
                    position = self._last
                    blocks = await self._engine_loop.call(lambda engine: engine.pool.cached_blocks())
                    yield pb.SubscribeKvEventsResponse(
                        sequence_number=position, stored=[_stored(block) for block in blocks], is_snapshot=True
                    )
                for batch in [batch for batch in self._kept if batch.sequence_number > position]:
                    yield batch
                    position = batch.sequence_number
                await asyncio.sleep(POLL_INTERVAL_S)
                await self._poll()
        finally:
            self._num_subscribers -= 1
            if self._num_subscribers == 0:
                await self._engine_loop.call(lambda engine: engine.pool.record_events(is_on=False))

    async def _poll(self) -> None:
        async with self._lock:
            events = await self._engine_loop.call(_take_events)
            if events.are_lost:
                self._kept.clear()
                self._last += 1
            elif events.stored or events.removed:
                self._last += 1
                self._kept.append(
                    pb.SubscribeKvEventsResponse(
                        sequence_number=self._last,
                        stored=[_stored(block) for block in events.stored],
                        removed_block_hashes=[short_hash(block_hash) for block_hash in events.removed],
                    )
                )


def short_hash(block_hash: BlockHash) -> int:
    """Return the first 64 bits of a block hash."""
    return int.from_bytes(block_hash[:8], "big")


def _stored(block: CachedBlock) -> pb.KvBlockStored:
    return pb.KvBlockStored(block_hash=short_hash(block.block_hash), parent_block_hash=short_hash(block.parent))


def _take_events(engine: Engine) -> CacheEvents:
    engine.pool.record_events(is_on=True)
    return engine.pool.take_events()
