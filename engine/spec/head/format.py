"""The file of a draft head: names, shapes, metadata, and the checks when one is read. Knows nothing of running it.

A head is one decoder layer over the target's hidden states (EAGLE-3, arXiv 2503.01840) with an output over a part of
the vocabulary (FR-Spec, arXiv 2502.14856); embedding and output rows are the target's own and not in the file. With
f the fused features, x the layer's input, y behind attention and g behind the MLP, row i predicts token i + 1:

    f_i = fuse . concat(tapped hidden states of position i), f_-1 = 0
    e_i = rmsnorm(embedding of token i), e_-1 = e_-2 = 0
    x_i = concat(e_i, rmsnorm(f_(i-1)))
    y_i = f_(i-1) + o_proj . attention(q_i, k_0..i, v_proj x_0..i)
    g_i = y_i + down_proj . (silu(gate_proj n) * up_proj n), n = rmsnorm(y_i)
    logits_i = (target's output rows at vocab_ids) . rmsnorm(g_i)

Heads, rotation and intermediate size are the target's. Of a target with two or more KV heads, the first one and its
query heads find what followed the newest two tokens before (an induction head, arXiv 2209.11895): they see tokens
alone and are not rotated. The others are as in any layer:

    q_i = concat(find_query concat(e_i, e_(i-1)), rotated q_proj x_i)
    k_i = concat(find_key concat(e_(i-1), e_(i-2)), rotated k_proj x_i)

When the head drafts on from its own tokens, g stands for f.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from engine.config import ModelConfig
from kvrelay.errors import InvalidRequest

FORMAT: Final = "kvrelay-draft-head-2"
VOCAB_IDS: Final = "vocab_ids"
FUSE: Final = "fuse.weight"
EMBEDDING_NORM: Final = "embedding_norm.weight"
FEATURE_NORM: Final = "feature_norm.weight"
FIND_QUERY: Final = "find_query.weight"
FIND_KEY: Final = "find_key.weight"
Q_PROJ: Final = "q_proj.weight"
K_PROJ: Final = "k_proj.weight"
V_PROJ: Final = "v_proj.weight"
O_PROJ: Final = "o_proj.weight"
MLP_NORM: Final = "mlp_norm.weight"
GATE_PROJ: Final = "gate_proj.weight"
UP_PROJ: Final = "up_proj.weight"
DOWN_PROJ: Final = "down_proj.weight"
OUTPUT_NORM: Final = "output_norm.weight"

_FIELD: Final = "draft_head"


@dataclass(frozen=True, slots=True)
class DraftHeadFile:
    """A head as it is stored."""

    tap_layers: tuple[int, ...]
    """Indices of the target's layers whose output is tapped, ascending."""
    vocab_ids: Tensor
    """[num_vocab_ids] int32, ascending: the tokens that the head can propose."""
    weights: Mapping[str, Tensor]
    """The other tensors by name, fp16 in the file and after reading."""
    rms_norm_eps: float
    target_fingerprint: str = ""
    """Fingerprint of the model that the head was trained on; empty = not said. For information: other quantizations of
    the same model are served as well."""


def num_finding_kv_heads(config: ModelConfig) -> int:
    """How many of a target's KV heads a head uses to find, the first ones."""
    return 1 if config.num_kv_heads > 1 else 0


