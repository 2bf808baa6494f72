"""Prompts that queue on the prefill tier for longer than a lease lives: nobody is blamed, and decode is left alone."""

import asyncio
import random
from dataclasses import dataclass

import pytest

from kvrelay.client import AsyncClient
from kvrelay.cluster.local import ClusterConfig, LocalCluster
from kvrelay.results import Completion
from tests.settling import settle

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

NUM_PROMPTS = 10
PROMPT_TOKENS = 1_000
LEASE_TTL_S = 1.0


@dataclass
class MostLeases:
    """What a watcher saw."""

    count: int = 0


async def _watch_leases(client: AsyncClient, most: MostLeases) -> None:
    while True:
        info = await client.server_info(timeout_s=5)
        most.count = max(most.count, *(worker.num_leases for worker in info.workers))
        await asyncio.sleep(0.05)


async def _prompt(client: AsyncClient, index: int) -> Completion:
    rng = random.Random(index)
    token_ids = [rng.randrange(100, 40_000) for _ in range(PROMPT_TOKENS)]
    return await client.complete(token_ids=token_ids, temperature=0, max_tokens=4, ignore_eos=True, timeout_s=120)


@pytest.mark.parametrize(
    ("ahead", "most_leases"),
    [
        # All at once to the prefill worker: leases are renewed while their prompts wait there.
        (NUM_PROMPTS * PROMPT_TOKENS, NUM_PROMPTS),
        # A few ahead: the others wait at the gateway and hold nothing.
        (2 * PROMPT_TOKENS, 3),
    ],
)
async def test_queue_longer_than_the_lease_blames_nobody(ahead: int, most_leases: int) -> None:
    config = ClusterConfig(
        gateway_args=["--max-prefill-tokens", str(ahead)],
        prefill_args=["--max-num-batched-tokens", "64", "--max-num-seqs", "4"],
        decode_args=["--lease-ttl-s", str(LEASE_TTL_S)],
    )
    async with LocalCluster(config) as cluster, AsyncClient(cluster.target) as client:
        most = MostLeases()
        watcher = asyncio.create_task(_watch_leases(client, most))
        answers = await asyncio.gather(*(_prompt(client, index) for index in range(NUM_PROMPTS)))
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
        # The fault struck: some waited for several lives of a lease.
        assert max(answer.complete.timings.queue_ns for answer in answers) > 2e9 * LEASE_TTL_S
        assert [answer.complete.prefill_worker for answer in answers] == ["prefill-0"] * NUM_PROMPTS
        assert [answer.complete.num_attempts for answer in answers] == [1] * NUM_PROMPTS
        assert 1 < most.count <= most_leases
        await settle(client)
