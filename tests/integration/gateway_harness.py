"""A gateway with fake workers inside the test's own loop, and a client to call it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from engine.model.files.source import ModelSource, resolve_model
from engine.worker_types import WorkerRole
from gateway.app import Gateway
from gateway.settings import GatewaySettings
from kvrelay.channel import PUBLIC_MAX_MESSAGE_BYTES, channel_options
from kvrelay.text.tokenizer import Tokenizer, load_tokenizer
from kvrelay.v1 import inference_service_pb2 as inference_pb2
from kvrelay.v1 import inference_service_pb2_grpc, sampling_pb2, session_pb2
from tests.fake_workers import FakeCluster, FakeDecodeWorker, FakePrefillWorker, Script

ANSWER = " The capital of France is Paris, a city of two million people — “la Ville Lumière” 🗼."
PROMPT = "What is the capital of France, and how many people live there? Answer in one sentence, please."


def load_model() -> tuple[ModelSource, Tokenizer]:
    """Return the built-in model's source and tokenizer, under the name `fake`."""
    source = resolve_model("smollm2")
    return ModelSource(source.kind, source.path, "fake"), load_tokenizer(source.path)


@dataclass
class Answer:
    """All that one Generate call gave."""

    started: inference_pb2.GenerateStarted | None = None
    chunks: list[inference_pb2.GenerateChunk] = field(default_factory=list)
    complete: dict[int, inference_pb2.GenerateComplete] = field(default_factory=dict)

    def token_ids(self, index: int = 0) -> list[int]:
        """Return a completion's tokens, checking that none is skipped or repeated."""
        tokens: list[int] = []
        for chunk in self.chunks:
            if chunk.index == index:
                assert chunk.token_index == len(tokens)
                tokens.extend(chunk.token_ids)
        return tokens

    def text(self, index: int = 0) -> str:
        """Return a completion's text."""
        return "".join(chunk.text for chunk in self.chunks if chunk.index == index)

    def add(self, message: inference_pb2.GenerateResponse) -> None:
        """Take one message, checking the stream's order."""
        match message.WhichOneof("event"):
            case "started":
                assert self.started is None
                assert not self.chunks
                self.started = message.started
            case "chunk":
                assert self.started is not None
                assert message.chunk.index not in self.complete
                self.chunks.append(message.chunk)
            case "complete":
                assert message.complete.index not in self.complete
                self.complete[message.complete.index] = message.complete


class Harness:
    """One gateway, its fake workers, and a stub to it."""

    def __init__(self, source: ModelSource, tokenizer: Tokenizer, settings: dict[str, Any]) -> None:
        self.tokenizer = tokenizer
        defaults = {"port": 0, "worker_wait_s": 1.0, "drain_timeout_s": 1.0}
        self.settings = GatewaySettings.model_validate({**defaults, **settings})
        self.gateway = Gateway(self.settings, source, tokenizer)
        self.eos = min(tokenizer.eos_token_ids)
        self.answer = [*tokenizer.encode(ANSWER, add_special_tokens=False), self.eos]
        self.cluster = FakeCluster(Script(self._tokens, self.eos))
        self.decodes: list[FakeDecodeWorker] = []
        self.prefills: list[FakePrefillWorker] = []
        self._stack = contextlib.AsyncExitStack()

    def _tokens(self, request: session_pb2.EngineRequest) -> list[int]:
        return self.answer

    async def start(self, num_decode: int, num_prefill: int) -> None:
        """Start everything and wait until every session is open."""
        self.decodes = [FakeDecodeWorker(f"decode-{i}", self.cluster) for i in range(num_decode)]
        self.prefills = [FakePrefillWorker(f"prefill-{i}", self.cluster) for i in range(num_prefill)]
        await self.gateway.start()
        self._stack.push_async_callback(self.gateway.stop)
        for worker in (*self.decodes, *self.prefills):
            await worker.start()
            self._stack.push_async_callback(worker.stop)
            await worker.register(self.gateway.address)
        options = channel_options(PUBLIC_MAX_MESSAGE_BYTES)
        channel = await self._stack.enter_async_context(
            grpc.aio.insecure_channel(self.gateway.address, options=options)
        )
        self.channel = channel
        self.stub: Any = inference_service_pb2_grpc.InferenceServiceStub(channel)
        pool = self.gateway.pool
        await until(lambda: len(pool.usable(WorkerRole.DECODE)) == num_decode)
        await until(lambda: len(pool.usable(WorkerRole.PREFILL)) == num_prefill)
        await until(lambda: all(len(prefill.peers) == num_decode for prefill in self.prefills))

    async def stop(self) -> None:
        """Stop everything."""
        await self._stack.aclose()

    def request(self, **params: Any) -> inference_pb2.GenerateRequest:
        """Return a request with the usual prompt and these sampling parameters."""
        return inference_pb2.GenerateRequest(text=PROMPT, sampling_params=sampling_pb2.SamplingParams(**params))

    async def generate(self, request: inference_pb2.GenerateRequest, timeout_s: float | None = 20.0) -> Answer:
        """Call Generate and return all of it."""
        answer = Answer()
        async for message in self.stub.Generate(request, timeout=timeout_s):
            answer.add(message)
        return answer

    async def check_idle(self) -> None:
        """Check that no request left anything behind, on any side."""
        gateway = self.gateway
        await until(lambda: gateway.generation.num_running == 0 and gateway.admission.num_running_slots == 0)
        assert gateway.admission.num_queued == 0
        for session in gateway.pool.sessions():
            assert session.num_requests == 0
            assert session.num_outstanding_tokens == 0
            assert not session._awaiting_prefill
        gate = gateway.prefill_gate
        assert (gate.num_prompts, gate.num_tokens, gate.num_waiting) == (0, 0, 0)
        for worker in (*self.decodes, *self.prefills):
            await until(lambda worker=worker: not worker.running)  # type: ignore[misc]  # the default binds the loop's value
        for decode in self.decodes:
            await until(lambda decode=decode: not decode.leases)  # type: ignore[misc]  # the default binds the loop's value


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is waited for announces nothing
            await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def harness(
    model: tuple[ModelSource, Tokenizer], num_decode: int = 1, num_prefill: int = 1, **settings: Any
) -> AsyncIterator[Harness]:
    """Run a gateway and fake workers inside the block; at its end nothing may be left of any request."""
    started = Harness(*model, settings)
    try:
        await started.start(num_decode, num_prefill)
        yield started
        await started.check_idle()
    finally:
        await started.stop()
