"""A GGUF file's own 4-bit blocks for the device: rows of bytes, in the order in which the engine has the parameter.

Implements `cuda_weights.QuantizedBlocks`. What the blocks mean is in `engine/kernels/triton/int4_weight.py`.
"""

import numpy as np
import numpy.typing as npt

from engine.config import ModelConfig
from engine.model.files.gguf_file import GgufFile
from engine.model.files.gguf_weights import INTERLEAVED_ARCHITECTURES, INTERLEAVED_PARAMETERS, GgufWeights


class GgufInt4Blocks:
    """Blocks of an open file; its data stays mapped while the object lives."""

    def __init__(self, file: GgufFile, reader: GgufWeights, config: ModelConfig) -> None:
        """Map the data; `reader` and `config` are those of the file."""
        self._file = file
        self._reader = reader
        self._head_dim = config.head_dim
        self._is_interleaved = config.architecture in INTERLEAVED_ARCHITECTURES
        self._data = np.memmap(file.path, np.uint8, "r")

    def type_name(self, parameter: str) -> str:
        """See `QuantizedBlocks.type_name`."""
        return str(self._file.tensors[self._reader.stored_name(parameter)].type.name)

    def rows(self, parameter: str) -> npt.NDArray[np.uint8]:
        """See `QuantizedBlocks.rows`. Rows of q and k are put back in order, as `GgufWeights.read` does with values."""
        tensor = self._file.tensors[self._reader.stored_name(parameter)]
        rows: npt.NDArray[np.uint8] = self._data[tensor.offset : tensor.offset + tensor.num_bytes]
        rows = rows.reshape(tensor.shape[0], -1)
        if self._is_interleaved and parameter.endswith(INTERLEAVED_PARAMETERS):
            # Stored row order within a head: 0, half, 1, half + 1, ...
            pairs = rows.reshape(-1, self._head_dim // 2, 2, rows.shape[1])
            rows = pairs.swapaxes(1, 2).reshape(rows.shape)
        return rows
