"""What to do when a worker fails a request: nothing, another writer, another attempt, or give up.

Pure decisions over one request's history; `attempt.py` acts on them. Because sampling noise is keyed by (seed,
position, token), another attempt goes on with the very tokens that would have come.
"""

from enum import StrEnum

from engine.types import WorkerId
from kvrelay.errors import CapacityError, DeviceError, EngineError, LeaseExpired, StepFailed


class Remedy(StrEnum):
    """What to do after a failure."""

    NOTHING = "nothing"
    """What failed was not needed any more."""
    SUPERSEDE = "supersede"
    """Keep decode's reservation, fence the writer, and prefill again (elsewhere, or on the decode worker)."""
    RESTART = "restart"
    """Reserve again, with the prompt and what was generated so far."""
    GIVE_UP = "give_up"
    """Tell the client."""


MAX_FAILED_STEPS = 2
"""A request that took part in so many steps that broke an engine is taken for the cause, and tried no more."""


def can_retry(error: EngineError) -> bool:
    """Whether the request may succeed on another worker: a broken device is a reason to go elsewhere, not to stop."""
    return error.is_retryable or isinstance(error, DeviceError)


class Recovery:
    """One request's attempts and the workers that failed it.

    Invariant: 1 <= `attempt` <= `max_attempts`.
    """

    def __init__(self, max_attempts: int) -> None:
        self._max_attempts = max_attempts
        self.attempt = 1
        """Number of the current attempt."""
        self.failed_decode: set[WorkerId] = set()
        self.failed_prefill: set[WorkerId] = set()
        self._num_failed_steps = 0

    @property
    def has_attempts_left(self) -> bool:
        """Whether one more attempt is allowed."""
        return self.attempt < self._max_attempts

    @property
    def is_suspect(self) -> bool:
        """Whether the request was in a step that broke a worker."""
        return self._num_failed_steps > 0

    def after_prefill_failure(
        self, error: EngineError, worker_id: WorkerId, *, is_committed: bool, has_first_token: bool
    ) -> Remedy:
        """Decide after a prefill worker failed the request or was lost.

        Args:
            error: Why.
            worker_id: Who.
            is_committed: Decode has verified and taken over the KV.
            has_first_token: The token that this prefill sampled has arrived.
        """
        if is_committed and has_first_token:
            return Remedy.NOTHING
        self.failed_prefill.add(worker_id)
        if not self._may_retry(error):
            return Remedy.GIVE_UP
        # Decode goes on from a token that nobody else can tell us: only a new attempt brings it.
        return Remedy.RESTART if is_committed else Remedy.SUPERSEDE

    def after_decode_failure(
        self, error: EngineError, worker_id: WorkerId, *, has_alternative: bool, prefill_worker: WorkerId | None = None
    ) -> Remedy:
        """Decide after a decode worker failed the request or was lost.

        Args:
            error: Why.
            worker_id: Who.
            has_alternative: Another decode worker, which has not failed this request, could take it.
            prefill_worker: Who was filling the reservation; None = nobody.
        """
        if isinstance(error, LeaseExpired) and prefill_worker is not None:
            # Decode did its part: it is the writer that was not heard of.
            self.failed_prefill.add(prefill_worker)
        else:
            self.failed_decode.add(worker_id)
        if not self._may_retry(error):
            return Remedy.GIVE_UP
        # A full worker is asked again by the client, after the time it named, not by us at once.
        if isinstance(error, CapacityError) and not has_alternative:
            return Remedy.GIVE_UP
        return Remedy.RESTART

    def _may_retry(self, error: EngineError) -> bool:
        """Count a broken step against the request; a worker that was lost for another reason accuses nobody."""
        if isinstance(error, StepFailed):
            self._num_failed_steps += 1
        return can_retry(error) and self.has_attempts_left and self._num_failed_steps < MAX_FAILED_STEPS

    def next_attempt(self) -> int:
        """Begin the next attempt and return its number."""
        if not self.has_attempts_left:
            raise ValueError("no attempt is left")
        self.attempt += 1
        return self.attempt
