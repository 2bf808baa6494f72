"""Real processes that die, stop and come back at every phase of a hand-off.

Each request either gets exactly the tokens of the fault-free run or a typed error that may be retried, within its
deadline; and both pools end as they began. Each test asserts that its fault struck some of them: they were resumed,
failed, or waited for as long as the victim stood still.
"""

import asyncio
import random
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio

from kvrelay.client import AsyncClient
from kvrelay.cluster.local import ClusterConfig, LocalCluster
from kvrelay.errors import EngineError
from kvrelay.results import Completion
from tests.settling import settle
from tests.transports import BETWEEN_PROCESSES

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

NUM_REQUESTS = 8
PROMPT_TOKENS = 700
MAX_TOKENS = 48
DEADLINE_S = 60.0
LEASE_TTL_S = 2.0
MOMENTS_S = [0.0, 0.1, 0.3, 0.6, 1.2]
"""When the fault strikes after the requests were admitted: reservation, prefill, transfer, commit, decode."""
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
        token_ids=_prompt(index),
        temperature=0.8,
        seed=index,
        max_tokens=MAX_TOKENS,
        ignore_eos=True,
        timeout_s=DEADLINE_S,
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


async def _serve_until(client: AsyncClient, moment_s: float) -> "asyncio.Task[list[Completion | BaseException]]":
    """Send all requests; returns what serves them once they have been admitted for `moment_s`."""
    running = asyncio.create_task(_serve(client))
    while (await client.server_info(timeout_s=5)).num_running_requests < NUM_REQUESTS:  # noqa: ASYNC110 - elsewhere
        await asyncio.sleep(0.01)
    await asyncio.sleep(moment_s)
    assert not running.done()
    return running


async def _settle(client: AsyncClient) -> None:
    """Wait until every worker is there and idle."""
    await settle(client, num_workers=3, timeout_s=60)


async def _is_serving(client: AsyncClient) -> bool:
    try:
        return await client.is_serving(timeout_s=1)
    except EngineError:
        return False


@dataclass(frozen=True, slots=True)
class Tally:
    """What became of the requests."""

    num_finished: int
    num_struck: int
    """Failed, resumed, or standing still for long."""


def _check(
    outcomes: list[Completion | BaseException], expected: list[tuple[int, ...]], standstill_s: float = DEADLINE_S
) -> Tally:
    """Check every outcome; a request that took `standstill_s` counts as struck."""
    num_finished = num_struck = 0
    for outcome, tokens in zip(outcomes, expected, strict=True):
        if isinstance(outcome, Completion):
            assert outcome.token_ids == tokens
            num_finished += 1
            was_late = outcome.complete.timings.total_ns >= 1e9 * standstill_s
            num_struck += outcome.complete.num_attempts > 1 or was_late
        else:
            assert isinstance(outcome, EngineError), outcome
            assert outcome.is_retryable, outcome
            num_struck += 1
    return Tally(num_finished, num_struck)


@pytest.mark.parametrize(("cluster", "moment_s"), CASES, indirect=["cluster"], scope="module")
async def test_killed_prefill_worker(
    cluster: LocalCluster, client: AsyncClient, expected: list[tuple[int, ...]], moment_s: float
) -> None:
    running = await _serve_until(client, moment_s)
    cluster.kill("prefill-0")
    # Another prefill worker, or decode itself, takes over: nobody loses anything.
    tally = _check(await running, expected)
    assert tally.num_finished == NUM_REQUESTS
    assert tally.num_struck
    await _settle(client)


@pytest.mark.parametrize(("cluster", "moment_s"), CASES, indirect=["cluster"], scope="module")
async def test_killed_decode_worker(
    cluster: LocalCluster, client: AsyncClient, expected: list[tuple[int, ...]], moment_s: float
) -> None:
    running = await _serve_until(client, moment_s)
    cluster.kill("decode-0")
    assert _check(await running, expected).num_struck
    await _settle(client)
    assert _check(await _serve(client), expected) == Tally(NUM_REQUESTS, 0)
    await _settle(client)


@pytest.mark.parametrize(("cluster", "moment_s"), CASES, indirect=["cluster"], scope="module")
async def test_prefill_worker_that_stops_for_longer_than_the_lease_and_wakes_up(
    cluster: LocalCluster, client: AsyncClient, expected: list[tuple[int, ...]], moment_s: float
) -> None:
    running = await _serve_until(client, moment_s)
    cluster.kill("prefill-1", signal.SIGSTOP)
    try:
        await asyncio.sleep(3 * LEASE_TTL_S)
    finally:
        cluster.kill("prefill-1", signal.SIGCONT)
    # The late writer's frames meet a fence; what decode holds by now belongs to others and must stay as it is.
    tally = _check(await running, expected, standstill_s=2 * LEASE_TTL_S)
    assert tally.num_finished == NUM_REQUESTS
    assert tally.num_struck
    await _settle(client)
    assert _check(await _serve(client), expected) == Tally(NUM_REQUESTS, 0)
    await _settle(client)


@pytest.mark.parametrize(("cluster", "moment_s"), CASES, indirect=["cluster"], scope="module")
async def test_decode_worker_that_stops_for_a_while_and_wakes_up(
    cluster: LocalCluster, client: AsyncClient, expected: list[tuple[int, ...]], moment_s: float
) -> None:
    running = await _serve_until(client, moment_s)
    cluster.kill("decode-0", signal.SIGSTOP)
    try:
        await asyncio.sleep(2 * LEASE_TTL_S)
    finally:
        cluster.kill("decode-0", signal.SIGCONT)
    assert _check(await running, expected, standstill_s=2 * LEASE_TTL_S).num_struck
    await _settle(client)
    assert _check(await _serve(client), expected) == Tally(NUM_REQUESTS, 0)
    await _settle(client)


@pytest.mark.parametrize(("cluster", "moment_s"), CASES, indirect=["cluster"], scope="module")
async def test_killed_gateway_frees_all_that_its_session_had_started(
    cluster: LocalCluster, client: AsyncClient, expected: list[tuple[int, ...]], moment_s: float
) -> None:
    running = await _serve_until(client, moment_s)
    cluster.kill("gateway")
    assert _check(await running, expected).num_struck == NUM_REQUESTS
    # It comes back under the same address, and the workers register again.
    async with asyncio.timeout(60):
        while not await _is_serving(client):  # noqa: ASYNC110 - the state is in other processes
            await asyncio.sleep(0.2)
    await _settle(client)
    assert _check(await _serve(client), expected) == Tally(NUM_REQUESTS, 0)
