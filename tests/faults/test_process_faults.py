"""Real processes that die, stop and come back at every phase of a hand-off.

Each request either gets exactly the tokens of the fault-free run or a typed error that may be retried, within its
deadline; and both pools end as they began.
"""

import asyncio
import random
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from engine.errors import EngineError
from kvrelay.client import AsyncClient
from kvrelay.cluster import ClusterConfig, LocalCluster
from kvrelay.results import Completion
from tests.settling import settle
from tests.transports import BETWEEN_PROCESSES

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

NUM_REQUESTS = 6
PROMPT_TOKENS = 500
DEADLINE_S = 60.0
LEASE_TTL_S = 2.0
MOMENTS_S = [0.0, 0.1, 0.3, 0.6, 1.2]
"""When the fault strikes after the requests were sent: reservation, prefill, transfer, commit, decode."""
ALWAYS = {("shm", 0.0), ("shm", 0.3)}
"""What runs in every test run; the rest is soak."""
CASES = [
    pytest.param(
        transport,
        moment_s,
        marks=() if (transport, moment_s) in ALWAYS else (pytest.mark.soak,),
        id=f"{transport}-{moment_s:g}s",
    )
    for transport in BETWEEN_PROCESSES
    for moment_s in MOMENTS_S
]


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="cluster")
async def fixture_cluster(request: pytest.FixtureRequest) -> AsyncIterator[LocalCluster]:
    config = ClusterConfig(
        num_prefill=2,
        restarts=True,
        worker_args=["--transport", request.param],
        decode_args=["--lease-ttl-s", str(LEASE_TTL_S), "--no-prefix-cache"],
        prefill_args=["--no-prefix-cache", "--max-num-batched-tokens", "64"],
    )
    async with LocalCluster(config) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="module", name="client")
async def fixture_client(cluster: LocalCluster) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(cluster.target) as client:
        yield client


def _prompt(index: int) -> list[int]:
    rng = random.Random(index)
    return [rng.randrange(100, 40_000) for _ in range(PROMPT_TOKENS)]


async def _one(client: AsyncClient, index: int) -> Completion:
    return await client.complete(
        token_ids=_prompt(index), temperature=0.8, seed=index, max_tokens=24, ignore_eos=True, timeout_s=DEADLINE_S
    )


async def _serve(client: AsyncClient) -> list[Completion | BaseException]:
    requests = (_one(client, index) for index in range(NUM_REQUESTS))
    return await asyncio.gather(*requests, return_exceptions=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="expected")
async def fixture_expected(cluster: LocalCluster) -> list[tuple[int, ...]]:
    async with AsyncClient(cluster.target) as client:
        outcomes = await _serve(client)
    tokens = [outcome.token_ids for outcome in outcomes if isinstance(outcome, Completion)]
    assert len(tokens) == NUM_REQUESTS
    return tokens


async def _settle(client: AsyncClient) -> None:
    """Wait until every worker is there and idle."""
    await settle(client, num_workers=3, timeout_s=60)


async def _is_serving(client: AsyncClient) -> bool:
    try:
        return await client.is_serving(timeout_s=1)
    except EngineError:
        return False


def _check(outcomes: list[Completion | BaseException], expected: list[tuple[int, ...]]) -> int:
    """Check every outcome; returns how many finished."""
    num_finished = 0
    for outcome, tokens in zip(outcomes, expected, strict=True):
        if isinstance(outcome, Completion):
            assert outcome.token_ids == tokens
            num_finished += 1
        else:
            assert isinstance(outcome, EngineError), outcome
            assert outcome.is_retryable, outcome
    return num_finished


@pytest.mark.parametrize(("cluster", "moment_s"), CASES, indirect=["cluster"])
async def test_killed_prefill_worker(
    cluster: LocalCluster, client: AsyncClient, expected: list[tuple[int, ...]], moment_s: float
) -> None:
    running = asyncio.create_task(_serve(client))
    await asyncio.sleep(moment_s)
    cluster.kill("prefill-0")
    # Another prefill worker, or decode itself, takes over: nobody loses anything.
    assert _check(await running, expected) == NUM_REQUESTS
    await _settle(client)


@pytest.mark.parametrize(("cluster", "moment_s"), CASES, indirect=["cluster"])
async def test_killed_decode_worker(
    cluster: LocalCluster, client: AsyncClient, expected: list[tuple[int, ...]], moment_s: float
) -> None:
    running = asyncio.create_task(_serve(client))
    await asyncio.sleep(moment_s)
    cluster.kill("decode-0")
    _check(await running, expected)
    await _settle(client)
    assert _check(await _serve(client), expected) == NUM_REQUESTS
    await _settle(client)


@pytest.mark.parametrize(("cluster", "moment_s"), CASES, indirect=["cluster"])
async def test_prefill_worker_that_stops_for_longer_than_the_lease_and_wakes_up(
    cluster: LocalCluster, client: AsyncClient, expected: list[tuple[int, ...]], moment_s: float
) -> None:
    running = asyncio.create_task(_serve(client))
    await asyncio.sleep(moment_s)
    cluster.kill("prefill-1", signal.SIGSTOP)
    try:
        await asyncio.sleep(3 * LEASE_TTL_S)
    finally:
        cluster.kill("prefill-1", signal.SIGCONT)
    # The late writer's frames meet a fence; what decode holds by now belongs to others and must stay as it is.
    assert _check(await running, expected) == NUM_REQUESTS
    assert _check(await _serve(client), expected) == NUM_REQUESTS
    await _settle(client)


@pytest.mark.parametrize(("cluster", "moment_s"), CASES, indirect=["cluster"])
async def test_decode_worker_that_stops_for_a_while_and_wakes_up(
    cluster: LocalCluster, client: AsyncClient, expected: list[tuple[int, ...]], moment_s: float
) -> None:
    running = asyncio.create_task(_serve(client))
    await asyncio.sleep(moment_s)
    cluster.kill("decode-0", signal.SIGSTOP)
    try:
        await asyncio.sleep(2 * LEASE_TTL_S)
    finally:
        cluster.kill("decode-0", signal.SIGCONT)
    _check(await running, expected)
    await _settle(client)
    assert _check(await _serve(client), expected) == NUM_REQUESTS
    await _settle(client)


@pytest.mark.parametrize(("cluster", "moment_s"), CASES, indirect=["cluster"])
async def test_killed_gateway_frees_all_that_its_session_had_started(
    cluster: LocalCluster, client: AsyncClient, expected: list[tuple[int, ...]], moment_s: float
) -> None:
    running = asyncio.create_task(_serve(client))
    await asyncio.sleep(moment_s)
    cluster.kill("gateway")
    _check(await running, expected)
    # It comes back under the same address, and the workers register again.
    async with asyncio.timeout(60):
        while not await _is_serving(client):  # noqa: ASYNC110 - the state is in other processes
            await asyncio.sleep(0.2)
    await _settle(client)
    assert _check(await _serve(client), expected) == NUM_REQUESTS
