"""Checks of prompts and texts: each names the proto path of what is wrong and what would be right. Knows no protos.

Used by `gateway/front/convert.py`, which reads the fields. Those of sampling fields are in `engine/request_checks.py`.
"""

from collections.abc import Iterable

from gateway.relay.request import ChatMessage, ModelLimits
from kvrelay.errors import ContextTooLong, InvalidRequest


def check_texts(field: str, texts: Iterable[str], max_bytes: int) -> None:
    """Refuse empty texts and very long ones.

    Raises:
        InvalidRequest: one is empty or longer than `max_bytes` in UTF-8.
    """
    for index, text in enumerate(texts):
        if not text:
            raise InvalidRequest(f"{field}[{index}]", "must not be empty")
        check_text_bytes(f"{field}[{index}]", text, max_bytes)


def check_text_bytes(field: str, text: str, max_bytes: int) -> None:
    """Refuse a text that is too long.

    Raises:
        InvalidRequest: it has more than `max_bytes` bytes in UTF-8.
    """
    if len(text) > max_bytes or len(text.encode("utf-8", errors="replace")) > max_bytes:
        raise InvalidRequest(field, f"at most {max_bytes} bytes")


def check_prompt_text(field: str, text: str, limits: ModelLimits) -> None:
    """Refuse, without tokenizing it, a text that is empty or cannot fit.

    Raises:
        InvalidRequest: it is empty.
        ContextTooLong: it has more bytes than any prompt.
    """
    if not text:
        raise InvalidRequest(field, "the prompt is empty")
    _check_prompt_bytes(field, len(text), limits)
    _check_prompt_bytes(field, len(text.encode("utf-8", errors="replace")), limits)


def check_prompt_messages(field: str, messages: tuple[ChatMessage, ...], limits: ModelLimits) -> None:
    """Refuse, without rendering it, a conversation that is empty or cannot fit.

    Raises:
        InvalidRequest: there is no message, or one has no role.
        ContextTooLong: they have more bytes than any prompt.
    """
    if not messages:
        raise InvalidRequest(field, "must hold at least one message")
    _check_prompt_bytes(field, sum(len(message.role) + len(message.content) for message in messages), limits)
    for index, message in enumerate(messages):
        if not message.role:
            raise InvalidRequest(f"{field}[{index}].role", "must not be empty")


def check_prompt_tokens(field: str, num_tokens: int, limits: ModelLimits) -> None:
    """Refuse a prompt that is empty or leaves no room for a token.

    Raises:
        InvalidRequest: it is empty.
        ContextTooLong: prompt and one token do not fit.
    """
    if num_tokens == 0:
        raise InvalidRequest(field, "the prompt is empty")
    most = limits.max_sequence_tokens
    if most is not None and num_tokens + 1 > most:
        raise ContextTooLong(
            field, f"the prompt has {num_tokens} tokens; with at least one new token it must fit {limits.room}"
        )


def _check_prompt_bytes(field: str, num_bytes: int, limits: ModelLimits) -> None:
    if num_bytes > limits.max_prompt_bytes:
        raise ContextTooLong(field, f"the prompt has over {limits.max_prompt_bytes} bytes, the most that is taken here")
    most = limits.max_text_bytes
    if num_bytes > most:
        raise ContextTooLong(field, f"the prompt has over {most} bytes, which cannot fit {limits.room}")
