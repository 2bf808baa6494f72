"""One Generate call from its checked fields to its last message: resolve, admit, run its completions.

Owns the table of running requests, for Abort and for the drain. Speaks to the client through a `Sink`, so that gRPC
and HTTP fronts can share it. The life of each completion is in `relay.py`.
"""

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from engine.clock import Clock
from engine.types import RequestId
from engine.worker_types import WorkerRole
from gateway.relay.ids import mint_request_ids
from gateway.relay.output import CompletionOutput
from gateway.relay.prompt import resolve
from gateway.relay.relay import Relay, RelayLimits
from gateway.relay.request import CompletionRequest, GenerateCall, ModelLimits
from gateway.relay.response import Completion, Started, TokenChunk
from gateway.relay.tokenizer import TokenizerService
from gateway.routing.admission import Admission
from gateway.routing.prefill_gate import PrefillGate
from gateway.routing.router import Router
from gateway.workers.pool import WorkerPool
from gateway.workers.registry import WorkerRegistry
from kvrelay.errors import EngineError, ModelNotFound, WorkerUnavailable
from kvrelay.serving.telemetry import span

_log = structlog.get_logger(__name__)


class Sink(Protocol):
    """The client's side of one call. Each method returns when the message was taken, and may raise what ends the call.

    Completions call it concurrently; the implementation orders the writes.
    """

    async def started(self, started: Started) -> None:
        """The request was admitted. Called once, first."""
        ...

    async def chunk(self, index: int, chunk: TokenChunk) -> None:
        """Completion `index` has new tokens."""
        ...

    async def complete(self, index: int, completion: Completion) -> None:
        """Completion `index` has ended. Called once for each."""
        ...


@dataclass(frozen=True, slots=True)
class GenerationParts:
    """What `Generation` works with."""

    tokenizer: TokenizerService
    registry: WorkerRegistry
    pool: WorkerPool
    router: Router
    admission: Admission
    prefill_gate: PrefillGate
    clock: Clock


