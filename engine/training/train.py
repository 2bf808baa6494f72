"""The training loop: batches of conversations, several draft steps each, evaluations, checkpoints.

A run can be stopped at any time and goes on from its last checkpoint: the head's weights and the optimizer's state are
in `state.safetensors` in the work folder, the history in `history.json`. Order and noise follow from the seed.
"""

import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.training.evaluate import NUM_POSITIONS, Evaluator, HeldOut
from engine.training.features import Features
from engine.training.head import DraftHead, HeadBatch
from engine.training.loss import Teaching, head_loss
from engine.training.optimizer import HeadOptimizer
from engine.training.settings import TrainingSettings

_STATE, _HISTORY = "state.safetensors", "history.json"
_MAX_GRADIENT_NORM = 1.0
_WARM_UP = 0.03
_LAST_RATE = 0.02
"""Share of the peak learning rate at the end."""
_STEP_WEIGHT = 0.8
"""How much less each further draft step counts: it matters only when those before were right."""
_RAMP = (0.15, 0.3, 0.5, 0.7)
"""Progress at which a second draft step is trained too, a third and so on: the first is what all others rest on."""


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """One evaluation."""

    step: int
    minutes: float
    loss: float
    """Mean of the first draft step's cross entropy since the entry before."""
    acceptance: tuple[float, ...]
    accepted_drafts: tuple[float, ...]
    """With 1, 2, ... drafts."""
    acceptance_by_kind: dict[str, float]


