"""What a kvrelay server answers, as plain values, and their conversion from protos.

Owns the shape that users of the Python client see. Never calls anything; `kvrelay/client.py` does.
"""

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeAlias

from kvrelay.errors import EngineError
from kvrelay.v1 import inference_service_pb2 as pb
from kvrelay.values import FinishReason, PositionLogprobs
from kvrelay.wire.logprobs import finish_reason_from_proto, logprobs_from_proto

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True, slots=True)
class Started:
    """The request was admitted; the first event."""

    request_id: int
    """What `abort` takes."""
    seed: int
    """Sending it again gives the same tokens."""
    model: str
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens of one completion."""

    index: int
    """Number of the completion, 0 to n - 1."""
    token_index: int
    """Index of the first of `token_ids` among the completion's tokens."""
    token_ids: tuple[int, ...]
    text: str
    """New text; may lag behind the tokens while a character or a possible stop string is incomplete."""
    logprobs: tuple[PositionLogprobs, ...] = ()
    """One entry per token when they were asked for."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one completion."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose KV came from a prefix cache."""
    draft_tokens: int = 0
    """Drafted tokens that were verified."""
    accepted_tokens: int = 0
    """Drafted tokens that were accepted."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Where a request's time went, in nanoseconds."""

    queue_ns: int = 0
    """From arrival at the gateway to the start of prefill compute."""
    prefill_ns: int = 0
    """From the start of the first prefill chunk to the first token."""
    transfer_ns: int = 0
    """From the first KV frame to the verified commit; overlaps prefill."""
    transfer_exposed_ns: int = 0
    """From the end of prefill compute to the verified commit."""
    transfer_bytes: int = 0
    first_token_ns: int = 0
    """From arrival at the gateway to the first token's message."""
    decode_ns: int = 0
    """From the first token to the last."""
    total_ns: int = 0
    transport: str = ""
    """How the KV travelled; empty when it did not."""


@dataclass(frozen=True, slots=True)
class Complete:
    """The last event of one completion."""

    index: int
    finish_reason: FinishReason
    matched_stop: int | str | None
    """The stop token or stop string that ended it."""
    usage: Usage
    timings: Timings
    prefill_worker: str
    decode_worker: str
    num_attempts: int
    """Tries that it took; more than 1 when workers failed and it was resumed."""


Event: TypeAlias = Started | Chunk | Complete


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished completion, collected."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...]
    started: Started
    complete: Complete


@dataclass(slots=True)
class CompletionCollector:
    """Gathers the events of one completion."""

    index: int = 0
    started: Started | None = None
    complete: Complete | None = None
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)

    def add(self, event: Event) -> None:
        """Take the next event; those of other completions are passed over."""
        if isinstance(event, Started):
            self.started = event
        elif event.index != self.index:
            return
        elif isinstance(event, Chunk):
            self.texts.append(event.text)
            self.token_ids += event.token_ids
            self.logprobs += event.logprobs
        else:
            self.complete = event

    def result(self) -> Completion:
        """Return the completion.

        Raises:
            EngineError: The stream ended before the completion did.
        """
        if self.started is None or self.complete is None:
            raise EngineError("the stream ended before the completion did")
        return Completion("".join(self.texts), tuple(self.token_ids), tuple(self.logprobs), self.started, self.complete)


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """One model that is served."""

    name: str
    architecture: str
    context_length: int
    """Most tokens of a request, prompt and output together."""
    vocab_size: int
    has_chat_template: bool


@dataclass(frozen=True, slots=True)
class WorkerSummary:
    """One worker as the gateway sees it."""

    worker_id: str
    role: str
    """`prefill` or `decode`."""
    address: str
    is_connected: bool
    is_draining: bool
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int
    num_leases: int
    transports: tuple[str, ...]
    kernels: str
    """What it computes with, and behind a comma why that is slow."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The cluster behind a gateway."""

    version: str
    workers: tuple[WorkerSummary, ...]
    num_running_requests: int
    num_queued_requests: int
    uptime_ms: int
    instance_id: str
    """Tells the gateway's process from others."""

    def connected(self, role: str) -> tuple[WorkerSummary, ...]:
        """Return the workers of a tier that a session is open to."""
        return tuple(worker for worker in self.workers if worker.role == role and worker.is_connected)


def event_from_proto(message: pb.GenerateResponse) -> Event:
    """Return the event of one message of the stream.

    Raises:
        EngineError: The message is empty or says not how its completion ended.
    """
    kind = message.WhichOneof("event")
    if kind == "started":
        started = message.started
        return Started(started.request_id, started.seed, started.model, started.prompt_tokens)
    if kind == "chunk":
        chunk = message.chunk
        logprobs = tuple(logprobs_from_proto(entry) for entry in chunk.logprobs)
        return Chunk(chunk.index, chunk.token_index, tuple(chunk.token_ids), chunk.text, logprobs)
    if kind == "complete":
        return _complete_from_proto(message.complete)
    raise EngineError("the server sent an event of a kind that this client does not know")


def _complete_from_proto(message: pb.GenerateComplete) -> Complete:
    finish_reason = finish_reason_from_proto(message.finish_reason)
    if finish_reason is None:
        raise EngineError("the server did not say why the completion ended")
    matched_stop: int | str | None = None
    which = message.WhichOneof("matched_stop")
    if which is not None:
        matched_stop = message.matched_stop_str if which == "matched_stop_str" else message.matched_stop_token_id
    usage, timings = message.usage, message.timings
    return Complete(
        index=message.index,
        finish_reason=finish_reason,
        matched_stop=matched_stop,
        usage=Usage(**_fields(Usage, usage)),
        timings=Timings(**_fields(Timings, timings)),
        prefill_worker=message.prefill_worker,
        decode_worker=message.decode_worker,
        num_attempts=message.num_attempts,
    )


def models_from_proto(message: pb.ListModelsResponse) -> tuple[ModelSummary, ...]:
    """Return the models served."""
    return tuple(ModelSummary(**_fields(ModelSummary, model)) for model in message.models)


def server_info_from_proto(message: pb.GetServerInfoResponse) -> ServerInfo:
    """Return the description of the cluster."""
    workers = tuple(
        WorkerSummary(**{**_fields(WorkerSummary, worker), "transports": tuple(worker.transports)})
        for worker in message.workers
    )
    return ServerInfo(**{**_fields(ServerInfo, message), "workers": workers})


def _fields(kind: type["DataclassInstance"], message: object) -> dict[str, Any]:
    """Return the message's values for the fields of a value class; both use the same names."""
    return {each.name: getattr(message, each.name) for each in fields(kind)}
