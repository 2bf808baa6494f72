"""`kvrelay chat`: a conversation with the model, typed or piped."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from kvrelay.cli import options
from kvrelay.cli.console import err, out, readable_errors

if TYPE_CHECKING:
    from kvrelay.client import Client
    from kvrelay.requests import SamplingOptions

_DEFAULT_TARGET = "127.0.0.1:50051"
_HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


def chat(
    target: options.Target = _DEFAULT_TARGET,
    model: options.Model = "",
    system: Annotated[str, typer.Option("--system", help="Instructions that go before the conversation.")] = "",
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    seed: options.Seed = None,
    repetition_penalty: options.RepetitionPenalty = None,
    timeout: options.Timeout = None,
) -> None:
    """Talk with the model; it remembers the conversation. Piped input is one message a line."""
    from kvrelay.client import Client

    sampling = options.Sampling(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        repetition_penalty=repetition_penalty,
    ).options()
    with readable_errors(target), Client(target) as client:
        # Ask first: a person should not type a message only to learn that nobody is there.
        served = client.list_models()
        if sys.stdin.isatty():
            names = ", ".join(each.name for each in served)
            err.print(f"{names} at {target}. {_HELP}", markup=False)
        _Conversation(client, model, system, sampling, timeout).run()


class _Conversation:
    """The turns so far, and the loop that adds to them."""

    def __init__(
        self, client: "Client", model: str, system: str, sampling: "SamplingOptions", timeout_s: float | None
    ) -> None:
        self._client = client
        self._model = model
        self._sampling = sampling
        self._timeout_s = timeout_s
        self._opening = [("system", system)] if system else []
        self._messages: list[tuple[str, str]] = list(self._opening)

    def run(self) -> None:
        """Read and answer until the input ends."""
        is_interactive = sys.stdin.isatty()
        if is_interactive:
            # Only for its side effect: line editing and history in input().
            import readline  # noqa: F401
        while True:
            try:
                line = input("> " if is_interactive else "").strip()
            except EOFError:
                if is_interactive:
                    out.print()
                return
            if line == "/exit":
                return
            if line == "/reset":
                self._messages = list(self._opening)
            elif line == "/help":
                err.print(_HELP, markup=False)
            elif line:
                self._answer(line)

    def _answer(self, message: str) -> None:
        from kvrelay.results import Chunk

        self._messages.append(("user", message))
        parts: list[str] = []
        events = self._client.generate(
            messages=self._messages, model=self._model, timeout_s=self._timeout_s, **self._sampling
        )
        try:
            for event in events:
                if isinstance(event, Chunk):
                    parts.append(event.text)
                    sys.stdout.write(event.text)
                    sys.stdout.flush()
        except KeyboardInterrupt:
            # The answer ends here; closing the iterator tells the server.
            sys.stdout.write(" [stopped]")
        finally:
            # A generator: closing it cancels the call.
            getattr(events, "close", lambda: None)()
        sys.stdout.write("\n")
        sys.stdout.flush()
        self._messages.append(("assistant", "".join(parts)))
