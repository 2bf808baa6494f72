"""Checks that a `ModelConfig` read from a file describes a model that can be computed at all. Torch-free."""

from engine.config import ModelConfig
from engine.errors import InvalidRequest

_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "rms_norm_eps",
    "max_position",
)


def check_model_config(config: ModelConfig, where: str) -> ModelConfig:
    """Return `config`, or say what in it cannot be.

    Args:
        config: As read.
        where: File to name in the error.

    Raises:
        InvalidRequest: Names the field `model`.
    """
    for name in _POSITIVE:
        if not getattr(config, name) > 0:
            raise InvalidRequest("model", f"{where}: {name} must be positive, not {getattr(config, name)}")
    if config.num_heads % config.num_kv_heads:
        raise InvalidRequest(
            "model", f"{where}: {config.num_heads} heads cannot share {config.num_kv_heads} KV heads evenly"
        )
    if config.head_dim % 2:
        raise InvalidRequest("model", f"{where}: head_dim {config.head_dim} is odd, rotary embedding needs pairs")
    if config.sliding_window is not None and config.sliding_window < 1:
        raise InvalidRequest("model", f"{where}: sliding_window must be positive, not {config.sliding_window}")
    rope = config.rope
    if not (rope.theta > 0 and rope.factor > 0 and rope.high_freq_factor > 0 and rope.low_freq_factor > 0):
        raise InvalidRequest("model", f"{where}: rotary settings must be positive: {rope}")
    if rope.high_freq_factor <= rope.low_freq_factor:
        raise InvalidRequest("model", f"{where}: high_freq_factor must be above low_freq_factor: {rope}")
    return config
