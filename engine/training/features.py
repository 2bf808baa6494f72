"""What the head learns from, computed once: the target's hidden states of every token, on disk.

Three files in the work folder: `taps.f16` [num_tokens, num_taps * hidden_size], and for the rows that predict answer
tokens `teacher_ids.i16` and `teacher_shares.f16` [num_answer_tokens, k], the target's most likely tokens among those
that the head can propose. `features.json` says what they belong to and is written last.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor
from torch.nn import functional

from engine.cache.layout import KvLayout
from engine.config import default_kv_dtype
from engine.model.batch import SequenceRows, StepBatch, build_batch
from engine.model.cpu.model import NativeModel
from engine.model.interface import LayerTaps, TappedModel
from engine.model.kv_cache import KvCache
from engine.training.corpus import Conversation
from engine.training.head import HeadBatch, Segment
from engine.training.loss import Teaching
from engine.training.target import TargetParts
from engine.types import BlockId
from kvrelay.errors import InvalidRequest

NUM_TEACHER_TOKENS = 32
_TAPS, _IDS, _SHARES, _MANIFEST = "taps.f16", "teacher_ids.i16", "teacher_shares.f16", "features.json"
_BLOCK_SIZE = 16
_ROWS_AT_ONCE = 512
_FP16_LIMIT = 65504.0


@dataclass(frozen=True, slots=True)
class FeatureKey:
    """What decides the files' content."""

    fingerprint: str
    """The target's."""
    tap_layers: tuple[int, ...]
    vocab_digest: str
    """Of the tokens that the head can propose."""
    num_conversations: int
    num_tokens: int