class Generation:
    """Runs Generate calls. One event loop.

    Invariant: `_running` holds exactly the requests whose `run` is between `started` and its end.
    """

    def __init__(
        self, parts: GenerationParts, *, model_names: Sequence[str], max_prompt_bytes: int, relay_limits: RelayLimits
    ) -> None:
        self._tokenizer = parts.tokenizer
        self._registry = parts.registry
        self._pool = parts.pool
        self._router = parts.router
        self._admission = parts.admission
        self._prefill_gate = parts.prefill_gate
        self._clock = parts.clock
        self._max_prompt_bytes = max_prompt_bytes
        self._relay_limits = relay_limits
        self._model_names = tuple(model_names)
        self._running: dict[RequestId, list[Relay]] = {}
        self._num_calls = 0
        self._is_draining = False
        self._interruption: EngineError | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_running(self) -> int:
        """Requests between `started` and their end."""
        return len(self._running)

    @property
    def is_draining(self) -> bool:
        """Whether new calls are refused."""
        return self._is_draining

    def check_model(self, name: str) -> None:
        """Refuse a model that is not served here; empty means the only one.

        Raises:
            ModelNotFound: it is not.
        """
        if name and name not in self._model_names:
            raise ModelNotFound(f"model {name!r} is not served here; served: {self._model_names[0]}")

    def limits(self) -> ModelLimits:
        """Return what requests may ask for, by the workers known now."""
        workers = self._registry.workers(WorkerRole.DECODE)
        return ModelLimits(
            vocab_size=min((info.vocab_size for info in workers), default=self._tokenizer.vocab_size),
            max_token_bytes=self._tokenizer.max_token_bytes,
            max_prompt_bytes=self._max_prompt_bytes,
            max_sequence_tokens=max((info.max_sequence_tokens for info in workers), default=None),
            context_length=max((info.context_length for info in workers), default=None),
        )

    async def run(self, call: GenerateCall, limits: ModelLimits, sink: Sink, *, deadline: float | None) -> None:
        """Run a call to its end.

        Args:
            call: As `convert.to_call` checked it against `limits`.
            limits: As `limits` gave them.
            sink: The client.
            deadline: Clock seconds at which the client stops waiting; None: never.

        Raises:
            EngineError: the typed reason why it could not be finished.
        """
        arrival = self._clock.now()
        if self._is_draining:
            raise WorkerUnavailable("the gateway is draining; retry elsewhere")
        self._num_calls += 1
        self._idle.clear()
        request_id = mint_request_ids(call.n)
        try:
            with (
                structlog.contextvars.bound_contextvars(request_id=request_id),
                span("gateway.generate", request_id=str(request_id), n=call.n) as root,
            ):
                if call.client_request_id:
                    root.set_attribute("client_request_id", call.client_request_id)
                await self._run(call, limits, sink, request_id, arrival, deadline)
        except EngineError as error:
            _log.info(
                "request.failed",
                request_id=request_id,
                client_request_id=call.client_request_id,
                reason=error.reason,
                error=str(error),
                total_ms=_ms(self._clock.now() - arrival),
            )
            raise
        except asyncio.CancelledError:
            _log.info(
                "request.cancelled",
                request_id=request_id,
                client_request_id=call.client_request_id,
                total_ms=_ms(self._clock.now() - arrival),
            )
            raise
        finally:
            self._num_calls -= 1
            if self._num_calls == 0:
                self._idle.set()

    def abort(self, request_ids: Iterable[RequestId]) -> list[RequestId]:
        """End requests with FinishReason.ABORT; returns those that were running."""
        aborted = [request_id for request_id in dict.fromkeys(request_ids) if request_id in self._running]
        for request_id in aborted:
            for relay in self._running[request_id]:
                relay.abort()
        return aborted

    async def drain(self, timeout_s: float) -> None:
        """Refuse new calls, wait for the running ones, and fail those that last longer than `timeout_s`."""
        self._is_draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            _log.warning("gateway.drain_interrupted", num_running=self._num_calls)
            self.interrupt(WorkerUnavailable("the gateway was stopped before the request was finished"))
            await self._idle.wait()

    def interrupt(self, error: EngineError) -> None:
        """End all running requests with an error, and those still waiting for admission once they get it."""
        self._interruption = error
        for relays in self._running.values():
            for relay in relays:
                relay.interrupt(error)

    async def _run(
        self,
        call: GenerateCall,
        limits: ModelLimits,
        sink: Sink,
        request_id: RequestId,
        arrival: float,
        deadline: float | None,
    ) -> None:
        self.check_model(call.model)
        self._admission.check_room(call.priority)
        if limits.max_sequence_tokens is None or not self._pool.usable(WorkerRole.DECODE):
            raise WorkerUnavailable("no decode worker is connected")
        requests = await resolve(
            call,
            first_request_id=request_id,
            tokenizer=self._tokenizer,
            max_sequence_tokens=limits.max_sequence_tokens,
            limits=limits,
            arrival=arrival,
            deadline=deadline,
        )
        async with self._admission.admit(weight=call.n, priority=call.priority, deadline=deadline):
            if self._interruption is not None:
                raise self._interruption
            first = requests[0].engine_request
            _log.info(
                "request.admitted",
                client_request_id=call.client_request_id,
                num_prompt_tokens=first.num_prompt_tokens,
                max_tokens=first.sampling_params.max_tokens,
                num_completions=call.n,
                waited_ms=_ms(self._clock.now() - arrival),
            )
            relays = [self._relay(request) for request in requests]
            self._running[request_id] = relays
            try:
                seed = first.sampling_params.seed
                await sink.started(Started(request_id, seed, self._model_names[0], first.num_prompt_tokens))
                await _run_all([self._complete(relay, index, sink) for index, relay in enumerate(relays)])
            finally:
                del self._running[request_id]

    def _relay(self, request: CompletionRequest) -> Relay:
        params = request.engine_request.sampling_params
        output = CompletionOutput(
            params,
            prompt_tokens=request.engine_request.num_prompt_tokens,
            text=self._tokenizer.text_stream(params),
            special_token_ids=self._tokenizer.special_token_ids,
        )
        return Relay(
            request,
            output,
            pool=self._pool,
            router=self._router,
            gate=self._prefill_gate,
            limits=self._relay_limits,
            clock=self._clock,
        )

    async def _complete(self, relay: Relay, index: int, sink: Sink) -> None:
        async def emit(chunk: TokenChunk) -> None:
            await sink.chunk(index, chunk)

        completion = await relay.run(emit)
        await sink.complete(index, completion)
        usage, timings = completion.usage, completion.timings
        _log.info(
            "request.finished",
            index=index,
            finish_reason=completion.ending.finish_reason.value,
            num_prompt_tokens=usage.prompt_tokens,
            num_output_tokens=usage.completion_tokens,
            num_cached_tokens=usage.cached_tokens,
            num_attempts=completion.num_attempts,
            prefill_worker=completion.prefill_worker,
            decode_worker=completion.decode_worker,
            transport=timings.transport,
            transfer_bytes=timings.transfer_bytes,
            queue_ms=_ms(timings.queue_ns / 1e9),
            prefill_ms=_ms(timings.prefill_ns / 1e9),
            transfer_ms=_ms(timings.transfer_ns / 1e9),
            first_token_ms=_ms(timings.first_token_ns / 1e9),
            decode_ms=_ms(timings.decode_ns / 1e9),
            total_ms=_ms(timings.total_ns / 1e9),
        )


async def _run_all(works: Sequence[Coroutine[None, None, None]]) -> None:
    """Run all to their end; the first error cancels the others, is waited out, and is raised."""
    if len(works) == 1:
        await works[0]
        return
    tasks = [asyncio.get_running_loop().create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task in done:
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
