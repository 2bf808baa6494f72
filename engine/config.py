"""Frozen settings of the engine, checked once at start-up. Torch-free: dtypes are named by their strings."""

from dataclasses import dataclass
from enum import StrEnum

from kvrelay.errors import InvalidRequest


class KvDtype(StrEnum):
    """Element type of the KV cache."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    INT8 = "int8"
    FP8 = "fp8"
    """e4m3; only GPUs compute with it, every worker can import it."""

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return {KvDtype.FP32: 4, KvDtype.BF16: 2, KvDtype.FP16: 2, KvDtype.INT8: 1, KvDtype.FP8: 1}[self]

    @property
    def has_scales(self) -> bool:
        """Whether elements come with one fp32 scale per (K or V, head, token)."""
        return self in (KvDtype.INT8, KvDtype.FP8)


def default_kv_dtype(*, is_native: bool) -> KvDtype:
    """Return the element type of the KV cache on the CPU where none is asked for."""
    # Native attention over int8 works in integers: quickest, at little cost (ADR 9). The torch path is the exact one.
    return KvDtype.INT8 if is_native else KvDtype.FP32


class RopeScaling(StrEnum):
    """How rotary frequencies are stretched beyond the trained context."""

    NONE = "none"
    LINEAR = "linear"
    LLAMA3 = "llama3"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding (RoFormer, arXiv 2104.09864; Llama 3 scaling as in the Llama 3.1 release)."""

    theta: float = 10000.0
    scaling: RopeScaling = RopeScaling.NONE
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a Llama-family decoder."""

    architecture: str
    """`llama`, `mistral`, `qwen2` or `qwen3`."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    """Longest context in tokens."""
    rope: RopeConfig
    tie_embeddings: bool
    attention_bias: bool = False
    """Whether q, k and v projections have a bias (Qwen2)."""
    qk_norm: bool = False
    """Whether q and k heads are RMS-normalised before rotation (Qwen3)."""
    sliding_window: int | None = None
    """Tokens a position may look back at, itself included; None = all (Mistral v0.1 has 4096)."""
    bos_token_id: int | None = None
    eos_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Size and form of the KV cache."""

    num_blocks: int
    """Blocks in the pool."""
    block_size: int = 16
    """Tokens in a block."""
    dtype: KvDtype = KvDtype.FP32
    enable_prefix_cache: bool = True

    def __post_init__(self) -> None:
        if self.num_blocks < 1:
            raise InvalidRequest("num_blocks", f"must be at least 1, not {self.num_blocks}")
        if self.block_size not in (8, 16, 32, 64):
            raise InvalidRequest("block_size", f"must be 8, 16, 32 or 64, not {self.block_size}")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step."""

    max_num_seqs: int = 64
    """Most sequences in one step; those reserved for a hand-off count. At most `max_num_batched_tokens`."""
    max_num_batched_tokens: int = 512
    """Token budget of a step: decodes first, then prefill chunks, then drafts."""
    max_waiting: int = 1024
    """Most sequences waiting for their first step; beyond it requests are shed."""

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_waiting"):
            if getattr(self, name) < 1:
                raise InvalidRequest(name, f"must be at least 1, not {getattr(self, name)}")
        if self.max_num_seqs > self.max_num_batched_tokens:
            # Sequences beyond the budget would get no token as long as the others run.
            raise InvalidRequest(
                "max_num_seqs",
                f"must be at most max_num_batched_tokens, {self.max_num_batched_tokens}, so that each sequence gets a "
                f"token in every step; not {self.max_num_seqs}",
            )
