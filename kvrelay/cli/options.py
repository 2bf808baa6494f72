"""Options that several client commands share, and their way into sampling keywords."""

from dataclasses import dataclass
from typing import Annotated, Final, TypeAlias

import typer

from kvrelay.requests import SamplingOptions

Target: TypeAlias = Annotated[
    str, typer.Option("--target", envvar="KVRELAY_TARGET", help="Gateway to talk to, host:port.", show_default=True)
]
Model: TypeAlias = Annotated[str, typer.Option("--model", help="Model to use; default: the only one served.")]
Timeout: TypeAlias = Annotated[
    float | None, typer.Option("--timeout", min=0.001, help="Deadline of a request in seconds; default: none.")
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]
MaxTokens: TypeAlias = Annotated[
    int | None, typer.Option("--max-tokens", help="Most tokens to generate; default: what the context holds.")
]
MinTokens: TypeAlias = Annotated[int | None, typer.Option("--min-tokens", help="No stop before this many tokens.")]
Temperature: TypeAlias = Annotated[
    float | None, typer.Option("--temperature", help="0 = always the likeliest token; default: 1.")
]
TopP: TypeAlias = Annotated[
    float | None, typer.Option("--top-p", help="Keep the likeliest tokens up to this probability.")
]
TopK: TypeAlias = Annotated[int | None, typer.Option("--top-k", help="Keep this many likeliest tokens.")]
MinP: TypeAlias = Annotated[
    float | None, typer.Option("--min-p", help="Keep tokens with this share of the likeliest one's probability.")
]
Seed: TypeAlias = Annotated[int | None, typer.Option("--seed", help="Equal seeds give equal tokens.")]
RepetitionPenalty: TypeAlias = Annotated[
    float | None, typer.Option("--repetition-penalty", help="Above 1: avoid tokens that were there already.")
]
PresencePenalty: TypeAlias = Annotated[
    float | None, typer.Option("--presence-penalty", help="Subtracted from the logits of generated tokens.")
]
FrequencyPenalty: TypeAlias = Annotated[
    float | None, typer.Option("--frequency-penalty", help="The same, per occurrence.")
]
Stop: TypeAlias = Annotated[
    list[str] | None, typer.Option("--stop", help="Text that ends the answer; may be given several times.")
]
StopTokenIds: TypeAlias = Annotated[
    list[int] | None, typer.Option("--stop-token-id", help="Token that ends the answer; may be given several times.")
]
LogitBias: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--logit-bias", metavar="TOKEN=BIAS", help="Added to a token's logit; may be given several times."),
]
NumCompletions: TypeAlias = Annotated[int | None, typer.Option("--n", help="Number of answers; default: 1.")]
Logprobs: TypeAlias = Annotated[
    int | None, typer.Option("--logprobs", help="Show each token's log-probability, and those of this many best ones.")
]
IgnoreEos: TypeAlias = Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's end token.")]


def parse_logit_bias(given: list[str] | None) -> dict[int, float]:
    """Return the biases that `--logit-bias` names.

    Raises:
        BadParameter: One is not TOKEN=BIAS.
    """
    biases: dict[int, float] = {}
    for text in given or ():
        token_id, _, bias = text.partition("=")
        try:
            biases[int(token_id)] = float(bias)
        except ValueError:
            raise typer.BadParameter(
                f"must be TOKEN=BIAS, a token id and a number, not {text!r}", param_hint="--logit-bias"
            ) from None
    return biases


PASS_THROUGH: Final = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Context settings of commands that parse their own flags, since each of those is a setting."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling flags of one command; None: not given."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    logit_bias: dict[int, float] | None = None
    n: int | None = None
    logprobs: int | None = None
    ignore_eos: bool = False

    def options(self) -> SamplingOptions:
        """Return the keywords of `Client.generate`; absent flags stay absent."""
        return SamplingOptions(
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            stop=self.stop or None,
            stop_token_ids=self.stop_token_ids or None,
            logit_bias=self.logit_bias or None,
            n=self.n,
            logprobs=self.logprobs,
            ignore_eos=self.ignore_eos or None,
        )
