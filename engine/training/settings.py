"""What a training run is told. Frozen and checked once; every error names the flag of `kvrelay train-drafter`."""

from dataclasses import dataclass

from kvrelay.errors import InvalidRequest

MAX_VOCAB_SIZE = 32767
"""Places in the head's vocabulary are kept as int16."""


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """How the target writes its training text."""

    num_tokens: int = 900_000
    """Answer tokens wanted."""
    minutes: float = 20.0
    """Longest time; what is there by then is used."""
    seed: int = 1
    num_streams: int = 32
    """Conversations written at once."""
    max_context: int = 1536
    """Longest conversation in tokens."""
    greedy_share: float = 0.7
    """Share of answers that are greedy; the others are sampled at a temperature between 0.7 and 1."""
    num_threads: int = 0
    """Threads of the native kernels; 0 = as many as the machine has cores."""

    def __post_init__(self) -> None:
        for flag, value in (("tokens", self.num_tokens), ("streams", self.num_streams), ("context", self.max_context)):
            if value < 1:
                raise InvalidRequest(flag, f"must be at least 1, not {value}")
        if self.minutes <= 0:
            raise InvalidRequest("text_minutes", f"must be above 0, not {self.minutes}")
        if not 0 <= self.greedy_share <= 1:
            raise InvalidRequest("greedy_share", f"must be within [0, 1], not {self.greedy_share}")


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """How the head learns."""

    minutes: float = 50.0
    """How long, unless `num_steps` is given."""
    num_steps: int | None = None
    """Optimizer steps; None = as many as fit into `minutes`. With a number the run is reproducible from its seed."""
    seed: int = 1
    vocab_size: int = 12288
    """Tokens that the head can propose: the most frequent ones of the training text."""
    tap_layers: tuple[int, ...] | None = None
    """Layers whose output the head sees; None = after a quarter, a half and all of the layers."""
    batch_tokens: int = 2048
    """Answer tokens of an optimizer step."""
    learning_rate: float = 0.02
    """Its peak; it rises linearly at first and then falls along a cosine."""
    weight_decay: float = 0.01
    num_draft_steps: int = 5
    """Draft steps that are trained."""
    checkpoint_minutes: float = 6.0
    """Time between evaluations, each of which saves the head if it is the best so far."""

    def __post_init__(self) -> None:
        for name in ("batch_tokens", "num_draft_steps"):
            if getattr(self, name) < 1:
                raise InvalidRequest(name, f"must be at least 1, not {getattr(self, name)}")
        if self.num_steps is not None and self.num_steps < 1:
            raise InvalidRequest("steps", f"must be at least 1, not {self.num_steps}")
        if not 1 <= self.vocab_size <= MAX_VOCAB_SIZE:
            raise InvalidRequest("vocab_size", f"must be within [1, {MAX_VOCAB_SIZE}], not {self.vocab_size}")
        for name in ("minutes", "learning_rate", "checkpoint_minutes"):
            if getattr(self, name) <= 0:
                raise InvalidRequest(name, f"must be above 0, not {getattr(self, name)}")
