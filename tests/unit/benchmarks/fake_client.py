"""A client without a server: answers every request after scripted pauses, and remembers what was asked."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from kvrelay.client import AsyncClient
from kvrelay.errors import CapacityError
from kvrelay.results import Chunk, Complete, Event, ModelSummary, ServerInfo, Started, Timings, Usage
from kvrelay.values import FinishReason

Script = Callable[[Sequence[int], int], Sequence[tuple[float, int]]]
"""From prompt and max_tokens to (pause in s, number of tokens) of each message."""


def one_by_one(prompt: Sequence[int], max_tokens: int) -> list[tuple[float, int]]:
    return [(0.0, 1)] * max_tokens


class FakeClient(AsyncClient):
    """Generates the tokens 0, 1, 2, ... Words of texts are tokens."""

    def __init__(self, script: Script = one_by_one, shed_from: int | None = None) -> None:
        self.script = script
        self.shed_from = shed_from
        self.requests: list[dict[str, Any]] = []
        self.num_running = 0
        self.most_running = 0

    async def generate(self, prompt: str | None = None, **options: Any) -> AsyncGenerator[Event, None]:
        self.requests.append(options)
        if self.shed_from is not None and len(self.requests) > self.shed_from:
            raise CapacityError("no room", retry_after_s=1.0)
        token_ids, max_tokens = options["token_ids"], options["max_tokens"]
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            yield Started(1, 1, "tiny", len(token_ids))
            sent = 0
            for pause_s, count in self.script(token_ids, max_tokens):
                await asyncio.sleep(pause_s)
                yield Chunk(0, sent, tuple(range(sent, sent + count)), "x" * count)
                sent += count
            usage = Usage(prompt_tokens=len(token_ids), completion_tokens=sent)
            yield Complete(0, FinishReason.LENGTH, None, usage, Timings(), "p", "d", 1)
        finally:
            self.num_running -= 1

    async def tokenize(self, text: str | None = None, *, messages: Any = None, model: str = "") -> list[int]:
        words = (text or messages[0][1]).split()
        return list(range(len(words)))

    async def list_models(self) -> tuple[ModelSummary, ...]:
        return (ModelSummary("tiny", "llama", 512, 1000, True),)

    async def server_info(self, timeout_s: float | None = None) -> ServerInfo:
        return ServerInfo("0", (), self.num_running, 0, 0, "")
