"""When a cluster of real processes has nothing left to do, as its gateway sees it."""

import asyncio

from kvrelay.client import AsyncClient


async def settle(client: AsyncClient, num_workers: int | None = None, timeout_s: float = 10.0) -> None:
    """Wait until nothing runs, no lease is held and every block is free.

    Args:
        client: Of the cluster.
        num_workers: How many workers are to be connected and idle; None = all that the gateway knows are to be idle.
        timeout_s: Longest wait.

    Raises:
        TimeoutError: It is still busy, or a worker is missing.
    """
    async with asyncio.timeout(timeout_s):
        while not await _is_idle(client, num_workers):  # noqa: ASYNC110 - the state is in other processes
            await asyncio.sleep(0.1)


async def _is_idle(client: AsyncClient, num_workers: int | None) -> bool:
    info = await client.server_info(timeout_s=5)
    workers = info.workers if num_workers is None else [worker for worker in info.workers if worker.is_connected]
    return (
        info.num_running_requests == 0
        and (num_workers is None or len(workers) == num_workers)
        and all(
            worker.num_free_blocks == worker.num_blocks and worker.num_running == 0 and worker.num_leases == 0
            for worker in workers
        )
    )