def weight_shapes(config: ModelConfig, num_taps: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a head's tensors, `vocab_ids` aside, for a target of this shape."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    find_kv = num_finding_kv_heads(config) * config.head_dim
    find_query = find_kv * (config.num_heads // config.num_kv_heads)
    finding = {FIND_QUERY: (find_query, 2 * hidden), FIND_KEY: (find_kv, 2 * hidden)}
    return (finding if find_kv else {}) | {
        FUSE: (hidden, num_taps * hidden),
        EMBEDDING_NORM: (hidden,),
        FEATURE_NORM: (hidden,),
        Q_PROJ: (query - find_query, 2 * hidden),
        K_PROJ: (kv - find_kv, 2 * hidden),
        V_PROJ: (kv, 2 * hidden),
        O_PROJ: (hidden, query),
        MLP_NORM: (hidden,),
        GATE_PROJ: (inner, hidden),
        UP_PROJ: (inner, hidden),
        DOWN_PROJ: (hidden, inner),
        OUTPUT_NORM: (hidden,),
    }


def save_head(path: Path, head: DraftHeadFile, config: ModelConfig) -> None:
    """Write a head, replacing the file at once so that nobody reads half of it.

    Args:
        path: Where to; its folder exists.
        head: Its weights may be of any float type.
        config: The target.

    Raises:
        InvalidRequest: The head does not fit the target, or the file cannot be written; names `out`.
    """
    _check("out", path, head, config)
    tensors = {name: weight.detach().to(torch.float16).contiguous() for name, weight in head.weights.items()}
    too_large = [name for name, weight in tensors.items() if not bool(weight.isfinite().all())]
    if too_large:
        raise InvalidRequest("out", f"{too_large[0]} has values that fp16 cannot hold")
    tensors[VOCAB_IDS] = head.vocab_ids.to(torch.int32).contiguous()
    metadata = {
        "format": FORMAT,
        "tap_layers": ",".join(map(str, head.tap_layers)),
        "target_fingerprint": head.target_fingerprint,
        "target_vocab_size": str(config.vocab_size),
        "target_hidden_size": str(config.hidden_size),
        "rms_norm_eps": repr(head.rms_norm_eps),
    }
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_bytes(save(tensors, metadata))
        partial.replace(path)
    except OSError as error:
        raise InvalidRequest("out", f"{path} cannot be written: {error.strerror or error}") from error


def load_head(path: Path, config: ModelConfig, field: str = _FIELD) -> DraftHeadFile:
    """Read a head for a target.

    Args:
        path: The .safetensors file.
        config: The target, which the head must fit.
        field: What errors name.

    Raises:
        InvalidRequest: There is no such file, it is no draft head, or one for a model of another shape; names `field`.
    """
    if not path.is_file():
        raise InvalidRequest(field, f"no such file: {path}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise InvalidRequest(field, f"{path} cannot be read: {error}") from error
    if metadata.get("format") != FORMAT:
        found = json.dumps(metadata.get("format"))
        raise InvalidRequest(field, f"{path} is not a draft head: its format is {found} instead of {FORMAT}")
    expected = {"target_vocab_size": config.vocab_size, "target_hidden_size": config.hidden_size}
    for name, number in expected.items():
        if metadata.get(name) != str(number):
            raise InvalidRequest(field, f"{path} is for another model: {name} is {metadata.get(name)}, not {number}")
    vocab_ids = tensors.pop(VOCAB_IDS, None)
    if vocab_ids is None:
        raise InvalidRequest(field, f"{path}: tensor {VOCAB_IDS} is missing")
    try:
        tap_layers = tuple(int(layer) for layer in metadata["tap_layers"].split(","))
        rms_norm_eps = float(metadata["rms_norm_eps"])
    except (KeyError, ValueError) as error:
        raise InvalidRequest(field, f"{path}: its metadata is damaged: {error}") from error
    head = DraftHeadFile(tap_layers, vocab_ids, tensors, rms_norm_eps, metadata.get("target_fingerprint", ""))
    _check(field, path, head, config)
    return head


def _check(field: str, path: Path, head: DraftHeadFile, config: ModelConfig) -> None:
    taps = head.tap_layers
    if not taps or list(taps) != sorted(set(taps)) or taps[0] < 0 or taps[-1] >= config.num_layers:
        raise InvalidRequest(
            field, f"{path}: tap_layers {list(taps)} are not ascending layers of a model with {config.num_layers}"
        )
    ids = head.vocab_ids
    if ids.dim() != 1 or ids.is_floating_point() or len(ids) == 0:
        raise InvalidRequest(field, f"{path}: {VOCAB_IDS} is not a list of token ids")
    if bool((ids[1:] <= ids[:-1]).any()) or int(ids[0]) < 0 or int(ids[-1]) >= config.vocab_size:
        raise InvalidRequest(field, f"{path}: {VOCAB_IDS} are not ascending ids of a vocabulary of {config.vocab_size}")
    shapes = weight_shapes(config, len(taps))
    for name, shape in shapes.items():
        weight = head.weights.get(name)
        if weight is None:
            raise InvalidRequest(field, f"{path}: tensor {name} is missing")
        if tuple(weight.shape) != shape or not weight.is_floating_point():
            raise InvalidRequest(
                field, f"{path}: tensor {name} is {weight.dtype} {list(weight.shape)}, not floats {list(shape)}"
            )
    if unused := sorted(set(head.weights) - set(shapes)):
        raise InvalidRequest(field, f"{path}: tensor {unused[0]} has no use in a draft head")
