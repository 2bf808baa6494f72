"""The same model in other files, for systems that want them: Q4_0 for llama.cpp, a bf16 folder for those without GGUF.

Made once and kept in the cache folder. Nothing is downloaded.
"""

import json
from pathlib import Path
from typing import Final

import gguf
import torch
from safetensors.torch import save_file

from engine.config import ModelConfig, RopeScaling
from engine.model.files.open import open_weights
from engine.model.weights import parameter_shapes
from kvrelay.errors import InvalidRequest
from kvrelay.text.gguf_tokenizer import load_gguf_tokenizer

_FILE_TYPE_Q4_0: Final = 2
_SKIPPED_FIELDS: Final = frozenset({"general.architecture", "general.file_type"})
"""Written by the writer itself, or changed here."""


def q4_0_file(model: Path, folder: Path) -> Path:
    """Return a copy of a GGUF file whose Q4_1 tensors are Q4_0; the others are kept as they are.

    Raises:
        InvalidRequest: The model is no GGUF file with Q4_1 tensors; names the field `model`.
    """
    target = folder / f"{model.stem}.as-Q4_0.gguf"
    if target.is_file():
        return target
    if model.suffix != ".gguf":
        raise InvalidRequest("model", "only a GGUF file can be requantized to Q4_0")
    reader = gguf.GGUFReader(model)
    if not any(tensor.tensor_type == gguf.GGMLQuantizationType.Q4_1 for tensor in reader.tensors):
        raise InvalidRequest("model", "has no Q4_1 tensors to requantize")
    folder.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".part")
    writer = gguf.GGUFWriter(partial, reader.fields["general.architecture"].contents())
    writer.add_file_type(_FILE_TYPE_Q4_0)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in _SKIPPED_FIELDS:
            sub_type = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type)
    for tensor in reader.tensors:
        data, kind = tensor.data, tensor.tensor_type
        if kind == gguf.GGMLQuantizationType.Q4_1:
            kind = gguf.GGMLQuantizationType.Q4_0
            data = gguf.quants.quantize(gguf.quants.dequantize(data, tensor.tensor_type), kind)
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(target)
    return target


def bf16_folder(model: Path, folder: Path) -> Path:
    """Return a GGUF model as a Hugging Face folder in bf16, for systems that read no GGUF; a folder stays what it is.

    Raises:
        InvalidRequest: The model is of another family than Llama; names the field `model`.
    """
    if model.is_dir():
        return model
    target = folder / f"{model.stem}-bf16"
    if (target / "config.json").is_file():
        return target
    config, reader = open_weights(str(model))
    if config.architecture != "llama" or config.rope.scaling is not RopeScaling.NONE:
        raise InvalidRequest("model", "only a Llama without rope scaling can be written as a Hugging Face folder")
    target.mkdir(parents=True, exist_ok=True)
    tensors = {name: reader.read(name).to(torch.bfloat16).contiguous() for name in parameter_shapes(config)}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    parts = load_gguf_tokenizer(model)
    parts.backend.save(str(target / "tokenizer.json"))
    (target / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}), encoding="utf-8"
    )
    # Last: a folder that has it is whole.
    (target / "config.json").write_text(json.dumps(_hf_config(config), indent=2), encoding="utf-8")
    return target


def _hf_config(config: ModelConfig) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": "bfloat16",
        "bos_token_id": config.bos_token_id,
        "eos_token_id": sorted(config.eos_token_ids),
    }