class Trainer:
    """One run in one work folder."""

    def __init__(
        self,
        head: DraftHead,
        features: Features,
        settings: TrainingSettings,
        folder: Path,
        answer_tokens: Sequence[int],
    ) -> None:
        """Prepare a run, going on from the folder's state when there is one.

        Args:
            head: Initialised.
            features: What it learns from.
            settings: The run's.
            folder: The work folder.
            answer_tokens: Answer tokens of each conversation in `features`.
        """
        self._head = head
        self._features = features
        self._settings = settings
        self._folder = folder
        self._answer_tokens = answer_tokens
        self._dtype = product_dtype()
        self._output_rows = head.output_rows.to(self._dtype)
        self._optimizer = HeadOptimizer(
            head.weights.items(), settings.learning_rate, settings.weight_decay, self._dtype
        )
        self.history: list[HistoryEntry] = []
        self.num_steps = 0
        self._minutes_before = 0.0
        self._resume()

    def run(
        self,
        training: Sequence[int],
        evaluator: Evaluator,
        on_best: Callable[[HistoryEntry], None],
        progress: Callable[[float, str], None],
    ) -> None:
        """Train to the end of the run.

        Args:
            training: Numbers of the conversations to learn from.
            evaluator: Over the others.
            on_best: Called when an evaluation beats all before it.
            progress: Called with (share of the run that is done, one line) after each step.
        """
        started = last_entry = time.monotonic()
        losses: list[float] = []
        batches = self._batches(training)
        for _ in range(self.num_steps):
            next(batches)
        while True:
            minutes = self._minutes_before + (time.monotonic() - started) / 60
            share = self._share(minutes)
            is_over = share >= 1.0
            is_due = (time.monotonic() - last_entry) / 60 >= self._settings.checkpoint_minutes
            if losses and (is_over or is_due):
                self._record(evaluator.evaluate(self._head), minutes, losses, on_best)
                losses.clear()
                last_entry = time.monotonic()
            if is_over:
                return
            losses.append(self._step(next(batches), share))
            self.num_steps += 1
            progress(share, f"step {self.num_steps}, loss {losses[-1]:.3f}")

    def _share(self, minutes: float) -> float:
        settings = self._settings
        return minutes / settings.minutes if settings.num_steps is None else self.num_steps / settings.num_steps

    def _step(self, numbers: Sequence[int], share: float) -> float:
        batch, teaching = self._features.batch(numbers), self._features.teaching(numbers)
        num_draft_steps = min(self._settings.num_draft_steps, 1 + sum(share >= each for each in _RAMP))
        losses = self._losses(batch, teaching, num_draft_steps)
        self._optimizer.zero_grad()
        sum(losses[1:], losses[0]).backward()
        torch.nn.utils.clip_grad_norm_(self._head.parameters(), _MAX_GRADIENT_NORM)
        self._optimizer.step(rate_factor(share))
        return float(losses[0].detach())

    def _losses(self, batch: HeadBatch, teaching: Teaching, num_draft_steps: int) -> list[Tensor]:
        """The draft steps' mean losses, each with its weight."""
        losses: list[Tensor] = []
        place = torch.full((len(batch.token_ids),), -1)
        for number, step in enumerate(self._head.unroll(batch, num_draft_steps, self._dtype)):
            if number == 0:
                place[step.rows] = torch.arange(len(step.rows))
            own = teaching.select(place[step.rows])
            loss = head_loss(step.hidden, self._output_rows, own)
            losses.append(loss * (_STEP_WEIGHT**number / own.weights.sum().clamp_min(1.0)))
        return losses

    def _batches(self, training: Sequence[int]) -> Iterator[list[int]]:
        """Batches without end: every conversation once, in a new order, again and again."""
        epoch = 0
        while True:
            order = list(training)
            random.Random(f"{self._settings.seed}/{epoch}").shuffle(order)
            batch: list[int] = []
            size = 0
            for number in order:
                batch.append(number)
                size += self._answer_tokens[number]
                if size >= self._settings.batch_tokens:
                    yield batch
                    batch, size = [], 0
            if batch:
                yield batch
            epoch += 1

    def _record(
        self, held_out: HeldOut, minutes: float, losses: Sequence[float], on_best: Callable[[HistoryEntry], None]
    ) -> None:
        accepted = tuple(held_out.accepted_drafts(count + 1) for count in range(NUM_POSITIONS))
        entry = HistoryEntry(
            self.num_steps,
            minutes,
            sum(losses) / len(losses),
            held_out.acceptance,
            accepted,
            held_out.acceptance_by_kind,
        )
        is_best = all(accepted[-1] > other.accepted_drafts[-1] for other in self.history)
        self.history.append(entry)
        self._save()
        if is_best:
            on_best(entry)

    def _save(self) -> None:
        tensors = {f"weight.{name}": weight.detach() for name, weight in self._head.weights.items()}
        tensors |= self._optimizer.state()
        partial = self._folder / f"{_STATE}.partial"
        save_file(tensors, partial)
        partial.replace(self._folder / _STATE)
        entries = [asdict(entry) for entry in self.history]
        (self._folder / _HISTORY).write_text(json.dumps(entries))

    def _resume(self) -> None:
        if not (self._folder / _STATE).is_file() or not (self._folder / _HISTORY).is_file():
            return
        for entry in json.loads((self._folder / _HISTORY).read_text()):
            entry["acceptance"], entry["accepted_drafts"] = tuple(entry["acceptance"]), tuple(entry["accepted_drafts"])
            self.history.append(HistoryEntry(**entry))
        self.num_steps, self._minutes_before = self.history[-1].step, self.history[-1].minutes
        tensors = load_file(self._folder / _STATE)
        with torch.no_grad():
            for name, weight in self._head.weights.items():
                weight.copy_(tensors[f"weight.{name}"])
        self._optimizer.load_state(tensors)


def product_dtype() -> torch.dtype:
    """Return the type in which this processor multiplies matrices fastest; weights and sums stay fp32."""
    known = torch.cpu.get_capabilities()
    return torch.bfloat16 if known.get("avx512_bf16") or known.get("amx_bf16") else torch.float32


def rate_factor(share: float) -> float:
    """Return the learning rate at a share of the run, relative to its peak."""
    if share < _WARM_UP:
        return max(share / _WARM_UP, 0.01)
    along = min(1.0, (share - _WARM_UP) / (1 - _WARM_UP))
    return _LAST_RATE + (1 - _LAST_RATE) * 0.5 * (1 + math.cos(math.pi * along))
