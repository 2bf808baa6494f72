"""What fake prefill and decode workers share: the script of tokens, server, registration, sessions.

They speak the real session protocol over real grpc.aio servers and compute nothing: `Script.tokens` says which tokens a
request gives, so that a resumed request goes on as a real one would. The tiers themselves are in `fake_workers.py`.
"""

import abc
import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
import grpc.aio

from engine.cache.layout import KvLayout
from engine.config import KvDtype
from kvrelay.channel import channel_options, server_options
from kvrelay.errors import EngineError
from kvrelay.v1 import (
    handoff_pb2,
    registry_service_pb2,
    registry_service_pb2_grpc,
    sampling_pb2,
    session_pb2,
)
from kvrelay.wire.engine.layout import layout_to_proto
from kvrelay.wire.status import to_status

LAYOUT = KvLayout("fake-model", num_layers=2, num_kv_heads=1, head_dim=8, block_size=16, dtype=KvDtype.FP32)

Tokens = Callable[[session_pb2.EngineRequest], list[int]]
"""All tokens a request generates, by its prompt and seed; the last one ends it."""


def token_logprobs(token_id: int) -> sampling_pb2.PositionLogprobs:
    """Return made-up logprobs that tell which token they belong to."""
    entry = sampling_pb2.TokenLogprob(token_id=token_id, logprob=-float(token_id + 1), rank=1)
    return sampling_pb2.PositionLogprobs(sampled=entry)


@dataclass
class Script:
    """What the workers of a cluster do."""

    tokens: Tokens
    eos_token_id: int
    pace_s: float = 0.0
    """Time between two outputs of decode."""
    tokens_per_output: int = 1

    def output(self, request: session_pb2.EngineRequest, start: int, count: int) -> session_pb2.TokenOutput:
        """Return tokens [start, start + count) of a request, with its end if they reach it."""
        max_tokens = request.sampling_params.max_tokens
        all_tokens = self.tokens(request)[:max_tokens]
        token_ids = all_tokens[start : start + count]
        output = session_pb2.TokenOutput(
            request_id=request.request_id, attempt=request.attempt, token_index=start, token_ids=token_ids
        )
        if request.sampling_params.HasField("logprobs"):
            output.logprobs.extend(token_logprobs(token_id) for token_id in token_ids)
        if start + len(token_ids) >= len(all_tokens):
            output.finish_reason = sampling_pb2.FINISH_REASON_LENGTH
            if token_ids and token_ids[-1] == self.eos_token_id and not request.sampling_params.ignore_eos:
                output.finish_reason = sampling_pb2.FINISH_REASON_STOP
                output.matched_stop_token_id = token_ids[-1]
        return output


class Committer(Protocol):
    """A decode worker as a prefill worker sees it."""

    def commit(self, handle: handoff_pb2.KvHandle) -> bool:
        """Take over a request; False: the handle is void."""
        ...


@dataclass
class FakeCluster:
    """What the fake workers of one test share."""

    script: Script
    decode: dict[str, Committer] = field(default_factory=dict)


