"""What the gateway tells about itself: the model card and the cluster as it sees it. Reads; changes nothing."""

import time
from dataclasses import dataclass

from engine.clock import Clock
from engine.worker_types import WorkerInfo, WorkerLoad, WorkerRole
from gateway.relay.generation import Generation
from gateway.relay.tokenizer import TokenizerService
from gateway.routing.admission import Admission
from gateway.workers.pool import WorkerPool
from gateway.workers.registry import WorkerRegistry
from kvrelay import __version__


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The model served."""

    name: str
    architecture: str
    """Empty while no worker is registered."""
    context_length: int
    """Most tokens of prompt and output together; 0 while no decode worker is registered."""
    vocab_size: int
    has_chat_template: bool


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One registered worker as the gateway sees it."""

    info: WorkerInfo
    load: WorkerLoad
    is_connected: bool
    is_draining: bool
    is_stalled: bool


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """The cluster behind this gateway."""

    version: str
    workers: tuple[WorkerStatus, ...]
    num_running_requests: int
    num_queued_requests: int
    uptime_ms: int
    instance_id: str


class ServerInfo:
    """Answers ListModels and GetServerInfo."""

    def __init__(
        self,
        *,
        model_name: str,
        tokenizer: TokenizerService,
        registry: WorkerRegistry,
        pool: WorkerPool,
        admission: Admission,
        generation: Generation,
        clock: Clock,
        instance_id: str,
    ) -> None:
        self._model_name = model_name
        self._tokenizer = tokenizer
        self._registry = registry
        self._pool = pool
        self._admission = admission
        self._generation = generation
        self._clock = clock
        self._instance_id = instance_id
        self._started_at = clock.now()
        self.started_at = int(time.time())
        """Seconds since 1970."""

    def is_ready(self) -> bool:
        """Whether a new request would be taken and could be served."""
        return bool(self._pool.usable(WorkerRole.DECODE)) and not self._generation.is_draining

    def model(self) -> ModelCard:
        """Return the model's card; what only workers know is empty until one is registered."""
        decode_workers = self._registry.workers(WorkerRole.DECODE)
        limits = self._generation.limits()
        return ModelCard(
            name=self._model_name,
            architecture=decode_workers[0].architecture if decode_workers else "",
            context_length=limits.max_sequence_tokens or 0,
            vocab_size=limits.vocab_size,
            has_chat_template=self._tokenizer.has_chat_template,
        )

    def cluster(self) -> ClusterStatus:
        """Return the cluster's state now."""
        return ClusterStatus(
            version=__version__,
            workers=tuple(self._status(info) for info in self._registry.workers()),
            num_running_requests=self._generation.num_running,
            num_queued_requests=self._admission.num_queued,
            uptime_ms=int((self._clock.now() - self._started_at) * 1000),
            instance_id=self._instance_id,
        )

    def _status(self, info: WorkerInfo) -> WorkerStatus:
        session = self._pool.session(info.worker_id)
        if session is None:
            return WorkerStatus(info, WorkerLoad(), is_connected=False, is_draining=False, is_stalled=False)
        return WorkerStatus(info, session.load, session.is_open, session.is_draining, session.is_stalled)
