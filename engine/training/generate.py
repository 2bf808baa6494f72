"""The target writes its own training text: first the user's turn, then its answer, many conversations at once.

The user's turn is sampled behind the chat template's user header and an opening from `topics.py`; the answer then goes
on from the plain template, greedy or sampled. A conversation is a function of the run's seed and its number, whatever
else the engine computes beside it. A model without a chat template just goes on from the opening.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from engine.engine import Engine
from engine.training.corpus import Conversation, Corpus
from engine.training.settings import GenerationSettings
from engine.training.topics import FOLLOW_UPS, Assignment, assign
from engine.types import EngineRequest, RequestId, SamplingParams, SequenceOutput
from kvrelay.text.tokenizer import Tokenizer

_MARK = "\x02turn\x02"
"""Stands where the user's words go while a template is taken apart."""
_USER_TOP_K = 64
_ANSWER_TOP_K = 128
"""Keeps sampling cheap; what lies below is hardly ever drawn."""
_MAX_ANSWER_TOKENS = 512
_SECOND_TURN_SHARE = 0.35
_MAX_FOLLOW_UP_TOKENS = 40
_FOLLOW_UP_MARGIN = 64
"""More than the template and an opening of a second turn take, and enough for a short answer."""
_MIN_ANSWER_TOKENS = 4
_LOOP_WINDOW = 160
"""An answer whose last tokens are all one short pattern is cut. Small models often fall into loops and a head has to
learn to follow them, but after so many tokens one teaches nothing more."""
_LOOP_PERIODS = range(1, 13)


@dataclass(slots=True)
class _Draft:
    """A conversation that is being written."""

    index: int
    assignment: Assignment
    seed: int
    turns: list[tuple[str, str]] = field(default_factory=list)
    """Finished turns, (role, text)."""
    prompt: list[int] = field(default_factory=list)
    """Tokens before those that are being written."""
    written: list[int] = field(default_factory=list)
    answers: list[tuple[int, int]] = field(default_factory=list)
    is_answering: bool = False

    @property
    def follow_up(self) -> str:
        """How the user's second turn begins."""
        return random.Random(f"follow-up/{self.seed}").choice(FOLLOW_UPS)