class FakeSession:
    """One open session: events to write, tasks that make them."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[Any] = asyncio.Queue()
        self.tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Any) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def end_tasks(self) -> None:
        """Cancel what makes events and wait for it."""
        tasks = list(self.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


HEARTBEAT_S = 0.25


class FakeWorker(abc.ABC):
    """Server, registration and session life of both tiers."""

    role: registry_service_pb2.WorkerRole

    def __init__(self, worker_id: str, cluster: FakeCluster, incarnation: int = 1) -> None:
        self.worker_id = worker_id
        self.cluster = cluster
        self.incarnation = incarnation
        self.layout = LAYOUT
        self.model_name = "fake"
        self.context_length = 8192
        self.num_blocks = 1024
        self.vocab_size = 49_152
        self.address = ""
        self.lease_ttl_s = 60.0
        self.is_silent = False
        """Sends nothing of its own accord any more."""
        self.is_stalled = False
        """Says that its engine hangs."""
        self.commands: list[Any] = []
        """Every command received, oldest first."""
        self.aborted: list[int] = []
        """Request ids of all aborts received."""
        self.sessions: set[FakeSession] = set()
        self.running: dict[int, asyncio.Task[None]] = {}
        """Request id -> what makes its events."""
        self._server: grpc.aio.Server | None = None

    @abc.abstractmethod
    def add_to(self, server: grpc.aio.Server) -> None:
        """Add the tier's service."""

    async def start(self) -> None:
        """Listen on a free port."""
        self._server = grpc.aio.server(options=server_options())
        self.add_to(self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        self.address = f"127.0.0.1:{port}"
        await self._server.start()

    async def stop(self) -> None:
        """Stop at once: sessions break as if the process had died."""
        if self._server is not None:
            await self._server.stop(None)
        for session in list(self.sessions):
            await session.end_tasks()
        while self.sessions:  # noqa: ASYNC110 - a fake announces nothing
            await asyncio.sleep(0.001)

    def break_sessions(self) -> None:
        """End every open session with UNAVAILABLE; the server goes on listening."""
        for session in self.sessions:
            session.events.put_nowait(None)

    def registration(self) -> registry_service_pb2.RegisterRequest:
        """Return what the worker registers with."""
        return registry_service_pb2.RegisterRequest(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            role=self.role,
            address=self.address,
            model_name=self.model_name,
            layout=layout_to_proto(self.layout),
            num_blocks=self.num_blocks,
            transfer_addresses=[f"grpc://{self.address}"],
            max_num_seqs=64,
            context_length=self.context_length,
            transports=["inproc"],
            architecture="llama",
            vocab_size=self.vocab_size,
        )

    async def register(self, gateway_address: str) -> None:
        """Register once; the gateway dials back."""
        async with grpc.aio.insecure_channel(gateway_address, options=channel_options()) as channel:
            await registry_service_pb2_grpc.RegistryServiceStub(channel).Register(self.registration())

    async def serve(self, requests: AsyncIterator[Any], context: Any, response: Any) -> None:
        """Run one session: greet, take commands, write events until the gateway or the script ends it."""
        session = FakeSession()
        self.sessions.add(session)
        session.events.put_nowait(
            response(
                ready=session_pb2.SessionReady(
                    worker_id=self.worker_id,
                    incarnation=self.incarnation,
                    lease_ttl_ms=round(1000 * self.lease_ttl_s),
                )
            )
        )
        try:
            session.spawn(self._take_commands(requests, session))
            session.spawn(self._report(session, response))
            while (event := await session.events.get()) is not None:
                await context.write(event)
            await session.end_tasks()  # reading from an aborted call is an error
            await context.abort(grpc.StatusCode.UNAVAILABLE, "scripted death")
        finally:
            self.sessions.discard(session)
            await session.end_tasks()

    async def _report(self, session: FakeSession, response: Any) -> None:
        """Give a sign of life as often as workers do, unless the script has it freeze."""
        while True:
            if not self.is_silent:
                load = session_pb2.WorkerLoad(
                    num_free_blocks=self.num_blocks, num_blocks=self.num_blocks, is_stalled=self.is_stalled
                )
                session.events.put_nowait(response(load=load))
            await asyncio.sleep(HEARTBEAT_S)

    async def _take_commands(self, requests: AsyncIterator[Any], session: FakeSession) -> None:
        async for message in requests:
            kind = message.WhichOneof("command")
            command = getattr(message, kind)
            self.commands.append(command)
            if kind == "abort":
                self.aborted.extend(command.request_ids)
                for request_id in command.request_ids:
                    self.forget(request_id)
            else:
                self.take(kind, command, session)

    @abc.abstractmethod
    def take(self, kind: str, command: Any, session: FakeSession) -> None:
        """Act on a command other than abort."""

    def forget(self, request_id: int) -> None:
        """Free what is held for a request."""
        task = self.running.pop(request_id, None)
        if task is not None:
            task.cancel()

    def start_work(self, request_id: int, work: Any, session: FakeSession) -> None:
        """Run what makes a request's events, in place of what did before."""
        previous = self.running.pop(request_id, None)
        if previous is not None:
            previous.cancel()
        task = session.spawn(work)
        self.running[request_id] = task
        task.add_done_callback(lambda done: self._work_done(request_id, done))

    def _work_done(self, request_id: int, task: "asyncio.Task[None]") -> None:
        if self.running.get(request_id) is task:
            del self.running[request_id]

    def seen(self, kind: type) -> list[Any]:
        """Return the commands of one message type."""
        return [command for command in self.commands if isinstance(command, kind)]


def request_error(request_id: int, attempt: int, error: EngineError) -> session_pb2.RequestError:
    """Return the event that ends one request."""
    return session_pb2.RequestError(request_id=request_id, attempt=attempt, status=to_status(error).SerializeToString())


def open_gate() -> asyncio.Event:
    gate = asyncio.Event()
    gate.set()
    return gate
