"""What answers the tasks: a local cluster behind its gateway, or an engine in this process, with less noise.

Both give `RequestTrace`s. Through the gateway times are what a client sees; in process they hold the engine's steps and
nothing else, and clusters that are not measured take no memory.
"""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from benchmarks.common.clusters import WARM_UP_OUTPUT_TOKENS, WARM_UP_PROMPT_TOKENS, warm_up
from benchmarks.common.prompts import PromptSource
from benchmarks.common.stream import RequestTrace, run_request, wait_idle
from benchmarks.spec.tasks import Chat
from decode_service.settings import DecodeSettings
from engine.engine import Engine
from engine.model.files.source import resolve_model
from engine.types import EngineRequest, RequestId, SamplingParams, SequenceOutput
from kvrelay.client import AsyncClient
from kvrelay.errors import EngineError
from kvrelay.results import Timings, Usage
from kvrelay.text.tokenizer import load_tokenizer
from worker.compute.bootstrap import build_engine


class Variant(Protocol):
    """One way to decode, ready to be measured."""

    async def run(self, token_ids: Sequence[int], max_tokens: int, cache_salt: str) -> RequestTrace:
        """Answer one prompt greedily, until the model ends it or `max_tokens` is reached. Several may run at once."""
        ...

    async def settle(self) -> None:
        """Wait until nothing is left to do."""
        ...

    async def prepare(self, prompts: PromptSource, longest_tokens: int) -> None:
        """Serve what need not be measured: nothing measured is the first of its kind."""
        ...


class ClusterVariant:
    """A cluster behind its gateway."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def run(self, token_ids: Sequence[int], max_tokens: int, cache_salt: str) -> RequestTrace:
        """See `Variant.run`."""
        return await run_request(
            self._client, token_ids, max_tokens=max_tokens, ignore_eos=False, cache_salt=cache_salt
        )

    async def settle(self) -> None:
        """See `Variant.settle`."""
        await wait_idle(self._client)

    async def prepare(self, prompts: PromptSource, longest_tokens: int) -> None:
        """See `Variant.prepare`."""
        await warm_up(self._client, prompts, longest_tokens)


class LocalVariant:
    """A decode worker's engine in this process. A step blocks the event loop, as nothing else is to run meanwhile."""

    def __init__(self, model: str, worker_args: Sequence[str]) -> None:
        """Build the engine from a decode worker's flags."""
        settings = DecodeSettings.parse(["--model", model, *worker_args], "kvrelay bench spec")
        self._engine: Engine = build_engine(settings)
        self._ids = itertools.count(1)
        self._outputs: dict[RequestId, deque[tuple[float, SequenceOutput]]] = {}

    @property
    def context_length(self) -> int:
        """Longest context of the model, in tokens."""
        return self._engine.model.config.max_position

    async def run(self, token_ids: Sequence[int], max_tokens: int, cache_salt: str) -> RequestTrace:
        """See `Variant.run`."""
        request_id = RequestId(next(self._ids))
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        outputs = self._outputs[request_id] = deque()
        arrivals: list[tuple[float, int]] = []
        tokens: list[int] = []
        num_drafted = num_accepted = 0
        started_s = time.perf_counter()
        self._engine.add(EngineRequest(request_id, tuple(token_ids), params, len(token_ids), cache_salt))
        while request_id in self._outputs:
            if not outputs:
                self._step()
                # Others that run at the same time take what is theirs before anybody steps again.
                await asyncio.sleep(0)
                continue
            when, output = outputs.popleft()
            arrivals.append((when, len(output.token_ids)))
            tokens += output.token_ids
            num_drafted += output.num_draft_tokens
            num_accepted += output.num_accepted_tokens
            if output.error is not None:
                raise output.error
            if output.finish_reason is not None:
                del self._outputs[request_id]
        return RequestTrace(
            started_s=started_s,
            arrivals=tuple(arrivals),
            ended_s=arrivals[-1][0],
            token_ids=tuple(tokens),
            text="",
            usage=Usage(len(token_ids), len(tokens), draft_tokens=num_drafted, accepted_tokens=num_accepted),
            timings=Timings(),
        )

    async def settle(self) -> None:
        """See `Variant.settle`: whoever runs a request also steps it to its end."""

    async def prepare(self, prompts: PromptSource, longest_tokens: int) -> None:
        """See `Variant.prepare`."""
        for num_tokens in WARM_UP_PROMPT_TOKENS:
            token_ids = prompts.cut(min(num_tokens, longest_tokens), f"warm-up {num_tokens}")
            await self.run(token_ids, WARM_UP_OUTPUT_TOKENS, "warm-up")

    def _step(self) -> None:
        if not self._engine.has_work:
            raise EngineError("the engine has nothing left to do, but a request has not ended")
        outputs = self._engine.step()
        now = time.perf_counter()
        for output in outputs:
            self._outputs[output.request_id].append((now, output))


class LocalText:
    """A tokenizer in this process, asked as a gateway is."""

    def __init__(self, model: str) -> None:
        self._tokenizer = load_tokenizer(resolve_model(model).path)

    async def tokenize(self, text: str | None = None, *, messages: Chat | None = None) -> list[int]:
        """Return the token ids of a text or a chat."""
        if messages is not None:
            return self._tokenizer.encode_chat(messages)
        return self._tokenizer.encode(text or "")
