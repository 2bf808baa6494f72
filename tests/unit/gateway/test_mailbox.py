"""The mailbox: order, waiting, and what survives a new attempt. Request ids."""

import asyncio

from engine.types import WorkerId
from gateway.ids import RequestIdMinter
from gateway.mailbox import Mailbox
from gateway.messages import AbortRequested, Reserved

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


def test_request_ids_are_unique_within_and_across_processes() -> None:
    minters = [RequestIdMinter(), RequestIdMinter()]
    ids = [minter.mint(count) for minter in minters for count in (1, 3, 1)]
    assert len(set(ids)) == 6
    assert ids[1] - ids[0] == 1
    assert ids[2] - ids[1] == 3
    assert all(0 < request_id < 2**64 for request_id in ids)
    assert ids[0] >> 32 != ids[3] >> 32
