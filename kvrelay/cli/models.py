"""`kvrelay models | tokenize`: what a gateway serves, and how its model reads a text."""

from dataclasses import asdict
from typing import Annotated

import typer

from kvrelay.cli import options
from kvrelay.cli.console import out, print_json, read_prompt, readable_errors

_DEFAULT_TARGET = "127.0.0.1:50051"


def models(target: options.Target = _DEFAULT_TARGET, as_json: options.Json = False) -> None:
    """List the models that a gateway serves."""
    from rich.table import Table

    from kvrelay.client import Client

    with readable_errors(target), Client(target) as client:
        served = client.list_models()
        if as_json:
            print_json({"models": [asdict(model) for model in served]})
            return
        table = Table()
        for name in ("model", "architecture", "tokens a request", "vocabulary", "chat"):
            table.add_column(name)
        for model in served:
            sizes = (f"{model.context_length:,}", f"{model.vocab_size:,}")
            table.add_row(model.name, model.architecture, *sizes, "yes" if model.has_chat_template else "no")
        out.print(table)


def tokenize(
    text: Annotated[str, typer.Argument(help="What to tokenize; - reads it from standard input.")],
    target: options.Target = _DEFAULT_TARGET,
    model: options.Model = "",
    chat: Annotated[bool, typer.Option("--chat", help="As a chat message, inside the model's template.")] = False,
    as_json: options.Json = False,
) -> None:
    """Print the token ids of a text, as generate would send it to the model."""
    from kvrelay.client import Client

    prompt = read_prompt(text)
    with readable_errors(target), Client(target) as client:
        if chat:
            token_ids = client.tokenize(messages=[("user", prompt)], model=model)
        else:
            token_ids = client.tokenize(prompt, model=model)
        if as_json:
            print_json({"num_tokens": len(token_ids), "token_ids": token_ids})
        else:
            print(*token_ids)
