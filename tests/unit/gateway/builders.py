"""Values that several tests of the gateway need."""

from dataclasses import replace
from typing import Any

from engine.cache.layout import KvLayout
from engine.config import KvDtype
from engine.types import EngineRequest, Incarnation, RequestId, SamplingParams, WorkerId
from engine.worker_types import WorkerInfo, WorkerRole
from gateway.workers.pool import WorkerPool
from gateway.workers.registry import WorkerRegistry
from gateway.workers.session import SessionLimits, WorkerSession

LAYOUT = KvLayout("weights", num_layers=2, num_kv_heads=1, head_dim=8, block_size=16, dtype=KvDtype.FP32)


class ManualClock:
    """A clock that stands still until told otherwise."""

    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time


def make_info(worker_id: str, role: WorkerRole = WorkerRole.DECODE, **changes: Any) -> WorkerInfo:
    info = WorkerInfo(
        worker_id=WorkerId(worker_id),
        incarnation=Incarnation(1),
        role=role,
        address="127.0.0.1:1234",
        model_name="model",
        architecture="llama",
        vocab_size=100,
        context_length=512,
        layout=LAYOUT,
        num_blocks=64,
        max_num_seqs=8,
    )
    return replace(info, **changes)


def make_request(num_tokens: int = 40, request_id: int = 1, **params: Any) -> EngineRequest:
    return EngineRequest(RequestId(request_id), tuple(range(num_tokens)), SamplingParams(**params), num_tokens)


def make_registry(clock: ManualClock) -> WorkerRegistry:
    return WorkerRegistry(model_name="model", tokenizer_vocab_size=90, keep_alive_interval_s=1.0, clock=clock)


class OfflinePool(WorkerPool):
    """A pool whose sessions are opened by hand instead of over the network."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        super().__init__(make_registry(self.clock), clock=self.clock, limits=SessionLimits(max_queued_commands=8))

    def add(self, worker_id: str, role: WorkerRole = WorkerRole.DECODE, **changes: Any) -> WorkerSession:
        info = make_info(worker_id, role, **changes)
        session = WorkerSession(info, clock=self.clock, peers=list, on_change=lambda: None, limits=self._limits)
        session.is_open = True
        self._sessions[info.worker_id] = session
        return session


def sent(session: WorkerSession) -> list[Any]:
    """Return what a session would have written, oldest first, without the list of peers."""
    messages = []
    while (message := session._next_message()) is not None:
        kind = message.WhichOneof("command")
        if kind is not None and kind != "update_peers":
            messages.append(getattr(message, kind))
    return messages
