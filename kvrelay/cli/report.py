"""Where one request's time went, as the client saw it and as the server told it.

Owns the figures of `kvrelay demo`, `kvrelay generate --json` and their table. Times are milliseconds.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from rich.table import Table

from kvrelay.errors import EngineError
from kvrelay.results import Chunk, Complete, Event, Started
from kvrelay.values import PositionLogprobs


@dataclass(frozen=True, slots=True)
class RequestReport:
    """The figures of one finished request."""

    prompt: str
    text: str
    finish_reason: str
    seed: int
    queue_ms: float
    """From arrival at the gateway to the start of prefill compute."""
    prefill_ms: float
    """From there to the first token."""
    transfer_ms: float
    """From the first KV frame to the verified commit; overlaps prefill."""
    transfer_bytes: int
    transport: str
    """How the KV travelled; empty when it did not."""
    ttft_ms: float
    """From the client's call to the first token's message."""
    inter_token_p50_ms: float | None
    """Median time between tokens; None with fewer than two."""
    total_ms: float
    """From the client's call to the last message."""
    usage: dict[str, int]
    logprobs: tuple[PositionLogprobs, ...] = ()
    """One entry per token when they were asked for."""

    def as_json(self) -> dict[str, object]:
        """Return the figures as a JSON object."""
        shown = asdict(self)
        if not self.logprobs:
            del shown["logprobs"]
        return shown


class RequestRecorder:
    """Takes the events of one completion as they arrive; those of others are passed over.

    Args:
        prompt: What was asked, for the report.
        now: Seconds; a clock that never goes backwards.
        index: The completion's number within its request.
        start: When the request was made, by that clock; None: now.
    """

    def __init__(
        self,
        prompt: str,
        now: Callable[[], float] = time.perf_counter,
        index: int = 0,
        start: float | None = None,
    ) -> None:
        self._prompt = prompt
        self._index = index
        self._now = now
        self._start = now() if start is None else start
        self._arrivals: list[tuple[float, int]] = []
        self._texts: list[str] = []
        self._logprobs: list[PositionLogprobs] = []
        self._seed = 0
        self._complete: Complete | None = None
        self._end = 0.0

    def add(self, event: Event) -> None:
        """Take one event, now."""
        if isinstance(event, Started):
            self._seed = (event.seed + self._index) % (1 << 64)
        elif event.index != self._index:
            return
        elif isinstance(event, Chunk):
            self._arrivals.append((self._now(), len(event.token_ids)))
            self._texts.append(event.text)
            self._logprobs += event.logprobs
        else:
            self._complete, self._end = event, self._now()

    def report(self) -> RequestReport:
        """Return the figures.

        Raises:
            EngineError: The request did not end.
        """
        complete = self._complete
        if complete is None:
            raise EngineError("the stream ended before the completion did")
        timings = complete.timings
        first = self._arrivals[0][0] if self._arrivals else self._end
        return RequestReport(
            prompt=self._prompt,
            text="".join(self._texts),
            finish_reason=complete.finish_reason.value,
            seed=self._seed,
            queue_ms=_ms(timings.queue_ns),
            prefill_ms=_ms(timings.prefill_ns),
            transfer_ms=_ms(timings.transfer_ns),
            transfer_bytes=timings.transfer_bytes,
            transport=timings.transport,
            ttft_ms=round((first - self._start) * 1e3, 3),
            inter_token_p50_ms=self._inter_token_p50_ms(),
            total_ms=round((self._end - self._start) * 1e3, 3),
            usage=asdict(complete.usage),
            logprobs=tuple(self._logprobs),
        )

    def _inter_token_p50_ms(self) -> float | None:
        gaps: list[float] = []
        for (earlier, _), (later, num_tokens) in zip(self._arrivals, self._arrivals[1:], strict=False):
            # Tokens of one step arrive together; each gets its share of the wait.
            gaps += [(later - earlier) / num_tokens] * num_tokens if num_tokens else []
        return round(statistics.median(gaps) * 1e3, 3) if gaps else None


def phase_table(reports: Sequence[RequestReport], title: str) -> Table:
    """Return the table of phases, one row per request."""
    table = Table(title=title, title_justify="left")
    table.add_column("request", max_width=28, no_wrap=True, overflow="ellipsis")
    for name in ("tokens", "queue", "prefill", "transfer", "TTFT", "inter-token p50", "total"):
        table.add_column(name, justify="right")
    for report in reports:
        table.add_row(
            report.prompt,
            f"{report.usage['prompt_tokens']} + {report.usage['completion_tokens']}",
            _shown_ms(report.queue_ms),
            _shown_ms(report.prefill_ms),
            _shown_transfer(report),
            _shown_ms(report.ttft_ms),
            "-" if report.inter_token_p50_ms is None else _shown_ms(report.inter_token_p50_ms),
            _shown_ms(report.total_ms),
        )
    return table


def logprob_table(report: RequestReport) -> Table:
    """Return the table of tokens and their log-probabilities, one row per token."""
    table = Table(title="log-probabilities", title_justify="left")
    for name in ("token", "logprob", "rank"):
        table.add_column(name, justify="right")
    table.add_column("best tokens")
    for each in report.logprobs:
        best = ", ".join(f"{token.token_id} {token.logprob:.3f}" for token in each.top)
        table.add_row(str(each.sampled.token_id), f"{each.sampled.logprob:.3f}", str(each.sampled.rank), best)
    return table


def _shown_transfer(report: RequestReport) -> str:
    if not report.transport:
        return "none"
    return f"{shown_bytes(report.transfer_bytes)}, {_shown_ms(report.transfer_ms)} ({report.transport})"


def _shown_ms(value: float) -> str:
    return f"{value:,.1f} ms"


def shown_bytes(count: int) -> str:
    """Return a number of bytes with a binary unit."""
    if count < 1024:
        return f"{count} B"
    size = count / 1024
    for unit in ("KiB", "MiB"):
        if size < 1024:
            return f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _ms(nanoseconds: int) -> float:
    return round(nanoseconds / 1e6, 3)
