"""A busy decode worker that dies, breaks or hangs beside another one: nobody notices but for a short pause.

Sixteen sampled streams run on two decode workers when one is struck. Each stream must get the tokens of the run
without faults; those that ran on the victim must have been resumed, and their pause is measured at the client.
"""

import asyncio
import random
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
import pytest_asyncio
import structlog

from kvrelay.client import AsyncClient
from kvrelay.cluster.local import ClusterConfig, LocalCluster
from kvrelay.errors import EngineError, InvalidRequest
from kvrelay.results import Chunk, Complete
from tests.faulty_worker import LATE_POISON, MARK, POISON, command
from tests.settling import settle

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(280)]

_log = structlog.get_logger(__name__)

NUM_STREAMS = 16
MAX_TOKENS = 240
PROMPT_TOKENS = 60
DETECTION_S = 3.0
"""How long a step may take, and a worker be silent, before it counts as hung in these tests."""
LONGEST_PAUSE_S = 3.0
SOAK_SEEDS = range(1, 20)
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in SOAK_SEEDS)]


@dataclass
class Stream:
    """What one client saw."""

    token_ids: list[int] = field(default_factory=list)
    arrivals_s: list[float] = field(default_factory=list)
    complete: Complete | None = None

    @property
    def longest_pause_s(self) -> float:
        """Between two chunks."""
        pairs = zip(self.arrivals_s, self.arrivals_s[1:], strict=False)
        return max((later - earlier for earlier, later in pairs), default=0.0)

    @property
    def is_running(self) -> bool:
        return bool(self.token_ids) and self.complete is None

    @property
    def was_resumed(self) -> bool:
        return self.complete is not None and self.complete.num_attempts > 1


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="cluster")
async def fixture_cluster() -> AsyncIterator[LocalCluster]:
    config = ClusterConfig(
        num_decode=2,
        restarts=True,
        gateway_args=["--worker-silence-s", str(DETECTION_S)],
        decode_args=["--speculation", "none", "--step-stall-s", str(DETECTION_S), "--step-limit-s", "15"],
    )
    async with LocalCluster(config, command_for=command) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="module", name="client")
async def fixture_client(cluster: LocalCluster) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(cluster.target) as client:
        yield client


def _prompt(seed: int, index: int) -> list[int]:
    rng = random.Random(f"{seed}/{index}")
    return [rng.randrange(100, 40_000) for _ in range(PROMPT_TOKENS)]


async def _one(client: AsyncClient, seed: int, index: int, stream: Stream) -> Stream:
    async for event in client.generate(
        token_ids=_prompt(seed, index),
        temperature=0.9,
        seed=1000 * seed + index,
        # The same tokens, but nobody's cached prefix: requests spread over both workers each time.
        cache_salt=str(time.monotonic_ns()),
        max_tokens=MAX_TOKENS,
        ignore_eos=True,
        timeout_s=120,
    ):
        if isinstance(event, Chunk):
            stream.token_ids += event.token_ids
            stream.arrivals_s.append(time.monotonic())
        elif isinstance(event, Complete):
            stream.complete = event
    return stream


async def _run(client: AsyncClient, seed: int, strike: "asyncio.Future[None] | None" = None) -> list[Stream]:
    """Run all streams; `strike` is settled when most of them are in the middle of their answers."""
    streams = [Stream() for _ in range(NUM_STREAMS)]
    running = [asyncio.create_task(_one(client, seed, index, stream)) for index, stream in enumerate(streams)]
    if strike is not None:
        while sum(stream.is_running for stream in streams) < NUM_STREAMS * 3 // 4:
            assert not all(stream.complete for stream in streams)
            await asyncio.sleep(0.01)
        strike.set_result(None)
    return await asyncio.gather(*running)


async def _struck(cluster: LocalCluster, client: AsyncClient, seed: int, number: signal.Signals) -> list[Stream]:
    strike: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(_run(client, seed, strike))
    await asyncio.wait((strike, running), return_when=asyncio.FIRST_COMPLETED)
    cluster.kill("decode-0", number)
    return await running


def _check(streams: list[Stream], expected: list[Stream], longest_pause_s: float) -> None:
    """Every stream has its tokens, some were resumed, and no pause was longer than allowed."""
    assert [stream.token_ids for stream in streams] == [stream.token_ids for stream in expected]
    resumed = [stream for stream in streams if stream.was_resumed]
    # Both workers were running about half of those that ran.
    assert len(resumed) >= NUM_STREAMS // 4
    assert all(stream.complete is not None and stream.complete.decode_worker == "decode-1" for stream in resumed)
    pauses = sorted(stream.longest_pause_s for stream in streams)
    _log.info("pauses", seconds=[round(pause, 2) for pause in pauses])
    assert pauses[-1] < longest_pause_s


