"""What is asked for and when: the requests of closed loops, Poisson arrivals and recorded traces. Sends nothing."""

import csv
import datetime
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.data import DATA_DIR
from benchmarks.common.prompts import PromptSource
from kvrelay.errors import InvalidRequest

TRACES = {
    "azure-conv": "azure_llm_2023_conv.csv",
    "azure-code": "azure_llm_2023_code.csv",
    "mooncake": "mooncake_conversation.jsonl",
}
"""Recorded traces that come with the benchmarks."""
MOONCAKE_BLOCK_TOKENS = 512
"""Tokens that one hash id of a Mooncake trace stands for."""
_TIME_FORMAT = "%Y-%m-%d %H:%M:%S.%f"
_MICROSECOND_DIGITS = 6


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request to be sent."""

    due_s: float
    """Seconds after the start; 0 throughout in a closed loop."""
    token_ids: tuple[int, ...]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """One line of a recorded trace."""

    due_s: float
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()
    """One per `MOONCAKE_BLOCK_TOKENS` of the prompt; equal ids stand for equal text. Empty: nothing is shared."""


def closed_loop(
    prompts: PromptSource, num_requests: int, prompt_tokens: int, output_tokens: int, key: str
) -> list[PlannedRequest]:
    """Return requests to be sent as fast as streams become free."""
    return [
        PlannedRequest(0.0, prompts.cut(prompt_tokens, f"{key} {index}"), output_tokens)
        for index in range(num_requests)
    ]


def poisson(
    prompts: PromptSource, num_requests: int, prompt_tokens: int, output_tokens: int, rate: float, key: str
) -> list[PlannedRequest]:
    """Return requests that arrive independently of each other, `rate` a second on average."""
    noise = random.Random(f"{key} {rate}")
    due_s = 0.0
    planned = []
    for index in range(num_requests):
        planned.append(PlannedRequest(due_s, prompts.cut(prompt_tokens, f"{key} {rate} {index}"), output_tokens))
        due_s += noise.expovariate(rate)
    return planned


def read_trace(name: str) -> list[TraceEntry]:
    """Read a trace: one of `TRACES`, or a file in the form of one of them.

    Raises:
        InvalidRequest: There is no such trace, or it has another form; names the field `trace`.
    """
    path = DATA_DIR / TRACES[name] if name in TRACES else Path(name)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        known = ", ".join(TRACES)
        raise InvalidRequest("trace", f"cannot read {name!r}; known traces are {known}, or name a file") from error
    try:
        entries = _read_mooncake(text) if path.suffix == ".jsonl" else _read_azure(text)
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidRequest(
            "trace", f"{path.name} has not the form of an Azure or a Mooncake trace: {error}"
        ) from error
    if not entries:
        raise InvalidRequest("trace", f"{path.name} has no entries")
    return entries


def _read_mooncake(text: str) -> list[TraceEntry]:
    rows = [json.loads(line) for line in text.splitlines() if line]
    return [
        TraceEntry(
            float(row["timestamp"]) / 1e3,
            int(row["input_length"]),
            int(row["output_length"]),
            tuple(int(block_id) for block_id in row["hash_ids"]),
        )
        for row in rows
    ]


def _read_azure(text: str) -> list[TraceEntry]:
    entries: list[TraceEntry] = []
    first: datetime.datetime | None = None
    for row in csv.DictReader(text.splitlines()):
        whole, _, fraction = row["TIMESTAMP"].partition(".")
        # The trace has seven digits after the point, Python reads six.
        stamp = datetime.datetime.strptime(f"{whole}.{fraction[:_MICROSECOND_DIGITS] or 0}", _TIME_FORMAT)  # noqa: DTZ007 - only differences count
        first = first or stamp
        entries.append(
            TraceEntry((stamp - first).total_seconds(), int(row["ContextTokens"]), int(row["GeneratedTokens"]))
        )
    return entries


def replay(
    entries: Sequence[TraceEntry],
    prompts: PromptSource,
    *,
    num_requests: int,
    speed: float,
    scale: float,
    longest_prompt: int,
    longest_output: int,
) -> list[PlannedRequest]:
    """Return a trace's first requests as requests to this model.

    Args:
        entries: The trace.
        prompts: Where text comes from.
        num_requests: How many at most.
        speed: Time goes this many times as fast.
        scale: Lengths are multiplied with it, the shared blocks' too, so that what is shared stays shared.
        longest_prompt: Longer prompts are cut.
        longest_output: Longer outputs are cut.
    """
    planned = []
    for index, entry in enumerate(entries[:num_requests]):
        num_tokens = min(max(round(entry.prompt_tokens * scale), 1), longest_prompt)
        planned.append(
            PlannedRequest(
                (entry.due_s - entries[0].due_s) / speed,
                _trace_prompt(entry, prompts, num_tokens, scale, index),
                min(max(round(entry.output_tokens * scale), 1), longest_output),
            )
        )
    return planned


def _trace_prompt(
    entry: TraceEntry, prompts: PromptSource, num_tokens: int, scale: float, index: int
) -> tuple[int, ...]:
    block_tokens = max(round(MOONCAKE_BLOCK_TOKENS * scale), 1)
    token_ids: list[int] = []
    for block_id in entry.block_ids:
        if len(token_ids) >= num_tokens:
            break
        token_ids += prompts.cut(block_tokens, f"trace block {block_id}")
    if len(token_ids) < num_tokens:
        token_ids += prompts.cut(num_tokens - len(token_ids), f"trace {index}")
    return tuple(token_ids[:num_tokens])
