"""Parameters from a GGUF file, dequantized to fp32. Implements `weights.WeightReader`.

Files of the `llama` architecture store q and k with the two halves of each head interleaved, for another form of
rotation; rows are put back in order here, weights and biases alike.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.model.files.gguf_config import EMBEDDING_TENSOR, OUTPUT_TENSOR
from engine.model.files.gguf_file import GgufFile
from engine.model.weights import EMBEDDING, FINAL_NORM, LM_HEAD

_ROPE_FACTORS = "rope_freqs.weight"
INTERLEAVED_ARCHITECTURES = ("llama", "mistral")
"""Architectures whose files store the two halves of each q and k head interleaved."""
INTERLEAVED_PARAMETERS = ("q_proj.weight", "k_proj.weight")
"""How the names of such matrices end."""
_ENDS = {EMBEDDING: EMBEDDING_TENSOR, FINAL_NORM: "output_norm.weight", LM_HEAD: OUTPUT_TENSOR}
_LAYER_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER_PARAMETER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


class GgufWeights:
    """The tensors of an open file."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        """Wrap an open file; `config` is the one read from it."""
        self._file = file
        self._heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
        self._is_interleaved = config.architecture in INTERLEAVED_ARCHITECTURES

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """See `WeightReader.shapes`."""
        return {name: tensor.shape for name, tensor in self._file.tensors.items() if name != _ROPE_FACTORS}

    def stored_name(self, parameter: str) -> str:
        """See `WeightReader.stored_name`."""
        if (end := _ENDS.get(parameter)) is not None:
            return end
        match = _LAYER_PARAMETER.fullmatch(parameter)
        if match is None:
            raise KeyError(parameter)
        layer, part, suffix = match.groups()
        return f"blk.{layer}.{_LAYER_PARTS[part]}.{suffix}"

    def read(self, parameter: str) -> Tensor:
        """See `WeightReader.read`."""
        values = self._dequantized(parameter)
        num_heads = self._heads.get(parameter.split(".")[-2])
        if num_heads is None or not self._is_interleaved:
            return values
        # Stored row order within a head: 0, half, 1, half + 1, ...
        rows = values.view(num_heads, -1, 2, *values.shape[1:])
        return rows.transpose(1, 2).reshape(values.shape)

    def read_first_row(self, parameter: str) -> Tensor:
        """See `WeightReader.read_first_row`. The first row of a head stays first when rows are interleaved."""
        if len(self._file.tensors[self.stored_name(parameter)].shape) == 1:
            return self.read(parameter)
        return self._dequantized(parameter, num_rows=1)[0]

    def rope_factors(self) -> Tensor | None:
        """See `WeightReader.rope_factors`."""
        if _ROPE_FACTORS not in self._file.tensors:
            return None
        return torch.from_numpy(self._file.dequantize(_ROPE_FACTORS).copy())

    def _dequantized(self, parameter: str, num_rows: int | None = None) -> Tensor:
        values = self._file.dequantize(self.stored_name(parameter), num_rows)
        # Tensors stored as fp32 come as read-only views of the file, which torch has no notion of.
        return torch.from_numpy(values if values.flags.writeable else values.copy())
