"""The mailbox: order, waiting, and what survives a new attempt. Request ids."""

import asyncio
import itertools

from engine.types import WorkerId
from gateway.relay.ids import mint_request_ids
from gateway.workers.mailbox import Mailbox
from gateway.workers.messages import AbortRequested
from kvrelay.wire.engine.events import Reserved

RESERVED = Reserved(1, b"", 0)


async def test_waiting_reader_gets_all_that_came_in_order() -> None:
    box = Mailbox()
    reader = asyncio.get_running_loop().create_task(box.drain())
    await asyncio.sleep(0)
    box.post(WorkerId("a"), RESERVED)
    box.post(None, AbortRequested())
    assert await reader == [("a", RESERVED), (None, AbortRequested())]


async def test_cancelled_reader_loses_nothing() -> None:
    box = Mailbox()
    reader = asyncio.get_running_loop().create_task(box.drain())
    await asyncio.sleep(0)
    box.post(WorkerId("a"), RESERVED)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    assert await box.drain() == [("a", RESERVED)]


async def test_only_the_gateways_own_events_survive_a_new_attempt() -> None:
    box = Mailbox()
    box.post(WorkerId("a"), RESERVED)
    box.post(None, AbortRequested())
    box.drop_worker_events()
    assert await box.drain() == [(None, AbortRequested())]


def test_request_ids_cannot_be_guessed_from_one_another() -> None:
    ids = [mint_request_ids(16) for _ in range(1_000)]
    assert all(first > 0 and first + 15 < 2**64 for first in ids)
    # Every bit differs between some two neighbours, the high and the low ones alike: nothing counts up.
    differing = 0
    for one, other in itertools.pairwise(ids):
        differing |= one ^ other
        assert abs(one - other) > 2**32
    assert differing == 2**64 - 1
