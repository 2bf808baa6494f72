"""Checks of a request's fields: what each sampling field may hold, which combinations leave a token to draw.

The one table of ranges: the gateway asks at the door, so that the client hears of it by name, and the engine asks
again, because it trusts no peer. What passes here fits the integers and floats of every kernel. Decides nothing else,
and knows neither protos nor models.
"""

import math
from collections.abc import Collection, Mapping, Sized
from dataclasses import dataclass

from engine.types import SamplingParams
from kvrelay.errors import InvalidRequest, NoTokenAllowed

INT32_MAX = 2**31 - 1
MIN_REPETITION_PENALTY = 0.009999999776482582
"""0.01 as a 32-bit float: logits divided by less could overflow."""
MAX_LOGPROBS = 20
PREFIX = "sampling_params"
"""Where the fields are in a request's proto path."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The range of a number."""

    low: float
    high: float
    is_low_excluded: bool = False

    def __str__(self) -> str:
        return f"{'(' if self.is_low_excluded else '['}{_shown(self.low)}, {_shown(self.high)}]"


SAMPLING_BOUNDS: Mapping[str, Bounds] = {
    "max_tokens": Bounds(1, INT32_MAX),
    "min_tokens": Bounds(0, INT32_MAX),
    "temperature": Bounds(0.0, 2.0),
    "top_p": Bounds(0.0, 1.0, is_low_excluded=True),
    "top_k": Bounds(0, INT32_MAX),
    "min_p": Bounds(0.0, 1.0),
    "seed": Bounds(0, 2**64 - 1),
    "repetition_penalty": Bounds(MIN_REPETITION_PENALTY, 2.0),
    "presence_penalty": Bounds(-2.0, 2.0),
    "frequency_penalty": Bounds(-2.0, 2.0),
    "logprobs": Bounds(0, MAX_LOGPROBS),
    "num_draft_tokens": Bounds(0, INT32_MAX),
}
"""By field of SamplingParams; the proto's comments say the same."""
BIAS_BOUNDS = Bounds(-100.0, 100.0)


def check_number(field: str, value: float, bounds: Bounds) -> None:
    """Refuse NaN, infinities, and what lies out of bounds.

    Raises:
        InvalidRequest: it does.
    """
    is_low = value < bounds.low or (bounds.is_low_excluded and value == bounds.low)
    if is_low or value > bounds.high or not math.isfinite(value):
        raise InvalidRequest(field, f"must be in {bounds}, not {_shown(value)}")


def check_token_ids(field: str, token_ids: Collection[int], vocab_size: int) -> None:
    """Refuse ids the model does not have.

    Raises:
        InvalidRequest: one is negative or not below `vocab_size`.
    """
    if not token_ids:
        return
    lowest, highest = min(token_ids), max(token_ids)
    if highest >= vocab_size or lowest < 0:
        raise InvalidRequest(
            field, f"token ids must be in [0, {vocab_size - 1}], not {highest if lowest >= 0 else lowest}"
        )


def check_count(field: str, values: Sized, most: int) -> None:
    """Refuse a list that is too long.

    Raises:
        InvalidRequest: it has more than `most` entries.
    """
    if len(values) > most:
        raise InvalidRequest(field, f"at most {most} entries, not {len(values)}")


def check_sampling_params(params: SamplingParams, vocab_size: int) -> None:
    """Refuse values that no kernel could take.

    Raises:
        InvalidRequest: a field is out of range; names its proto path.
    """
    for name, bounds in SAMPLING_BOUNDS.items():
        value = getattr(params, name)
        if value is not None:
            check_number(f"{PREFIX}.{name}", value, bounds)
    if params.min_tokens > params.max_tokens:
        raise InvalidRequest(
            f"{PREFIX}.min_tokens", f"must be at most max_tokens ({params.max_tokens}), not {params.min_tokens}"
        )
    check_token_ids(f"{PREFIX}.stop_token_ids", params.stop_token_ids, vocab_size)
    check_token_ids(f"{PREFIX}.allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    check_token_ids(f"{PREFIX}.logit_bias", params.logit_bias, vocab_size)
    for token_id, bias in params.logit_bias.items():
        check_number(f"{PREFIX}.logit_bias[{token_id}]", bias, BIAS_BOUNDS)
    for index, word in enumerate(params.bad_words):
        if not word:
            raise InvalidRequest(f"{PREFIX}.bad_words[{index}]", "must have at least one token")
        check_token_ids(f"{PREFIX}.bad_words[{index}]", word, vocab_size)


def check_leaves_a_token(params: SamplingParams, vocab_size: int, stop_ids: Collection[int]) -> None:
    """Refuse fields that leave no token to draw from the very first position.

    Args:
        params: Checked by `check_sampling_params`.
        vocab_size: The model's.
        stop_ids: Every token that would end the request; `min_tokens` bans them at first.

    Raises:
        NoTokenAllowed: They do; names the fields that ban.
    """
    banned = {word[0] for word in params.bad_words if len(word) == 1}
    if params.min_tokens > 0:
        banned.update(token_id for token_id in stop_ids if token_id < vocab_size)
    allowed = params.allowed_token_ids
    if (len(banned) >= vocab_size) if allowed is None else allowed <= banned:
        raise no_token_allowed(params)


def no_token_allowed(params: SamplingParams) -> NoTokenAllowed:
    """Return the error of a request whose fields ban every token at a position; names those that ban."""
    is_banning = {
        "allowed_token_ids": params.allowed_token_ids is not None,
        "bad_words": bool(params.bad_words),
        "min_tokens": params.min_tokens > 0,
    }
    names = [name for name, is_used in is_banning.items() if is_used] or ["allowed_token_ids"]
    return NoTokenAllowed(f"{PREFIX}.{names[0]}", f"{', '.join(names)} together leave no token to choose from")


def _shown(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"
