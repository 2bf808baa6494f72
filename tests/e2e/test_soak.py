"""Minutes of mixed load on a cluster of real processes: nothing may grow with the number of requests."""

import asyncio
import os
import random
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import structlog

from kvrelay.client import AsyncClient
from kvrelay.cluster.local import ClusterConfig, LocalCluster
from kvrelay.errors import DeadlineExceeded, InvalidRequest
from kvrelay.results import Chunk
from tests.settling import settle

pytestmark = [pytest.mark.soak, pytest.mark.usefixtures("no_leaks")]

_log = structlog.get_logger(__name__)

NUM_STREAMS = 16
WARM_UP_S = 240.0
"""Until what is bounded is full: the prefix cache's blocks, and the 65,536 tokens that n-gram drafting remembers."""
MEASURED_S = 330.0
SAMPLE_EVERY_S = 4.0
MAX_GROWTH_MIB = 16.0
"""Between the first and the last third of the time, with some 3,000 requests between: 6 KiB of each would show. What a
process has from the system varies by up to 9 MiB while what it holds stays the same, since free memory lies between."""
WORDS = ("river", "stone", "letter", "morning", "engine", "garden", "number", "window", "market", "silver", "answer")


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a process holds at a moment."""

    resident_mib: float
    num_descriptors: int
    num_threads: int

    @classmethod
    def of(cls, pid: int) -> "Footprint":
        """Read it from the system."""
        process = Path("/proc") / str(pid)
        fields = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        resident_kib = int(fields["RssAnon"].split()[0]) + int(fields["RssFile"].split()[0])
        return cls(resident_kib / 1024, len(os.listdir(process / "fd")), int(fields["Threads"]))


async def test_nothing_grows_under_load() -> None:
    config = ClusterConfig(worker_args=["--speculation", "auto"])  # of all drafters, the one that keeps most
    outcomes: Counter[str] = Counter()
    samples: dict[str, list[Footprint]] = {}
    async with LocalCluster(config) as cluster, AsyncClient(cluster.target) as client:
        end = time.monotonic() + WARM_UP_S + MEASURED_S
        async with asyncio.TaskGroup() as streams:
            for index in range(NUM_STREAMS):
                streams.create_task(_stream(client, random.Random(index), end, outcomes))
            await asyncio.sleep(WARM_UP_S)
            while time.monotonic() < end:
                for process in cluster.processes:
                    assert process.pid is not None
                    samples.setdefault(process.name, []).append(Footprint.of(process.pid))
                await asyncio.sleep(SAMPLE_EVERY_S)
        await settle(client)
    assert min(outcomes[kind] for kind in KINDS) > 20, outcomes
    held = {name: (_held(seen[: len(seen) // 3]), _held(seen[-len(seen) // 3 :])) for name, seen in samples.items()}
    _log.info("soak.held", num_requests=outcomes.total(), **held)
    for name, (first, last) in held.items():
        assert last.resident_mib - first.resident_mib < MAX_GROWTH_MIB, f"{name} grew: {first} -> {last}"
        assert last.num_descriptors <= first.num_descriptors, f"{name} leaks descriptors: {first} -> {last}"
        assert last.num_threads <= first.num_threads, f"{name} leaks threads: {first} -> {last}"


def _held(seen: list[Footprint]) -> Footprint:
    """Return what a process holds all the time: the rest comes and goes with the rows of a step."""
    return Footprint(
        min(each.resident_mib for each in seen),
        min(each.num_descriptors for each in seen),
        min(each.num_threads for each in seen),
    )


async def _stream(client: AsyncClient, chance: random.Random, end: float, outcomes: Counter[str]) -> None:
    while time.monotonic() < end:
        kind = chance.choice(KINDS)
        await _REQUESTS[kind](client, chance)
        outcomes[kind] += 1


def _prompt(chance: random.Random) -> list[tuple[str, str]]:
    words = chance.choices(WORDS, k=chance.choice((5, 30, 200)))
    return [("user", f"Write about this: {' '.join(words)}.")]


async def _finish(client: AsyncClient, chance: random.Random) -> None:
    await client.complete(messages=_prompt(chance), max_tokens=64, temperature=0)


async def _sample(client: AsyncClient, chance: random.Random) -> None:
    sampling: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1, "logprobs": 2}
    salt = f"tenant {chance.randrange(1000)}"
    await client.complete(messages=_prompt(chance), max_tokens=48, n=2, stop=[" the"], cache_salt=salt, **sampling)


async def _leave(client: AsyncClient, chance: random.Random) -> None:
    stream = client.generate(messages=_prompt(chance), max_tokens=200, ignore_eos=True)
    num_left = chance.randrange(20)
    async for event in stream:
        num_left -= isinstance(event, Chunk)
        if num_left < 0:
            await stream.aclose()


async def _run_late(client: AsyncClient, chance: random.Random) -> None:
    with pytest.raises(DeadlineExceeded):
        await client.complete(messages=_prompt(chance), max_tokens=1000, ignore_eos=True, timeout_s=0.3)


async def _ask_wrongly(client: AsyncClient, chance: random.Random) -> None:
    with pytest.raises(InvalidRequest):
        await client.complete(messages=_prompt(chance), top_p=7.0)
    await asyncio.sleep(0.2)


_REQUESTS = {"finished": _finish, "sampled": _sample, "left": _leave, "late": _run_late, "wrong": _ask_wrongly}
KINDS = tuple(_REQUESTS)
