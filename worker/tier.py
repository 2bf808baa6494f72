"""TierService: what a tier adds to a worker, and the context it gets. Implemented by both tiers' servicers."""

import asyncio
from collections.abc import Collection, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

import grpc.aio

from engine.cache.layout import KvLayout
from engine.loop import EngineLoop
from engine.model.kv_cache import KvCache
from engine.types import Incarnation, RequestId, SequenceOutput, WorkerId
from kvrelay.errors import EngineError
from kvrelay.v1 import session_pb2
from worker.step_watch import StepWatch


class TaskSpawner(Protocol):
    """Runs background tasks that end with the server."""

    def __call__(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Start a task; if it fails, the worker drains and exits."""
        ...


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """What a tier's service works with."""

    worker_id: WorkerId
    incarnation: Incarnation
    engine_loop: EngineLoop
    kv_cache: KvCache
    layout: KvLayout
    address: str
    """The worker's gRPC address as others reach it, host:port."""
    spawn: TaskSpawner
    watch: StepWatch
    """Knows whether the engine hangs."""


class TierService(Protocol):
    """One tier's gRPC service on top of a running engine. Belongs to one event loop."""

    @property
    def transports(self) -> tuple[str, ...]:
        """Schemes of the transports it can use, best first."""
        ...

    @property
    def transfer_addresses(self) -> tuple[str, ...]:
        """Where KV can be sent to; empty on the prefill tier."""
        ...

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register its servicers. Called once, before the server starts."""
        ...

    async def open(self) -> None:
        """Start listening for KV and start background work. Called once, before the first session."""
        ...

    def deliver(self, outputs: list[SequenceOutput]) -> None:
        """Take a step's outputs. Called on the engine's thread; must return at once."""
        ...

    async def read_load(self) -> session_pb2.WorkerLoad:
        """Return the load now."""
        ...

    def break_off(self, request_ids: Collection[RequestId], error: EngineError) -> None:
        """Tell these requests that the engine is broken, and every gateway that its session is over.

        So they resume elsewhere what ran here, before this process has ended. New sessions are refused.

        Args:
            request_ids: Those that took part in the step that broke it.
            error: What to tell them; the others learn of it by their session's end, and are not accused.
        """
        ...

    def end_sessions(self) -> None:
        """End the streams of gateways that have not ended them."""
        ...

    def start_drain(self) -> None:
        """Refuse new requests from now on."""
        ...

    async def wait_idle(self) -> None:
        """Return once no request is here any more."""
        ...

    async def close(self) -> None:
        """End sessions and transfers; afterwards nothing touches the engine."""
        ...
