"""What comes back, as OpenAI's objects: whole answers, chunks of streams, usage and logprobs.

Beyond OpenAI's: `kvrelay` in the last object holds what the gRPC answer tells besides (timings, workers, attempts).
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from gateway.relay.response import Completion, TokenChunk
from kvrelay.values import FinishReason, PositionLogprobs, TokenLogprob

_FINISH = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORT: "abort"}


class TokenTexts(Protocol):
    """Turns one token into the text that logprobs show."""

    def __call__(self, token_id: int) -> str:
        """Return it."""
        ...


@dataclass(slots=True)
class Answer:
    """One completion as it comes in."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    completion: Completion | None = None

    def add(self, chunk: TokenChunk) -> None:
        """Take in new tokens."""
        self.texts.append(chunk.text)
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs


def usage_of(completions: Sequence[Completion]) -> dict[str, Any]:
    """Return OpenAI's usage of a call's completions, which share one prompt."""
    prompt_tokens = completions[0].usage.prompt_tokens
    completion_tokens = sum(each.usage.completion_tokens for each in completions)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": max(each.usage.cached_tokens for each in completions)},
    }


def details_of(completion: Completion) -> dict[str, Any]:
    """Return what our own answer tells of a completion besides."""
    return {
        "timings": asdict(completion.timings),
        "prefill_worker": completion.prefill_worker,
        "decode_worker": completion.decode_worker,
        "num_attempts": completion.num_attempts,
        "draft_tokens": completion.usage.draft_tokens,
        "accepted_tokens": completion.usage.accepted_tokens,
    }


class ChatFormat:
    """Objects of /v1/chat/completions."""

    prefix, object_name, chunk_name = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, token_text: TokenTexts) -> None:
        self._token_text = token_text

    def choice(self, index: int, answer: Answer, finish_reason: str) -> dict[str, Any]:
        """Return one choice of a whole answer."""
        return {
            "index": index,
            "message": {"role": "assistant", "content": "".join(answer.texts), "refusal": None},
            "logprobs": self.logprobs(answer.logprobs, 0),
            "finish_reason": finish_reason,
        }

    def first(self, index: int) -> dict[str, Any] | None:
        """Return the choice that begins a stream's completion."""
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def delta(self, index: int, chunk: TokenChunk, offset: int) -> dict[str, Any]:
        """Return one choice of a stream's chunk."""
        return {
            "index": index,
            "delta": {"content": chunk.text},
            "logprobs": self.logprobs(chunk.logprobs, offset),
            "finish_reason": None,
        }

    def last(self, index: int, finish_reason: str) -> dict[str, Any]:
        """Return the choice that ends a stream's completion."""
        return {"index": index, "delta": {}, "logprobs": None, "finish_reason": finish_reason}

    def logprobs(self, entries: Sequence[PositionLogprobs], offset: int) -> dict[str, Any] | None:
        """Return logprobs as chat has them; None where there are none."""
        if not entries:
            return None
        return {"content": [self._entry(each) for each in entries], "refusal": None}

    def _entry(self, entry: PositionLogprobs) -> dict[str, Any]:
        return {**self._token(entry.sampled), "top_logprobs": [self._token(each) for each in entry.top]}

    def _token(self, token: TokenLogprob) -> dict[str, Any]:
        text = self._token_text(token.token_id)
        return {"token": text, "logprob": token.logprob, "bytes": list(text.encode())}


class CompletionFormat:
    """Objects of /v1/completions."""

    prefix, object_name, chunk_name = "cmpl", "text_completion", "text_completion"

    def __init__(self, token_text: TokenTexts) -> None:
        self._token_text = token_text

    def choice(self, index: int, answer: Answer, finish_reason: str) -> dict[str, Any]:
        """Return one choice of a whole answer."""
        logprobs = self.logprobs(answer.logprobs, 0)
        return {"index": index, "text": "".join(answer.texts), "logprobs": logprobs, "finish_reason": finish_reason}

    def first(self, index: int) -> dict[str, Any] | None:
        """Return None: text begins with text."""
        return None

    def delta(self, index: int, chunk: TokenChunk, offset: int) -> dict[str, Any]:
        """Return one choice of a stream's chunk."""
        logprobs = self.logprobs(chunk.logprobs, offset)
        return {"index": index, "text": chunk.text, "logprobs": logprobs, "finish_reason": None}

    def last(self, index: int, finish_reason: str) -> dict[str, Any]:
        """Return the choice that ends a stream's completion."""
        return {"index": index, "text": "", "logprobs": None, "finish_reason": finish_reason}

    def logprobs(self, entries: Sequence[PositionLogprobs], offset: int) -> dict[str, Any] | None:
        """Return logprobs as plain completions have them; None where there are none.

        Args:
            entries: Of each token.
            offset: Characters of the completion before the first of them.
        """
        if not entries:
            return None
        tokens = [self._token_text(each.sampled.token_id) for each in entries]
        offsets = [offset + sum(map(len, tokens[:place])) for place in range(len(tokens))]
        return {
            "tokens": tokens,
            "token_logprobs": [each.sampled.logprob for each in entries],
            "top_logprobs": [
                {self._token_text(token.token_id): token.logprob for token in (*each.top, each.sampled)}
                for each in entries
            ],
            "text_offset": offsets,
        }


Format = ChatFormat | CompletionFormat


def finish_name(reason: FinishReason) -> str:
    """Return OpenAI's word for why a completion ended."""
    return _FINISH[reason]


def envelope(request_id: int, model: str, prefix: str, object_name: str) -> dict[str, Any]:
    """Return what all objects of a call begin with."""
    return {"id": f"{prefix}-{request_id:016x}", "object": object_name, "created": int(time.time()), "model": model}