def _num_struck(cluster: LocalCluster, name: str) -> list[int]:
    """The sequences in each step that was struck in a worker so far."""
    lines = cluster.process(name).log_path.read_text(errors="replace").splitlines()
    return [int(line.split()[1]) for line in lines if line.startswith(MARK)]


@pytest.mark.parametrize("seed", SEEDS)
async def test_killed(cluster: LocalCluster, client: AsyncClient, seed: int) -> None:
    expected = await _run(client, seed)
    _check(await _struck(cluster, client, seed, signal.SIGKILL), expected, LONGEST_PAUSE_S)
    await settle(client, num_workers=3, timeout_s=60)


@pytest.mark.parametrize("seed", SEEDS)
async def test_step_that_breaks(cluster: LocalCluster, client: AsyncClient, seed: int) -> None:
    expected = await _run(client, seed)
    struck = len(_num_struck(cluster, "decode-0"))
    _check(await _struck(cluster, client, seed, signal.SIGUSR1), expected, LONGEST_PAUSE_S)
    assert len(_num_struck(cluster, "decode-0")) == struck + 1
    assert _num_struck(cluster, "decode-0")[-1] >= NUM_STREAMS // 4
    await settle(client, num_workers=3, timeout_s=60)


@pytest.mark.parametrize("seed", SEEDS)
async def test_step_that_hangs(cluster: LocalCluster, client: AsyncClient, seed: int) -> None:
    expected = await _run(client, seed)
    struck, num_starts = len(_num_struck(cluster, "decode-0")), cluster.process("decode-0").num_starts
    streams = await _struck(cluster, client, seed, signal.SIGUSR2)
    _check(streams, expected, DETECTION_S + LONGEST_PAUSE_S)
    assert len(_num_struck(cluster, "decode-0")) == struck + 1
    # The step sleeps for longer than a step may take: the watchdog ends the process, and another one takes its place.
    await settle(client, num_workers=3, timeout_s=60)
    assert cluster.process("decode-0").num_starts == num_starts + 1


@pytest.mark.parametrize("seed", SEEDS)
async def test_process_that_freezes(cluster: LocalCluster, client: AsyncClient, seed: int) -> None:
    expected = await _run(client, seed)
    try:
        streams = await _struck(cluster, client, seed, signal.SIGSTOP)
    finally:
        cluster.kill("decode-0", signal.SIGCONT)
    _check(streams, expected, DETECTION_S + LONGEST_PAUSE_S)
    await settle(client, num_workers=3, timeout_s=60)


@pytest.mark.parametrize("poison", [POISON, LATE_POISON], ids=["at once", "late"])
async def test_request_that_breaks_every_step_never_reaches_a_third_worker(
    cluster: LocalCluster, client: AsyncClient, poison: tuple[int, ...]
) -> None:
    """Its neighbours, which are beside it in the step that breaks, get their tokens."""
    expected = await _run(client, 77)
    num_starts = {process.name: process.num_starts for process in cluster.processes}
    struck = {name: len(_num_struck(cluster, name)) for name in num_starts}
    strike: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(_run(client, 77, strike))
    await asyncio.wait((strike, running), return_when=asyncio.FIRST_COMPLETED)
    with pytest.raises(EngineError) as caught:
        await client.complete(
            token_ids=[*poison, *_prompt(78, 0)], max_tokens=20, ignore_eos=True, temperature=0, timeout_s=60
        )
    assert caught.value.reason == "STEP_FAILED"
    assert not caught.value.is_retryable
    streams = await running
    assert [stream.token_ids for stream in streams] == [stream.token_ids for stream in expected]
    await settle(client, num_workers=3, timeout_s=60)
    restarted = [process.name for process in cluster.processes if process.num_starts > num_starts[process.name]]
    assert len(restarted) == 2
    sizes = [size for name in restarted for size in _num_struck(cluster, name)[struck[name] :]]
    assert len(sizes) == 2
    # It broke a step with others in it, or was resumed alone.
    assert max(sizes) > 1
    assert any(stream.was_resumed for stream in streams)


async def test_request_that_can_have_no_token_ends_alone(cluster: LocalCluster, client: AsyncClient) -> None:
    """Its fields ban all that they allow, which only the engine sees: nobody else may feel it."""
    pids = [process.pid for process in cluster.processes]
    beside = asyncio.create_task(_one(client, 79, 0, Stream()))
    await asyncio.sleep(0.2)
    word = (await client.tokenize("sea"))[0]
    with pytest.raises(InvalidRequest, match="leave no token"):
        await client.complete("The", allowed_token_ids=[word], bad_words=["sea"], max_tokens=20, timeout_s=60)
    assert (await beside).token_ids == (await _one(client, 79, 0, Stream())).token_ids
    assert [process.pid for process in cluster.processes] == pids
