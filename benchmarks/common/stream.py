"""One measured request: when each message of its stream arrived at the client, and what it carried.

Times are those of this process, the client's, so they hold everything a user waits for.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvrelay.client import AsyncClient
from kvrelay.errors import EngineError
from kvrelay.requests import SamplingOptions
from kvrelay.results import Chunk, Complete, Timings, Usage


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """A finished request as its client saw it. Times are seconds of `time.perf_counter`."""

    started_s: float
    """When it was sent, or when it was due."""
    arrivals: tuple[tuple[float, int], ...]
    """(time, number of new tokens) of every message that brought tokens."""
    ended_s: float
    token_ids: tuple[int, ...]
    text: str
    usage: Usage
    timings: Timings

    @property
    def num_tokens(self) -> int:
        """Tokens generated."""
        return len(self.token_ids)

    @property
    def ttft_ms(self) -> float:
        """Time to the first token."""
        return ((self.arrivals[0][0] if self.arrivals else self.ended_s) - self.started_s) * 1e3

    @property
    def decode_s(self) -> float:
        """Time from the first token to the last."""
        return self.arrivals[-1][0] - self.arrivals[0][0] if self.arrivals else 0.0

    @property
    def num_decode_tokens(self) -> int:
        """Tokens after the first message."""
        return sum(count for _, count in self.arrivals[1:])

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token after the first message; None with one message."""
        return self.decode_s * 1e3 / self.num_decode_tokens if self.num_decode_tokens else None

    @property
    def gaps_ms(self) -> list[float]:
        """Times between messages. A message has one token, or several where speculation gained some."""
        times = [when for when, _ in self.arrivals]
        return [(later - earlier) * 1e3 for earlier, later in itertools.pairwise(times)]

    @property
    def step_tokens(self) -> list[int]:
        """Tokens of each message after the first one."""
        return [count for _, count in self.arrivals[1:]]


ArrivalListener = Callable[[float, int], None]


async def run_request(
    client: AsyncClient,
    token_ids: Sequence[int],
    *,
    max_tokens: int,
    due_s: float | None = None,
    on_arrival: ArrivalListener | None = None,
    ignore_eos: bool = True,
    num_draft_tokens: int | None = None,
    cache_salt: str | None = None,
) -> RequestTrace:
    """Send one greedy request and follow it to its end.

    Args:
        client: Of the gateway under test.
        token_ids: The prompt.
        max_tokens: Tokens to generate, exactly, unless `ignore_eos` is False.
        due_s: When an open loop wanted to send it, so that a late client does not flatter the server; None = now.
        on_arrival: Told of every message with tokens at once: time and number.
        ignore_eos: Whether every request generates the same number of tokens.
        num_draft_tokens: Most drafts per step; 0 = plain decoding, None = what the worker is set to.
        cache_salt: Keeps what caches know of earlier requests out of this one.

    Raises:
        EngineError: The server refused or failed the request.
    """
    options = SamplingOptions(
        max_tokens=max_tokens,
        temperature=0.0,
        ignore_eos=ignore_eos or None,
        num_draft_tokens=num_draft_tokens,
        cache_salt=cache_salt,
    )
    arrivals: list[tuple[float, int]] = []
    tokens: list[int] = []
    texts: list[str] = []
    complete: Complete | None = None
    started_s = time.perf_counter() if due_s is None else due_s
    async for event in client.generate(token_ids=token_ids, **options):
        if isinstance(event, Chunk):
            texts.append(event.text)
            if event.token_ids:
                now = time.perf_counter()
                arrivals.append((now, len(event.token_ids)))
                tokens += event.token_ids
                if on_arrival is not None:
                    on_arrival(now, len(event.token_ids))
        elif isinstance(event, Complete):
            complete = event
    if complete is None:
        raise EngineError("the stream ended before the completion did")
    return RequestTrace(
        started_s=started_s,
        arrivals=tuple(arrivals),
        ended_s=time.perf_counter(),
        token_ids=tuple(tokens),
        text="".join(texts),
        usage=complete.usage,
        timings=complete.timings,
    )


async def wait_idle(client: AsyncClient, timeout_s: float = 60.0) -> None:
    """Wait until a gateway and its workers have nothing left to do.

    Raises:
        EngineError: They still have after `timeout_s`.
    """
    try:
        async with asyncio.timeout(timeout_s):
            while not await _is_idle(client):  # noqa: ASYNC110 - the state is in other processes
                await asyncio.sleep(0.1)
    except TimeoutError as error:
        raise EngineError(f"the cluster was still busy after {timeout_s:g} s") from error


async def _is_idle(client: AsyncClient) -> bool:
    info = await client.server_info()
    if info.num_running_requests or info.num_queued_requests:
        return False
    return all(worker.num_running == 0 and worker.num_waiting == 0 for worker in info.workers)
