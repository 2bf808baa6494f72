"""The log that lies beside a head: what it was trained on, how, and with what success. Holds no paths."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from engine.training.corpus import Conversation
from engine.training.coupling import Coupling
from engine.training.head import DraftHead
from engine.training.settings import GenerationSettings, TrainingSettings
from engine.training.train import HistoryEntry
from kvrelay.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class TrainingLog:
    """What is known of a run before it begins, and where its log goes."""

    path: Path
    model_name: str
    """What users call the model."""
    head: DraftHead
    conversations: Sequence[Conversation]
    held_out: Sequence[int]
    """Places in `conversations` of those that are not trained on."""
    generation: GenerationSettings
    training: TrainingSettings
    started_from: str | None = None
    """File name of the head that the run went on from."""

    def write(self, history: Sequence[HistoryEntry], couplings: Sequence[Coupling] = ()) -> None:
        """Write what there is so far.

        Raises:
            InvalidRequest: The file cannot be written; names `out`.
        """
        config = self.head.target.config
        content = {
            "target": {
                "name": self.model_name,
                "architecture": config.architecture,
                "num_layers": config.num_layers,
                "hidden_size": config.hidden_size,
                "vocab_size": config.vocab_size,
            },
            "head": {
                "tap_layers": self.head.tap_layers,
                "num_vocab_ids": len(self.head.vocab_ids),
                "num_parameters": sum(weight.numel() for weight in self.head.parameters()),
                "started_from": self.started_from,
            },
            "generation": asdict(self.generation),
            "training": asdict(self.training),
            "text": self._text(),
            "history": [asdict(entry) for entry in history],
            "coupling": [asdict(coupling) for coupling in couplings],
        }
        try:
            self.path.write_text(json.dumps(content, indent=1) + "\n")
        except OSError as error:
            raise InvalidRequest("out", f"{self.path} cannot be written: {error.strerror or error}") from error

    def _text(self) -> dict[str, object]:
        held_out = set(self.held_out)
        learned = [each for place, each in enumerate(self.conversations) if place not in held_out]
        by_kind: Counter[str] = Counter()
        for conversation in learned:
            by_kind[conversation.kind] += conversation.num_answer_tokens
        return {
            "num_conversations": len(learned),
            "num_tokens": sum(len(each.token_ids) for each in learned),
            "num_answer_tokens": sum(by_kind.values()),
            "answer_tokens_by_kind": dict(sorted(by_kind.items())),
            "num_held_out_conversations": len(held_out),
            "num_held_out_answer_tokens": sum(self.conversations[place].num_answer_tokens for place in held_out),
        }
