"""What disaggregation costs a request: time to the first and the second token, beside one process that does it all."""

import statistics
from dataclasses import dataclass, field

from benchmarks.common.report import JsonValue
from benchmarks.common.stats import median_or_none
from benchmarks.common.stream import RequestTrace

ONE_PROCESS = "one process"
SECOND_TOKEN_STEPS = 1.5
"""Decode steps that the second token may take after the first, beside what of the transfer compute does not hide."""


@dataclass(slots=True)
class ServingSamples:
    """Requests of one prompt length against one cluster."""

    cluster: str
    prompt_tokens: int
    traces: list[RequestTrace] = field(default_factory=list)

    @property
    def ttft_ms(self) -> float:
        """Median time to the first token."""
        return statistics.median(trace.ttft_ms for trace in self.traces)

    @property
    def second_token_ms(self) -> float | None:
        """Median time from the first token to the second."""
        return median_or_none([trace.gaps_ms[0] for trace in self.traces if trace.gaps_ms])

    @property
    def decode_step_ms(self) -> float | None:
        """Median time between later tokens."""
        return median_or_none([gap for trace in self.traces for gap in trace.gaps_ms[1:]])

    @property
    def handed_over(self) -> list[RequestTrace]:
        """Requests whose KV travelled; short prompts may have been prefilled where they are decoded."""
        return [trace for trace in self.traces if trace.timings.transport]

    @property
    def transfer_ms(self) -> list[float]:
        """First frame to commit, of each request whose KV travelled."""
        return [trace.timings.transfer_ns / 1e6 for trace in self.handed_over]

    @property
    def exposed_ms(self) -> list[float]:
        """End of compute to commit, likewise."""
        return [trace.timings.transfer_exposed_ns / 1e6 for trace in self.handed_over]

    @property
    def second_token_over_limit(self) -> float | None:
        """Median of the time to the second token over its limit, of the requests whose KV travelled."""
        step_ms = self.decode_step_ms
        if step_ms is None:
            return None
        shares = [
            trace.gaps_ms[0] / (SECOND_TOKEN_STEPS * step_ms + trace.timings.transfer_exposed_ns / 1e6)
            for trace in self.handed_over
            if trace.gaps_ms
        ]
        return median_or_none(shares)


def serving_row(samples: ServingSamples, alone: ServingSamples) -> dict[str, JsonValue]:
    """Return a row.

    Args:
        samples: Of the cluster in question.
        alone: Of the single process, same prompts.
    """
    second, alone_second = samples.second_token_ms, alone.second_token_ms
    exposed_ms, step_ms = median_or_none(samples.exposed_ms), samples.decode_step_ms
    return {
        "what": "request",
        "path": samples.cluster,
        "num_tokens": samples.prompt_tokens,
        "num_samples": len(samples.traces),
        "ttft_ms": samples.ttft_ms,
        "ttft_growth_ms": samples.ttft_ms - alone.ttft_ms,
        "second_token_ms": second,
        "second_token_growth_ms": _difference(second, alone_second),
        "decode_step_ms": step_ms,
        "transfer_ms": median_or_none(samples.transfer_ms),
        "exposed_ms": exposed_ms,
        "second_token_limit_ms": None if step_ms is None else SECOND_TOKEN_STEPS * step_ms + (exposed_ms or 0.0),
        "second_token_over_limit": samples.second_token_over_limit,
    }


def _difference(later: float | None, earlier: float | None) -> float | None:
    return None if later is None or earlier is None else later - earlier