class Generator:
    """Drives an engine that nobody else uses."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, settings: GenerationSettings) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._settings = settings
        self._max_context = min(settings.max_context, engine.model.config.max_position)
        self._running: dict[RequestId, _Draft] = {}
        self._next_request = 0

    def run(self, corpus: Corpus, progress: Callable[[int, int], None]) -> None:
        """Write conversations until there are enough answer tokens or the time is over.

        Args:
            corpus: Where they go; those that it holds already count and are not written again.
            progress: Called with (answer tokens there are, answer tokens wanted) now and then.
        """
        settings = self._settings
        ends_at = time.monotonic() + settings.minutes * 60
        num_tokens = corpus.num_answer_tokens
        done = {conversation.index for conversation in corpus.conversations}
        indices = (index for index in _count() if index not in done)
        while num_tokens < settings.num_tokens and time.monotonic() < ends_at:
            while len(self._running) < settings.num_streams:
                self._begin(next(indices))
            for output in self._engine.step():
                conversation = self._take(output)
                if conversation is not None:
                    corpus.append(conversation)
                    num_tokens += conversation.num_answer_tokens
                    progress(num_tokens, settings.num_tokens)
        self._engine.remove(list(self._running))
        self._running.clear()

    def _begin(self, index: int) -> None:
        draft = _Draft(index, assign(self._settings.seed, index), self._settings.seed * 1_000_003 + index)
        if self._tokenizer.has_chat_template:
            self._write_user_turn(draft)
        else:
            draft.prompt = self._tokenizer.encode(draft.assignment.opening) or [0]
            self._write_answer(draft)

    def _write_user_turn(self, draft: _Draft) -> None:
        assignment = draft.assignment
        if draft.turns:
            messages, opening = [*draft.turns, ("user", _MARK)], draft.follow_up
        else:
            messages, opening = [("system", assignment.system), ("user", _MARK)], assignment.opening
        text = self._tokenizer.render_chat(messages, add_generation_prompt=False).partition(_MARK)[0]
        draft.is_answering = False
        draft.prompt = self._tokenizer.encode(text + opening, add_special_tokens=False)
        params = SamplingParams(
            max_tokens=_MAX_FOLLOW_UP_TOKENS if draft.turns else assignment.kind.max_user_tokens,
            temperature=assignment.kind.user_temperature,
            top_k=_USER_TOP_K,
            top_p=0.95,
            seed=draft.seed,
        )
        self._submit(draft, params)

    def _write_answer(self, draft: _Draft) -> None:
        draft.is_answering = True
        draw = random.Random(f"answer/{draft.seed}")
        is_greedy = draw.random() < self._settings.greedy_share
        params = SamplingParams(
            max_tokens=max(1, min(_MAX_ANSWER_TOKENS, self._max_context - len(draft.prompt))),
            temperature=0.0 if is_greedy else draw.uniform(0.7, 1.0),
            top_k=0 if is_greedy else _ANSWER_TOP_K,
            seed=draft.seed + len(draft.answers),
        )
        self._submit(draft, params)

    def _submit(self, draft: _Draft, params: SamplingParams) -> None:
        self._next_request += 1
        request_id = RequestId(self._next_request)
        draft.written = []
        self._running[request_id] = draft
        self._engine.add(EngineRequest(request_id, tuple(draft.prompt), params, len(draft.prompt)))

    def _take(self, output: SequenceOutput) -> Conversation | None:
        """Take one step's tokens of one request; returns a conversation that ended with them."""
        draft = self._running[output.request_id]
        draft.written += output.token_ids
        if output.error is not None:
            raise output.error
        is_over = output.finish_reason is not None
        if not is_over and is_looping(draft.written):
            self._engine.remove([output.request_id])
            is_over = True
        if not is_over:
            return None
        del self._running[output.request_id]
        return self._end_answer(draft) if draft.is_answering else self._end_user_turn(draft)

    def _end_user_turn(self, draft: _Draft) -> Conversation | None:
        assignment = draft.assignment
        text = self._tokenizer.decode(draft.written).rstrip()
        text = draft.follow_up + text if draft.turns else assignment.opening + text + assignment.ending
        messages = [*draft.turns, ("user", text)]
        prompt = self._tokenizer.encode_chat(messages)
        if not text.strip() or len(prompt) + _MIN_ANSWER_TOKENS > self._max_context:
            return self._conversation(draft)
        if draft.turns and prompt[: len(draft.prompt) - 1] != draft.prompt[:-1]:
            # The template wrote the earlier turns differently this time, so the answers' places no longer hold.
            return self._conversation(draft)
        draft.turns, draft.prompt = messages, prompt
        self._write_answer(draft)
        return None

    def _end_answer(self, draft: _Draft) -> Conversation | None:
        start = len(draft.prompt)
        draft.prompt = [*draft.prompt, *draft.written][: self._max_context]
        draft.answers.append((start, len(draft.prompt)))
        draw = random.Random(f"second/{draft.seed}")
        goes_on = (
            self._tokenizer.has_chat_template
            and len(draft.answers) == 1
            and draw.random() < _SECOND_TURN_SHARE
            and draft.written[-1] in self._tokenizer.eos_token_ids
            and len(draft.prompt) + _MAX_FOLLOW_UP_TOKENS + _FOLLOW_UP_MARGIN <= self._max_context
        )
        if not goes_on:
            return self._conversation(draft)
        finished = _Draft(draft.index, draft.assignment, draft.seed, answers=list(draft.answers), prompt=draft.prompt)
        draft.turns.append(("assistant", self._tokenizer.decode(draft.written)))
        self._write_user_turn(draft)
        if draft.prompt[: len(finished.prompt)] != finished.prompt:
            # Encoding the answer's text gave other tokens than the model wrote: keep what it wrote.
            request_id = next(each for each, other in self._running.items() if other is draft)
            del self._running[request_id]
            self._engine.remove([request_id])
            return self._conversation(finished)
        return None

    def _conversation(self, draft: _Draft) -> Conversation | None:
        if not draft.answers or draft.answers[-1][1] - draft.answers[0][0] < _MIN_ANSWER_TOKENS:
            return None
        end = draft.answers[-1][1]
        return Conversation(draft.index, draft.assignment.kind.name, tuple(draft.prompt[:end]), tuple(draft.answers))


def is_looping(token_ids: Sequence[int]) -> bool:
    """Whether the last tokens are one short pattern over and over."""
    if len(token_ids) < _LOOP_WINDOW:
        return False
    tail = token_ids[-_LOOP_WINDOW:]
    return any(tail[period:] == tail[:-period] for period in _LOOP_PERIODS)


def _count() -> Iterator[int]:
    index = 0
    while True:
        yield index
        index += 1
