"""`kvrelay generate`: continue a text, or answer one message."""

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from kvrelay.cli import options
from kvrelay.cli.console import USAGE, err, fail, print_json, read_prompt, readable_errors

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvrelay.cli.report import RequestReport
    from kvrelay.results import Event

_DEFAULT_TARGET = "127.0.0.1:50051"


def generate(
    text: Annotated[str, typer.Argument(help="What to continue; - reads it from standard input.")],
    target: options.Target = _DEFAULT_TARGET,
    model: options.Model = "",
    chat: Annotated[bool, typer.Option("--chat", help="Send the text as a chat message, to be answered.")] = False,
    system: Annotated[str, typer.Option("--system", help="With --chat: instructions that go first.")] = "",
    max_tokens: options.MaxTokens = None,
    min_tokens: options.MinTokens = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    seed: options.Seed = None,
    repetition_penalty: options.RepetitionPenalty = None,
    presence_penalty: options.PresencePenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    stop: options.Stop = None,
    stop_token_id: options.StopTokenIds = None,
    logit_bias: options.LogitBias = None,
    n: options.NumCompletions = None,
    logprobs: options.Logprobs = None,
    ignore_eos: options.IgnoreEos = False,
    timeout: options.Timeout = None,
    as_json: options.Json = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show tokens and phase times afterwards.")] = False,
) -> None:
    """Continue a text and stream the result; with --chat, answer it."""
    from kvrelay.client import Client

    if system and not chat:
        fail("--system needs --chat", USAGE)
    prompt = read_prompt(text)
    sampling = options.Sampling(
        max_tokens,
        min_tokens,
        temperature,
        top_p,
        top_k,
        min_p,
        seed,
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
        stop,
        stop_token_id,
        options.parse_logit_bias(logit_bias),
        n,
        logprobs,
        ignore_eos,
    ).options()
    with readable_errors(target), Client(target) as client:
        if chat:
            messages = [("system", system)] if system else []
            events = client.generate(messages=[*messages, ("user", prompt)], model=model, timeout_s=timeout, **sampling)
        else:
            events = client.generate(prompt, model=model, timeout_s=timeout, **sampling)
        if n is None or n <= 1:
            _stream(events, prompt, as_json=as_json, verbose=verbose)
        else:
            _collect(events, prompt, n, as_json=as_json, verbose=verbose)


def _stream(events: "Iterator[Event]", prompt: str, *, as_json: bool, verbose: bool) -> None:
    """Print one answer as it comes."""
    from kvrelay.cli.report import RequestRecorder
    from kvrelay.results import Chunk

    recorder = RequestRecorder(prompt)
    for event in events:
        recorder.add(event)
        if isinstance(event, Chunk) and not as_json:
            sys.stdout.write(event.text)
            sys.stdout.flush()
    report = recorder.report()
    if as_json:
        print_json(report.as_json())
        return
    sys.stdout.write("\n")
    sys.stdout.flush()
    _show_figures([report], is_wanted=verbose)


def _collect(events: "Iterator[Event]", prompt: str, num: int, *, as_json: bool, verbose: bool) -> None:
    """Print several answers, which come at once, one after the other when all are there."""
    from kvrelay.cli.report import RequestRecorder
    from kvrelay.results import Started

    start = time.perf_counter()
    recorders: list[RequestRecorder] = []
    for event in events:
        if isinstance(event, Started):
            # Now and not before: the server has found the number good.
            recorders = [RequestRecorder(prompt, index=index, start=start) for index in range(num)]
        for recorder in recorders:
            recorder.add(event)
    reports = [recorder.report() for recorder in recorders]
    if as_json:
        print_json({"completions": [report.as_json() for report in reports]})
        return
    for index, report in enumerate(reports):
        sys.stdout.write(f"[{index + 1} of {num}]\n{report.text}\n")
    sys.stdout.flush()
    _show_figures(reports, is_wanted=verbose)


def _show_figures(reports: "Sequence[RequestReport]", *, is_wanted: bool) -> None:
    from kvrelay.cli.report import logprob_table, phase_table

    for report in reports:
        if report.logprobs:
            err.print(logprob_table(report))
    if is_wanted:
        err.print(phase_table(reports, "where the time went"))
