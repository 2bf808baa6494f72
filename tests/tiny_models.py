"""Tiny random models on disk: what transformers writes for each family, and the same weights as GGUF.

For tests that need a real checkpoint without a download. The weights are drawn so that logits are not flat: greedy
tokens then survive rounding, and a wrong operation shows. transformers is imported only when a model is written.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import gguf
import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open

_Array = npt.NDArray[np.float32]

_BASE_FIELDS: dict[str, object] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True, slots=True)
class TinyFamily:
    """One kind of model to write."""

    architecture: Literal["Llama", "Mistral", "Qwen2", "Qwen3"]
    fields: dict[str, object] = field(default_factory=dict)
    """Config fields that differ from the common ones."""
    rope_parameters: dict[str, object] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})


TINY_FAMILIES = {
    "llama": TinyFamily("Llama", {"vocab_size": 257}),
    "llama_tied": TinyFamily("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 4, "num_hidden_layers": 2}),
    "llama_linear": TinyFamily(
        "Llama", {"num_key_value_heads": 1}, {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    ),
    "llama3": TinyFamily(
        "Llama",
        {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 512},
        {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "mistral": TinyFamily("Mistral", {"sliding_window": 20, "head_dim": 32, "num_hidden_layers": 2}),
    "qwen2": TinyFamily("Qwen2", {"hidden_size": 128, "num_hidden_layers": 4, "tie_word_embeddings": True}),
    "qwen3": TinyFamily("Qwen3", {"head_dim": 24, "num_attention_heads": 4, "num_key_value_heads": 2}),
}
"""Every model family that the engine serves: tied and untied, with and without grouped heads, each rope scaling."""


def write_tiny_model(
    folder: Path, family: str | TinyFamily = "llama", *, seed: int = 0, max_shard_size: str = "5GB"
) -> Path:
    """Write config.json, generation_config.json and safetensors of a random fp32 model.

    Args:
        folder: Where to write; made if it is not there.
        family: A key of `TINY_FAMILIES`, or a family of the test's own.
        seed: Of the weights.
        max_shard_size: As in transformers' `save_pretrained`; small values give several files and an index.

    Returns:
        The folder.
    """
    import transformers

    spec = TINY_FAMILIES[family] if isinstance(family, str) else family
    fields = {**_BASE_FIELDS, "pad_token_id": None, **spec.fields, "rope_parameters": spec.rope_parameters}
    config = getattr(transformers, f"{spec.architecture}Config")(**fields)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, f"{spec.architecture}ForCausalLM")(config).float().eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                _draw(name, parameter)
    model.generation_config = transformers.GenerationConfig(bos_token_id=1, eos_token_id=[2, 3])
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def _draw(name: str, parameter: torch.Tensor) -> None:
    if name.endswith("norm.weight"):
        parameter.uniform_(0.5, 1.5)
    elif name.endswith("o_proj.bias"):  # the engine has none; see the biased Llama of the GGUF tests
        parameter.zero_()
    elif name.endswith(".bias"):
        parameter.normal_(std=0.5)
    elif "embed_tokens" in name or "lm_head" in name:
        parameter.normal_(std=0.35)
    else:  # keeps activations of about the size of the input; a little more mixing than an untrained model has
        parameter.normal_(std=1.5 * parameter.shape[1] ** -0.5)


def read_tiny_model(folder: Path) -> dict[str, _Array]:
    """All tensors of a folder that `write_tiny_model` wrote, by name."""
    tensors: dict[str, _Array] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            tensors.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 - no mapping
    return tensors


def write_tiny_gguf(
    folder: Path, path: Path, quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32
) -> Path:
    """Write the model of a folder as GGUF, with the names, the order of q and k rows and the keys of llama.cpp.

    Args:
        folder: As `write_tiny_model` wrote it.
        path: The file to write.
        quantization: Of the matrices whose rows are whole blocks of it; the rest stays fp32.

    Returns:
        `path`.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    architecture = {"llama": "llama", "mistral": "llama"}.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(path, architecture)
    _add_metadata(writer, config)
    for name, values in _gguf_tensors(config, read_tiny_model(folder)):
        kind = quantization if _can_quantize(values, quantization) else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_metadata(writer: gguf.GGUFWriter, config: dict[str, object]) -> None:
    num_heads, hidden_size = int(str(config["num_attention_heads"])), int(str(config["hidden_size"]))
    head_dim = config.get("head_dim") or hidden_size // num_heads
    rope = config["rope_parameters"]
    assert isinstance(rope, dict)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden_size)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(3)
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if config["model_type"] == "mistral" and config["sliding_window"]:
        writer.add_sliding_window(config["sliding_window"])


def _gguf_tensors(config: dict[str, object], tensors: dict[str, _Array]) -> Iterator[tuple[str, _Array]]:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, int(str(config["num_hidden_layers"])))
    qwen_names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, int(str(config["num_hidden_layers"])))
    for name, values in tensors.items():
        stem, suffix = name.rsplit(".", 1)
        if name.endswith("o_proj.bias"):  # zero, see _draw
            continue
        stored = names.get_name(stem) or qwen_names.get_name(stem)
        assert stored is not None, name
        if config["model_type"] in ("llama", "mistral"):
            if stem.endswith("q_proj"):
                values = interleave_rows(values, int(str(config["num_attention_heads"])))
            elif stem.endswith("k_proj"):
                values = interleave_rows(values, int(str(config["num_key_value_heads"])))
        yield f"{stored}.{suffix}", values
    rope = config["rope_parameters"]
    assert isinstance(rope, dict)
    if rope["rope_type"] == "llama3":
        yield "rope_freqs.weight", _llama3_rope_freqs(config, rope)


def interleave_rows(values: _Array, num_heads: int) -> _Array:
    """Reorder the rows of each head from (first half, second half) to (0, half, 1, half + 1, ...)."""
    half = values.shape[0] // num_heads // 2
    return values.reshape(num_heads, 2, half, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def _llama3_rope_freqs(config: dict[str, object], rope: dict[str, object]) -> _Array:
    """The divisors of llama.cpp's converter, written down wavelength by wavelength."""
    dim = int(str(config.get("head_dim") or int(str(config["hidden_size"])) // int(str(config["num_attention_heads"]))))
    theta, factor, low, high, original = (
        float(str(rope[key]))
        for key in ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    factors = []
    for frequency in 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim):
        wavelength = 2 * np.pi / frequency
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(float(1 / ((1 - smooth) / factor + smooth)))
    return np.array(factors, dtype=np.float32)


def _can_quantize(values: _Array, quantization: gguf.GGMLQuantizationType) -> bool:
    block_elements, _ = gguf.GGML_QUANT_SIZES[quantization]
    return values.ndim > 1 and values.shape[-1] % block_elements == 0
