"""Conversations on disk: token ids and which of them are answers. Append-only, so that a run can go on where it ended.

Two files in the work folder: `tokens.u32` with all token ids in a row, and `index.jsonl` with one line a conversation.
A line is written after its tokens; what a killed run left behind the last whole line is cut off when it is opened.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from kvrelay.errors import InvalidRequest

_TOKENS, _INDEX = "tokens.u32", "index.jsonl"
_TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class Conversation:
    """One text of the target's own."""

    index: int
    """Its number in the run; with the run's seed it decides the content."""
    kind: str
    token_ids: tuple[int, ...]
    answers: tuple[tuple[int, int], ...]
    """Half-open ranges of `token_ids` that the target wrote as answers."""

    @property
    def num_answer_tokens(self) -> int:
        """Tokens within answers."""
        return sum(end - start for start, end in self.answers)


class Corpus:
    """The conversations of one work folder."""

    def __init__(self, folder: Path) -> None:
        """Open or make the files.

        Raises:
            InvalidRequest: The folder cannot be used; names `work_dir`.
        """
        self.conversations: list[Conversation] = []
        """In the order in which they were finished."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._tokens = (folder / _TOKENS).open("a+b")
            self._index = (folder / _INDEX).open("a+b")
        except OSError as error:
            raise InvalidRequest("work_dir", f"{folder} cannot be written to: {error.strerror or error}") from error
        self._read()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        self._tokens.close()
        self._index.close()

    @property
    def num_answer_tokens(self) -> int:
        """Answer tokens in all."""
        return sum(conversation.num_answer_tokens for conversation in self.conversations)

    def append(self, conversation: Conversation) -> None:
        """Add a conversation to the files."""
        self._tokens.write(np.array(conversation.token_ids, "<u4").tobytes())
        self._tokens.flush()
        line = {
            "index": conversation.index,
            "kind": conversation.kind,
            "num_tokens": len(conversation.token_ids),
            "answers": conversation.answers,
        }
        self._index.write(json.dumps(line).encode() + b"\n")
        self._index.flush()
        self.conversations.append(conversation)

    def _read(self) -> None:
        self._tokens.seek(0)
        data = self._tokens.read()
        tokens: npt.NDArray[np.uint32] = np.frombuffer(data[: len(data) // _TOKEN_BYTES * _TOKEN_BYTES], "<u4")
        self._index.seek(0)
        start = kept_bytes = 0
        for line in self._index.read().splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            record = json.loads(line)
            end = start + record["num_tokens"]
            if end > len(tokens):
                break
            answers = tuple((first, last) for first, last in record["answers"])
            token_ids = tuple(tokens[start:end].tolist())
            self.conversations.append(Conversation(record["index"], record["kind"], token_ids, answers))
            start, kept_bytes = end, kept_bytes + len(line)
        self._tokens.truncate(start * _TOKEN_BYTES)
        self._index.truncate(kept_bytes)
