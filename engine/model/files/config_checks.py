"""Checks that a `ModelConfig` read from a file describes a model that can be computed at all. Torch-free."""

import math
from dataclasses import replace

import structlog

from engine.config import ModelConfig
from kvrelay.errors import InvalidRequest, shown

_log = structlog.get_logger(__name__)

_COUNTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_position",
)
_INT32_END = 1 << 31
"""Kernels count in int32."""


def check_model_config(config: ModelConfig, where: str) -> ModelConfig:
    """Return `config`, or say what in it cannot be.

    Args:
        config: As read. Ids of ends that the model cannot produce are left out of what is returned.
        where: File to name in the error.

    Raises:
        InvalidRequest: Names the field `model`.
    """
    for name in _COUNTS:
        count = getattr(config, name)
        if not 0 < count < _INT32_END:
            raise InvalidRequest("model", f"{where}: {name} must be positive and below 2^31, not {shown(count)}")
    if not 0 < config.rms_norm_eps < math.inf:
        raise InvalidRequest("model", f"{where}: rms_norm_eps must be positive and finite, not {config.rms_norm_eps}")
    if config.num_heads % config.num_kv_heads:
        raise InvalidRequest(
            "model", f"{where}: {config.num_heads} heads cannot share {config.num_kv_heads} KV heads evenly"
        )
    if config.head_dim % 2:
        raise InvalidRequest("model", f"{where}: head_dim {config.head_dim} is odd, rotary embedding needs pairs")
    if config.sliding_window is not None and not 0 < config.sliding_window < _INT32_END:
        raise InvalidRequest(
            "model", f"{where}: sliding_window must be positive and below 2^31, not {shown(config.sliding_window)}"
        )
    rope = config.rope
    numbers = (rope.theta, rope.factor, rope.high_freq_factor, rope.low_freq_factor, rope.original_max_position)
    if not all(0 < number < math.inf for number in numbers):
        raise InvalidRequest("model", f"{where}: rotary settings must be positive and finite: {shown(rope)}")
    if rope.high_freq_factor <= rope.low_freq_factor:
        raise InvalidRequest("model", f"{where}: high_freq_factor must be above low_freq_factor: {rope}")
    return replace(config, eos_token_ids=_producible(config, where))


def check_layer_count(num_layers: int, num_tensors: int, where: str) -> None:
    """Refuse more layers than the files have tensors for, before anything is built for each of them.

    Args:
        num_layers: As the config has it.
        num_tensors: In all files of the model.
        where: File and name of the setting, for the error.

    Raises:
        InvalidRequest: Names the field `model`.
    """
    # A layer has nine at least; which one is missing is said where each is looked up.
    if num_layers > num_tensors:
        raise InvalidRequest("model", f"{where} is {shown(num_layers)}, but there are {num_tensors} tensors only")


def _producible(config: ModelConfig, where: str) -> frozenset[int]:
    ids = frozenset(token_id for token_id in config.eos_token_ids if token_id < config.vocab_size)
    if ids != config.eos_token_ids:
        _log.warning(
            "model.end_tokens_beyond_vocabulary",
            file=where,
            vocab_size=config.vocab_size,
            token_ids=[shown(token_id) for token_id in config.eos_token_ids - ids],
        )
    return ids
