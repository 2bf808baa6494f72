"""Conversations on disk, also after a run that was killed in the middle of a line."""

from pathlib import Path

import pytest

from engine.training.corpus import Conversation, Corpus
from kvrelay.errors import InvalidRequest

FIRST = Conversation(4, "math", (5, 6, 7, 70000), ((2, 4),))
SECOND = Conversation(0, "chat", (8, 9, 10), ((1, 2), (2, 3)))


def test_conversations_are_there_again_when_the_folder_is_opened_anew(tmp_path: Path) -> None:
    with Corpus(tmp_path / "new") as corpus:
        corpus.append(FIRST)
        corpus.append(SECOND)
    with Corpus(tmp_path / "new") as corpus:
        assert corpus.conversations == [FIRST, SECOND]
        assert corpus.num_answer_tokens == 4


@pytest.mark.parametrize("torn", ["tokens.u32", "index.jsonl"])
def test_half_written_conversation_is_cut_off(tmp_path: Path, torn: str) -> None:
    with Corpus(tmp_path) as corpus:
        corpus.append(FIRST)
        corpus.append(SECOND)
    path = tmp_path / torn
    path.write_bytes(path.read_bytes()[:-5])
    with Corpus(tmp_path) as corpus:
        assert corpus.conversations == [FIRST]
        corpus.append(SECOND)
    with Corpus(tmp_path) as corpus:
        assert corpus.conversations == [FIRST, SECOND]


def test_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match="work_dir"):
        Corpus(tmp_path / "file" / "folder")
