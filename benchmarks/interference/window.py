"""One window of time: streams that run throughout, long prompts at fixed times, and the gaps between tokens.

A gap counts for the window in which it began, and is waited for to its end: a stall cannot hide behind the edge.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.common.prompts import PromptSource
from benchmarks.common.stream import run_request
from kvrelay.client import AsyncClient
from kvrelay.errors import EngineError

FIRST_TOKEN_TIMEOUT_S = 120.0
LAST_GAP_TIMEOUT_S = 120.0
_POLL_INTERVAL_S = 0.01


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """What happens in a window."""

    num_streams: int
    stream_prompt_tokens: int
    stream_output_tokens: int
    """Most tokens of a stream; more than a window lets it generate, or it is started again."""
    seconds: float
    long_prompt_tokens: int
    long_output_tokens: int
    interval_s: float
    """Time from one long prompt to the next."""
    is_disturbed: bool
    """Whether long prompts arrive."""


@dataclass(slots=True)
class WindowResult:
    """What was seen."""

    gaps_ms: list[float] = field(default_factory=list)
    """Times between two messages of one stream."""
    num_tokens: int = 0
    """Tokens of the streams within the window."""
    num_long_sent: int = 0
    long_ttfts_ms: list[float] = field(default_factory=list)
    """Of the long prompts that got their first token within the window and the time to the last gap's end."""


class StreamArrivals:
    """One stream's arrivals."""

    def __init__(self) -> None:
        self.arrivals: list[tuple[float, int]] = []
        self.restarts: set[int] = set()
        """Indexes of arrivals that are the first of a new request: what lies before them is no gap."""

    def start_request(self) -> None:
        self.restarts.add(len(self.arrivals))

    def take(self, now: float, num_tokens: int) -> None:
        self.arrivals.append((now, num_tokens))

    def gaps_ms(self, start_s: float, end_s: float) -> list[float]:
        times = [when for when, _ in self.arrivals]
        return [
            (times[index] - times[index - 1]) * 1e3
            for index in range(1, len(times))
            if index not in self.restarts and start_s <= times[index - 1] < end_s
        ]

    def num_tokens(self, start_s: float, end_s: float) -> int:
        return sum(count for when, count in self.arrivals if start_s <= when < end_s)

    def has_arrival_since(self, moment: float) -> bool:
        return bool(self.arrivals) and self.arrivals[-1][0] >= moment


async def run_window(client: AsyncClient, prompts: PromptSource, plan: WindowPlan, key: str) -> WindowResult:
    """Run one window; everything that it started has ended when it returns.

    Args:
        client: Of the gateway under test.
        prompts: Where text comes from.
        plan: What happens.
        key: Names the window's long prompts, so that none was seen before. The streams' prompts are always the same.

    Raises:
        EngineError: A stream failed, or brought nothing for two minutes.
    """
    streams = [StreamArrivals() for _ in range(plan.num_streams)]
    result = WindowResult()
    tasks = [
        asyncio.create_task(_keep_running(client, prompts, plan, stream, f"stream {index}", key))
        for index, stream in enumerate(streams)
    ]
    long_tasks: list[asyncio.Task[None]] = []
    try:
        await _until_all(streams, tasks, 0.0, FIRST_TOKEN_TIMEOUT_S)
        start_s = time.perf_counter()
        end_s = start_s + plan.seconds
        if plan.is_disturbed:
            await _send_long_prompts(client, prompts, plan, key, start_s, result, long_tasks)
        await asyncio.sleep(max(end_s - time.perf_counter(), 0.0))
        await _until_all(streams, tasks, end_s, LAST_GAP_TIMEOUT_S)
    finally:
        for task in (*tasks, *long_tasks):
            task.cancel()
        await asyncio.gather(*tasks, *long_tasks, return_exceptions=True)
    for stream in streams:
        result.gaps_ms += stream.gaps_ms(start_s, end_s)
        result.num_tokens += stream.num_tokens(start_s, end_s)
    return result


async def _send_long_prompts(
    client: AsyncClient,
    prompts: PromptSource,
    plan: WindowPlan,
    key: str,
    start_s: float,
    result: WindowResult,
    tasks: list[asyncio.Task[None]],
) -> None:
    while (due_s := start_s + result.num_long_sent * plan.interval_s) < start_s + plan.seconds:
        await asyncio.sleep(max(due_s - time.perf_counter(), 0.0))
        token_ids = prompts.cut(plan.long_prompt_tokens, f"{key} long {result.num_long_sent}")
        tasks.append(asyncio.create_task(_send_long(client, token_ids, plan.long_output_tokens, due_s, result)))
        result.num_long_sent += 1


async def _send_long(
    client: AsyncClient, token_ids: Sequence[int], output_tokens: int, due_s: float, result: WindowResult
) -> None:
    seen: list[float] = []

    def on_arrival(now: float, _num_tokens: int) -> None:
        if not seen:
            seen.append(now)
            result.long_ttfts_ms.append((now - due_s) * 1e3)

    try:
        await run_request(client, token_ids, max_tokens=output_tokens, due_s=due_s, on_arrival=on_arrival)
    except EngineError:
        # Shed, perhaps: that too is an answer, and the number of those that got a token tells of it.
        return


async def _keep_running(
    client: AsyncClient, prompts: PromptSource, plan: WindowPlan, stream: StreamArrivals, name: str, key: str
) -> None:
    token_ids = prompts.cut(plan.stream_prompt_tokens, name)
    while True:
        stream.start_request()
        await run_request(
            client,
            token_ids,
            max_tokens=plan.stream_output_tokens,
            on_arrival=stream.take,
            num_draft_tokens=0,
            cache_salt=key,
        )


async def _until_all(
    streams: Sequence[StreamArrivals], tasks: Sequence[asyncio.Task[None]], moment: float, timeout_s: float
) -> None:
    """Wait until every stream has had a message since `moment`."""
    deadline = time.perf_counter() + timeout_s
    while not all(stream.has_arrival_since(moment) for stream in streams):
        for task in tasks:
            if task.done():
                await task  # streams go on for ever: one that ended has failed, and says why
        if time.perf_counter() > deadline:
            raise EngineError(f"a stream brought nothing for {timeout_s:g} s")
        await asyncio.sleep(_POLL_INTERVAL_S)
