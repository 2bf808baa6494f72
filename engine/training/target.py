"""The target's parts that a head shares: embedding, output rows, final norm, rotary frequencies; fp32 on the CPU."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from engine.config import ModelConfig
from engine.model.files.open import open_weights
from engine.model.rope import inverse_frequencies
from engine.model.weights import EMBEDDING, FINAL_NORM, LM_HEAD, rope_factors


@dataclass(frozen=True, slots=True)
class TargetParts:
    """What the head's mathematics needs of its target."""

    config: ModelConfig
    embedding: Tensor
    """[vocab_size, hidden_size]."""
    lm_head: Tensor
    """[vocab_size, hidden_size]."""
    final_norm: Tensor
    """[hidden_size]."""
    inverse_frequencies: Tensor
    """[head_dim / 2]."""

    def output_features(self, hidden: Tensor) -> Tensor:
        """What the output rows are multiplied with: the last layer's output [..., hidden_size], normalised."""
        return functional.rms_norm(hidden, self.final_norm.shape, self.final_norm, self.config.rms_norm_eps)


def load_target_parts(source: str) -> TargetParts:
    """Read them from a model's files.

    Raises:
        InvalidRequest: As `engine.model.files.open.open_weights`.
    """
    config, reader = open_weights(source)
    embedding = reader.read(EMBEDDING).clone()
    return TargetParts(
        config,
        embedding,
        embedding if config.tie_embeddings else reader.read(LM_HEAD).clone(),
        reader.read(FINAL_NORM).clone(),
        inverse_frequencies(config.rope, config.head_dim, rope_factors(config, reader)),
    )
