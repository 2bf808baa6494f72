"""One attempt at a completion: one reservation on a decode worker and the prefills that try to fill it.

Owns the commands of the attempt and what each event means in it; the tokens go to `output.py`, what follows a failure
is decided by `recovery.py`. Never waits: `relay.py` takes the events from the mailbox and looks at `failure` and
`is_restart_due` afterwards.
"""

from collections.abc import Callable
from dataclasses import replace

from engine.clock import Clock
from engine.types import EngineRequest, WorkerId
from gateway.relay.output import CompletionOutput
from gateway.relay.recovery import Recovery, Remedy
from gateway.relay.request import CompletionRequest
from gateway.relay.response import Timings
from gateway.routing.router import Router
from gateway.workers.mailbox import Mailbox
from gateway.workers.messages import Event, SessionLost, Stalled
from gateway.workers.session import WorkerSession
from kvrelay.errors import EngineError, WorkerUnavailable
from kvrelay.serving.telemetry import traceparent
from kvrelay.values import FinishReason
from kvrelay.wire.engine.commands import Prefill, PrefillLocally, Reserve, Supersede
from kvrelay.wire.engine.events import Committed, Exported, Failed, Output, Reserved


class Attempt:
    """The workers' side of one completion, until it ends or has to be started anew. Made for one reservation.

    Invariants: `_decode` and `_prefill` are exactly the sessions that may still hold something for the request;
    tokens are taken only from the attempt number that the reservation is granted to.
    """

    def __init__(
        self,
        request: CompletionRequest,
        output: CompletionOutput,
        timings: Timings,
        recovery: Recovery,
        *,
        router: Router,
        mailbox: Mailbox,
        on_prefill_over: Callable[[], None],
        local_prefill_max_tokens: int,
        clock: Clock,
    ) -> None:
        self._request = request
        self._output = output
        self._timings = timings
        self._recovery = recovery
        self._router = router
        self._mailbox = mailbox
        self._on_prefill_over = on_prefill_over
        self._local_prefill_max_tokens = local_prefill_max_tokens
        self._clock = clock
        self._id = request.engine_request.request_id
        self._engine_request = request.engine_request
        self._decode: WorkerSession | None = None
        self._prefill: WorkerSession | None = None
        self._granted: int | None = None
        self._kv_handle = b""
        self._num_cached_tokens = 0
        self._has_first_token = self._is_committed = self._is_exported = self._is_decode_done = False
        self._prefill_sent_at = 0.0
        self.first_index = len(output.token_ids)
        """Index of the first token that this attempt generates."""
        self.failure: EngineError | None = None
        """Why the request cannot go on at all."""
        self.is_restart_due = False
        """Whether another attempt should go on after the tokens given out so far."""
        self.decode_worker: WorkerId | None = None
        self.prefill_worker: WorkerId | None = None
        """Who sampled the first token; None until it came."""

    @property
    def is_reserved(self) -> bool:
        """Whether decode has granted blocks."""
        return self._granted is not None

    @property
    def is_over(self) -> bool:
        """Whether nothing more can come of it."""
        return self.failure is not None or self.is_restart_due

    def reserve(self, request: EngineRequest) -> None:
        """Place the request and ask for blocks.

        Args:
            request: The prompt, followed by the tokens of earlier attempts.

        Raises:
            WorkerUnavailable: no decode worker could take it.
            CapacityError: the chosen one does not read its commands.
        """
        self._engine_request = request
        session = self._router.place(request, avoid=self._recovery.failed_decode)
        session.attach(self._id, self._mailbox, len(request.token_ids))
        self._decode, self.decode_worker = session, session.info.worker_id
        session.send(Reserve(request, self._recovery.attempt, self._request.deadline, traceparent()))

    def handle(self, source: WorkerId | None, event: Event) -> None:
        """Take one event of a worker."""
        if isinstance(event, Output):
            # Tokens that are here count even when the worker that sent them was lost right after.
            self._take_output(source, event)
        elif not self.is_over and source is not None:
            if self._decode is not None and self._decode.info.worker_id == source:
                self._handle_decode(event)
            elif self._prefill is not None and self._prefill.info.worker_id == source:
                self._handle_prefill(event)

    def let_go(self) -> None:
        """Tell the workers to free what they hold for the request. Does nothing the second time."""
        if self._prefill is not None:
            # After the commit it only waits to hear of it, and ends by itself.
            is_done = self._has_first_token and (self._is_committed or self._is_exported)
            self._release_prefill(is_done=is_done)
        if self._decode is not None:
            self._release_decode(is_done=self._is_decode_done)

    # --- events -------------------------------------------------------------------------------------------------------

    def _take_output(self, source: WorkerId | None, event: Output) -> None:
        output = event.output
        if event.attempt != self._granted:
            return
        if output.finish_reason is FinishReason.ABORT:
            # Nobody here asked for it: the worker gave the request up.
            self.handle(source, Failed(event.attempt, WorkerUnavailable(f"worker {source} ended the request itself")))
            return
        self._output.note_cached(output.num_cached_tokens)
        try:
            self._output.add(output)
        except EngineError as error:
            self.failure = error
            return
        is_from_decode = self._decode is not None and self._decode.info.worker_id == source
        self._is_decode_done |= is_from_decode and output.finish_reason is not None
        if output.token_index <= self.first_index < output.token_index + len(output.token_ids):
            self._has_first_token = True
            self._on_prefill_over()
            self.prefill_worker = self.prefill_worker or source
            timing = output.prefill_timing
            if timing is not None and self.first_index == 0:
                waited_ns = int((self._prefill_sent_at - self._request.arrival) * 1e9)
                self._timings.queue_ns = waited_ns + timing.queue_ns
                self._timings.prefill_ns = timing.prefill_ns
            if self._is_exported and self._prefill is not None:
                self._release_prefill(is_done=True)

    def _handle_decode(self, event: Event) -> None:
        match event:
            case Reserved(attempt, kv_handle, num_cached_tokens):
                # The answer to a Supersede that a commit overtook is void.
                if attempt == self._recovery.attempt and attempt != self._granted and not self._is_committed:
                    self._granted, self._kv_handle = attempt, kv_handle
                    self._num_cached_tokens = num_cached_tokens
                    self._output.note_cached(num_cached_tokens)
                    self._start_prefill()
            case Committed(attempt, transfer):
                if attempt == self._granted:
                    self._is_committed = True
                    if self._decode is not None:
                        self._decode.keep_reservation(self._id, is_kept=False)
                    self._timings.transfer_ns, self._timings.transfer_bytes = transfer.total_ns, transfer.num_bytes
                    self._timings.transfer_exposed_ns = self._timings.transfer_exposed_ns or transfer.exposed_ns
                    self._timings.transport = transfer.transport
                    if self._prefill is None and not self._has_first_token:
                        # The prefill worker was lost, but its hand-off had won. Only its first token is missing, and
                        # nobody else can tell it.
                        self._restart(WorkerUnavailable("the first token was lost with its prefill worker"))
            case Failed(attempt, error):
                # An error that answers a Supersede is void once the commit is known; 0 stands for any attempt.
                is_late = self._is_committed and attempt != self._granted
                if attempt in (0, self._granted, self._recovery.attempt) and not is_late:
                    self._decode_failed(error, is_gone=False)
            case SessionLost(error):
                self._decode_failed(error, is_gone=True)
            case Stalled(error):
                # It may come back: worth leaving only for another one.
                if self._recovery.has_attempts_left and self._has_decode_besides():
                    self._decode_failed(error, is_gone=False)
            case _:
                pass

    def _handle_prefill(self, event: Event) -> None:
        match event:
            case Exported(attempt, transfer):
                if attempt == self._granted:
                    self._is_exported = True
                    # Prefill knows best when its compute ended.
                    self._timings.transfer_exposed_ns = transfer.exposed_ns or self._timings.transfer_exposed_ns
                    if self._has_first_token:
                        self._release_prefill(is_done=True)
            case Failed(attempt, error):
                if attempt == self._granted:
                    self._prefill_failed(error)
            case SessionLost(error) | Stalled(error):
                self._prefill_failed(error)
            case _:
                pass

    # --- commands -----------------------------------------------------------------------------------------------------

    def _start_prefill(self) -> None:
        """Have the prompt computed: by a prefill worker if that is worth it and there is one, else by decode itself."""
        if self._decode is None or self._granted is None:
            return
        request = replace(self._engine_request, is_suspect=self._recovery.is_suspect)
        deadline = self._request.deadline
        num_uncached_tokens = len(request.token_ids) - self._num_cached_tokens
        self._prefill_sent_at = self._clock.now()
        if num_uncached_tokens > self._local_prefill_max_tokens:
            session = self._router.place_prefill(request, avoid=self._recovery.failed_prefill)
            if session is not None:
                session.attach(self._id, self._mailbox, num_uncached_tokens)
                self._prefill = session
                self._decode.keep_reservation(self._id, is_kept=True)
                try:
                    session.send(Prefill(request, self._granted, self._kv_handle, deadline, traceparent()))
                except EngineError as error:
                    self._prefill_failed(error)
                return
        self._on_prefill_over()
        try:
            self._decode.send(PrefillLocally(self._id))
        except EngineError as error:
            self._decode_failed(error, is_gone=False)

    def _prefill_failed(self, error: EngineError) -> None:
        if self._prefill is None or self._decode is None:
            return
        worker_id = self._prefill.info.worker_id
        self._release_prefill(is_done=False)
        remedy = self._recovery.after_prefill_failure(
            error, worker_id, is_committed=self._is_committed, has_first_token=self._has_first_token
        )
        if remedy is Remedy.SUPERSEDE:
            try:
                self._decode.send(Supersede(self._id, self._recovery.next_attempt()))
            except EngineError as send_error:
                self._decode_failed(send_error, is_gone=False)
        elif remedy is Remedy.RESTART:
            self.is_restart_due = True
        elif remedy is Remedy.GIVE_UP:
            self.failure = error

    def _decode_failed(self, error: EngineError, *, is_gone: bool) -> None:
        if self._decode is None:
            return
        worker_id = self._decode.info.worker_id
        has_alternative = self._has_decode_besides()
        self._release_decode(is_done=is_gone)
        remedy = self._recovery.after_decode_failure(
            error,
            worker_id,
            has_alternative=has_alternative,
            prefill_worker=None if self._prefill is None else self._prefill.info.worker_id,
        )
        if remedy is Remedy.RESTART:
            self.is_restart_due = True
        else:
            self.failure = error

    def _has_decode_besides(self) -> bool:
        """Whether another decode worker, which has not failed the request, could take it now."""
        others = set() if self._decode is None else {self._decode.info.worker_id}
        return self._router.has_decode_besides(self._engine_request, self._recovery.failed_decode | others)

    def _restart(self, error: EngineError) -> None:
        if self._recovery.has_attempts_left:
            self.is_restart_due = True
        else:
            self.failure = error

    def _release_prefill(self, *, is_done: bool) -> None:
        session, self._prefill = self._prefill, None
        if session is not None:
            self._on_prefill_over()
            if not is_done:
                session.abort(self._id)
            session.detach(self._id)

    def _release_decode(self, *, is_done: bool) -> None:
        session, self._decode = self._decode, None
        if session is not None:
            if not is_done:
                session.abort(self._id)
            session.detach(self._id)
