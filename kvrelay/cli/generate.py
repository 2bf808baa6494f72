"""`kvrelay generate`: continue a text, or answer one message."""

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from kvrelay.cli import options
from kvrelay.cli.console import USAGE, err, fail, readable_errors

if TYPE_CHECKING:
    from collections.abc import Iterator

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
    ignore_eos: options.IgnoreEos = False,
    timeout: options.Timeout = None,
    as_json: options.Json = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show tokens and phase times afterwards.")] = False,
) -> None:
    """Continue a text and stream the result; with --chat, answer it."""
    from kvrelay.client import Client

    if system and not chat:
        fail("--system needs --chat", USAGE)
    prompt = sys.stdin.read() if text == "-" else text
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
        ignore_eos,
    ).options()
    with readable_errors(target), Client(target) as client:
        if chat:
            messages = [("system", system)] if system else []
            events = client.generate(messages=[*messages, ("user", prompt)], model=model, timeout_s=timeout, **sampling)
        else:
            events = client.generate(prompt, model=model, timeout_s=timeout, **sampling)
        _print(events, prompt, as_json=as_json, verbose=verbose)


def _print(events: "Iterator[Event]", prompt: str, *, as_json: bool, verbose: bool) -> None:
    from kvrelay.cli.report import RequestRecorder, phase_table
    from kvrelay.results import Chunk

    recorder = RequestRecorder(prompt)
    for event in events:
        recorder.add(event)
        if isinstance(event, Chunk) and not as_json:
            sys.stdout.write(event.text)
            sys.stdout.flush()
    report = recorder.report()
    if as_json:
        print(json.dumps(report.as_json(), ensure_ascii=False))
        return
    sys.stdout.write("\n")
    if verbose:
        err.print(phase_table([report], "where the time went"))
