"""kvrelay itself as one of the systems: through the gateway, like any client."""

import asyncio
import itertools
import time
from collections.abc import Sequence

from benchmarks.common.stream import RequestTrace, run_request
from benchmarks.peers.answers import PeerAnswer, PeerResult
from kvrelay.client import AsyncClient

NAME = "kvrelay"


class KvrelayPeer:
    """See `Peer`.

    Args:
        client: Of a cluster's gateway.
    """

    name = NAME

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._salts = itertools.count()

    async def run(self, prompts: Sequence[Sequence[int]], max_tokens: int, *, together: bool) -> PeerResult:
        """See `Peer.run`. No answer finds anything of another one in a cache."""
        started = time.perf_counter()
        if together:
            traces = await asyncio.gather(*(self._run(prompt, max_tokens) for prompt in prompts))
        else:
            traces = [await self._run(prompt, max_tokens) for prompt in prompts]
        seconds = time.perf_counter() - started
        return PeerResult(tuple(_answer(trace) for trace in traces), seconds)

    def pause(self) -> None:
        """An idle cluster takes no time."""

    def resume(self) -> None:
        """See `pause`."""

    async def _run(self, prompt: Sequence[int], max_tokens: int) -> RequestTrace:
        salt = f"compare {next(self._salts)}"
        return await run_request(self._client, prompt, max_tokens=max_tokens, cache_salt=salt)


def _answer(trace: RequestTrace) -> PeerAnswer:
    return PeerAnswer(
        first_s=trace.arrivals[0][0] - trace.started_s,
        last_s=trace.arrivals[-1][0] - trace.started_s,
        num_tokens=trace.num_tokens,
    )
