"""The rules by which tokens are control tokens and ends of a turn, whatever file they come from. Pure.

Files are often wrong here: converters mark control tokens as text, and name the end of the text where the end of the
turn is meant. So a spelling that no text has, and what the model's own chat template writes behind an answer, count as
well. `gguf_vocab.py` and `hf_vocab.py` bring the two kinds of files into this form.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from kvrelay.errors import InvalidRequest
from kvrelay.text.chat_template import ChatMessage, ChatTemplate

END_SPELLINGS: Final = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<|fim_pad|>",
        "<|repo_name|>",
        "<|file_sep|>",
    }
)
"""Tokens that end a turn, a text or a file in every vocabulary that has them, however they are marked."""
_MARKED_END_SPELLINGS: Final = frozenset({"</s>", "<eos>", "[EOS]", "<EOT>", "_<EOT>", "[EOT]"})
"""The same for tokens that the file marks as more than text: unmarked, these may be a page's markup."""
_CHANNEL_END: Final = "<|end|>"
_ANSWER_END: Final = "<|return|>"
_CONTROL_SHAPE: Final = re.compile(r"<\|[^|<>\s]+\|>")
_BRACKETED: Final = re.compile(r"[<\[]\S+[>\]]")
_LONGEST_SPELLING: Final = 64
_QUESTION: Final = "Which colour has the sky?"
_ANSWER: Final = "It is blue today."


@dataclass(frozen=True, slots=True)
class TokenRoles:
    """What tokens are for."""

    end_token_ids: frozenset[int]
    """Tokens that end a turn or the text."""
    control_token_ids: frozenset[int]
    """Tokens that are never text."""


def find_roles(
    spelled: Mapping[str, int],
    *,
    marked: Collection[int],
    control: Collection[int],
    named: Collection[int],
    named_ends: Collection[int],
    template: ChatTemplate | None,
) -> TokenRoles:
    """Return the roles of a vocabulary's tokens.

    Args:
        spelled: Token ids by spelling; those that are plainly text may be missing.
        marked: Tokens that the file marks as more than text, control tokens among them.
        control: Tokens that the file marks as control tokens.
        named: Tokens that the file names as begin, padding and the like.
        named_ends: Tokens that the file names as ends.
        template: The model's chat template.
    """
    marked = frozenset(marked)
    ends = {
        token_id
        for spelling, token_id in spelled.items()
        if spelling in END_SPELLINGS or (spelling in _MARKED_END_SPELLINGS and token_id in marked)
    }
    if _CHANNEL_END in spelled and _ANSWER_END in spelled:
        ends.discard(spelled[_CHANNEL_END])  # there it ends one part of an answer, and another follows
    ends.update(named_ends)
    controls = set(control)
    controls.update(
        token_id
        for spelling, token_id in spelled.items()
        # A named token that is spelled like a word is one: an answer may end with it, and has it then.
        if (token_id in ends or token_id in named) and (token_id in marked or _BRACKETED.fullmatch(spelling))
    )
    if template is not None:
        controls.update(
            token_id
            for spelling, token_id in spelled.items()
            if spelling in template.source and _CONTROL_SHAPE.fullmatch(spelling)
        )
        turn_end = _end_of_turn(template, spelled, marked | controls)
        if turn_end is not None:
            ends.add(turn_end)
            controls.add(turn_end)
    return TokenRoles(frozenset(ends), frozenset(controls))


def may_have_role(spelling: str) -> bool:
    """Whether a token of this spelling may have a role although its file marks it as text."""
    return spelling in END_SPELLINGS or _CONTROL_SHAPE.fullmatch(spelling) is not None


def _end_of_turn(template: ChatTemplate, spelled: Mapping[str, int], candidates: Collection[int]) -> int | None:
    """Return the token that the template writes behind an answer; None = it writes none."""
    turns = [ChatMessage("user", _QUESTION), ChatMessage("assistant", _ANSWER)]
    try:
        text = template.render(turns, add_generation_prompt=False)
    except InvalidRequest:
        return None  # it wants other roles; who sends those finds out what it says
    _, answer, rest = text.rpartition(_ANSWER)
    rest = rest.lstrip()[:_LONGEST_SPELLING] if answer else ""
    for length in range(len(rest), 0, -1):
        token_id = spelled.get(rest[:length])
        if token_id in candidates and _BRACKETED.fullmatch(rest[:length]):
            return token_id
    return None