class TapReader:
    """Runs whole conversations through the target and returns their hidden states."""

    def __init__(self, model: TappedModel, tap_layers: Sequence[int]) -> None:
        self._model = model
        self._tap_layers = tuple(tap_layers)
        dtype = default_kv_dtype(is_native=isinstance(model, NativeModel))
        self._layout = KvLayout.of_model(model.fingerprint, model.config, _BLOCK_SIZE, dtype)
        self._cache: KvCache | None = None

    def read(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Return [tokens of all texts, num_taps * hidden_size] fp32."""
        batch, num_blocks = _whole_texts(texts)
        if self._cache is None or self._cache.num_blocks < num_blocks:
            self._cache = KvCache(self._layout, num_blocks, self._model.device)
        shape = (len(batch.token_ids), len(self._tap_layers), self._model.config.hidden_size)
        taps = LayerTaps(self._tap_layers, torch.empty(shape, device=self._model.device))
        self._model.forward(batch, self._cache, None, taps)
        return taps.values.flatten(1).cpu()


class Features:
    """The opened files, and batches made from them."""

    def __init__(self, folder: Path, conversations: Sequence[Conversation], vocab_ids: Tensor, width: int) -> None:
        self._conversations = conversations
        self._vocab_ids = vocab_ids
        num_tokens = sum(len(each.token_ids) for each in conversations)
        num_answer_tokens = sum(each.num_answer_tokens for each in conversations)
        self._taps: npt.NDArray[np.float16] = np.memmap(folder / _TAPS, np.float16, "r", shape=(num_tokens, width))
        shape = (num_answer_tokens, NUM_TEACHER_TOKENS)
        self._ids: npt.NDArray[np.int16] = np.memmap(folder / _IDS, np.int16, "r", shape=shape)
        self._shares: npt.NDArray[np.float16] = np.memmap(folder / _SHARES, np.float16, "r", shape=shape)
        self._starts = np.cumsum([0, *(len(each.token_ids) for each in conversations)])
        self._answer_starts = np.cumsum([0, *(each.num_answer_tokens for each in conversations)])

    def batch(self, numbers: Sequence[int]) -> HeadBatch:
        """Return the rows of some conversations; the last token of each, whose row predicts nothing, is left out."""
        tokens: list[int] = []
        taps: list[npt.NDArray[np.float16]] = []
        starts: list[int] = []
        segments: list[Segment] = []
        for number in numbers:
            conversation, start = self._conversations[number], int(self._starts[number])
            row, count = len(tokens), len(conversation.token_ids) - 1
            starts.append(row)
            tokens += conversation.token_ids[:count]
            taps.append(self._taps[start : start + count])
            segments += [Segment(row, row + first - 1, row + end - 1) for first, end in conversation.answers]
        values = torch.from_numpy(np.concatenate(taps)).float()
        return HeadBatch(torch.tensor(tokens), values, tuple(starts), tuple(segments))

    def teaching(self, numbers: Sequence[int]) -> Teaching:
        """Return what the target expects at the rows of the batch's segments, in their order."""
        ids = np.concatenate([self._ids[self._answers(number)] for number in numbers])
        shares = np.concatenate([self._shares[self._answers(number)] for number in numbers])
        following = torch.tensor(
            [
                token
                for number in numbers
                for first, end in self._conversations[number].answers
                for token in self._conversations[number].token_ids[first:end]
            ]
        )
        places = torch.searchsorted(self._vocab_ids, following).clamp_(max=len(self._vocab_ids) - 1)
        is_known = self._vocab_ids[places] == following
        return Teaching(torch.from_numpy(ids).long(), torch.from_numpy(shares).float(), is_known.float())

    def kinds_of_answers(self, number: int) -> list[str]:
        """Return the kind of task, once for each answer of a conversation."""
        conversation = self._conversations[number]
        return [conversation.kind] * len(conversation.answers)

    def _answers(self, number: int) -> slice:
        return slice(int(self._answer_starts[number]), int(self._answer_starts[number + 1]))


def prepare_features(
    folder: Path,
    model: TappedModel,
    target: TargetParts,
    tap_layers: Sequence[int],
    vocab_ids: Tensor,
    conversations: Sequence[Conversation],
    progress: Callable[[int, int], None],
) -> Features:
    """Compute the files unless they are there already, and open them.

    Args:
        folder: The work folder.
        model: The target.
        target: Its parts.
        tap_layers: Layers whose output is kept, ending with the model's last one, from which the target's own
            expectation follows.
        vocab_ids: [num_vocab_ids] int64, ascending.
        conversations: What to compute; their order is the files' order.
        progress: Called with (tokens done, tokens in all).

    Raises:
        InvalidRequest: The files cannot be written; names `work_dir`.
    """
    num_tokens = sum(len(each.token_ids) for each in conversations)
    digest = xxhash.xxh3_64_hexdigest(vocab_ids.numpy().tobytes())
    key = FeatureKey(model.fingerprint, tuple(tap_layers), digest, len(conversations), num_tokens)
    width = len(tap_layers) * model.config.hidden_size
    manifest = folder / _MANIFEST
    if not manifest.is_file() or json.loads(manifest.read_text()) != json.loads(json.dumps(asdict(key))):
        manifest.unlink(missing_ok=True)
        _write(folder, TapReader(model, tap_layers), target, vocab_ids, conversations, progress)
        manifest.write_text(json.dumps(asdict(key)))
    return Features(folder, conversations, vocab_ids, width)


def _write(
    folder: Path,
    reader: TapReader,
    target: TargetParts,
    vocab_ids: Tensor,
    conversations: Sequence[Conversation],
    progress: Callable[[int, int], None],
) -> None:
    hidden_size = target.config.hidden_size
    output_rows = target.lm_head[vocab_ids]
    total = sum(len(each.token_ids) for each in conversations)
    done = 0
    try:
        with ExitStack() as stack:
            taps_file, ids_file, shares_file = (
                stack.enter_context((folder / name).open("wb")) for name in (_TAPS, _IDS, _SHARES)
            )
            for group in _groups(conversations):
                taps = reader.read([each.token_ids for each in group])
                # Only a first token's outliers could come near fp16's limit, and features are normalised anyway.
                taps_file.write(taps.clamp(-_FP16_LIMIT, _FP16_LIMIT).half().numpy().tobytes())
                logits = target.output_features(taps[_answer_rows(group), -hidden_size:]) @ output_rows.T
                count = min(NUM_TEACHER_TOKENS, len(vocab_ids))
                best = logits.topk(count, dim=1)
                padding = (0, NUM_TEACHER_TOKENS - count)
                ids_file.write(functional.pad(best.indices, padding).short().numpy().tobytes())
                shares_file.write(functional.pad(best.values.softmax(1), padding).half().numpy().tobytes())
                done += sum(len(each.token_ids) for each in group)
                progress(done, total)
    except OSError as error:
        raise InvalidRequest("work_dir", f"{folder} cannot be written to: {error.strerror or error}") from error


def _groups(conversations: Sequence[Conversation]) -> Iterator[list[Conversation]]:
    """Runs of conversations, in order, of about as many tokens as a step computes best."""
    group: list[Conversation] = []
    size = 0
    for conversation in conversations:
        if group and size + len(conversation.token_ids) > _ROWS_AT_ONCE:
            yield group
            group, size = [], 0
        group.append(conversation)
        size += len(conversation.token_ids)
    if group:
        yield group


def _answer_rows(group: Sequence[Conversation]) -> Tensor:
    """The rows of a group that predict answer tokens."""
    rows: list[Tensor] = []
    offset = 0
    for conversation in group:
        rows += [torch.arange(offset + first - 1, offset + end - 1) for first, end in conversation.answers]
        offset += len(conversation.token_ids)
    return torch.cat(rows)


def _whole_texts(texts: Sequence[Sequence[int]]) -> tuple[StepBatch, int]:
    """A step that prefills whole texts, each in blocks of its own; returns it and the number of blocks."""
    parts: list[SequenceRows] = []
    num_blocks = 0
    for text in texts:
        first, num_blocks = num_blocks, num_blocks - (-len(text) // _BLOCK_SIZE)
        parts.append(SequenceRows(text, 0, [BlockId(block) for block in range(first, num_blocks)], 0))
    return build_batch(parts, _BLOCK_SIZE), num_blocks
