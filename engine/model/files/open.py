"""From a model's name to its config, and to its parameters by name, whatever kind of files it has.

Which names exist is `source.py`'s matter, which parameters a model needs that of `engine/model/weights.py`.
"""

from engine.config import ModelConfig
from engine.model.files.gguf_config import read_gguf_config
from engine.model.files.gguf_file import GgufFile
from engine.model.files.gguf_weights import GgufWeights
from engine.model.files.hf_config import read_hf_config
from engine.model.files.hf_weights import HfWeights
from engine.model.files.source import resolve_model
from engine.model.weights import WeightReader, check_complete


def load_config(source: str) -> ModelConfig:
    """Read a model's config without its weights.

    Args:
        source: A name as `resolve_model` takes it.

    Raises:
        InvalidRequest: No such model, or one that is not supported; names the field `model`.
    """
    found = resolve_model(source)
    return read_gguf_config(GgufFile(found.path)) if found.kind == "gguf" else read_hf_config(found.path)


def open_weights(source: str) -> tuple[ModelConfig, WeightReader]:
    """Open a model's files, and check that they hold exactly the parameters of its config.

    Raises:
        InvalidRequest: As `load_config`, or a tensor is missing, unused or of the wrong shape.
    """
    found = resolve_model(source)
    reader: WeightReader
    if found.kind == "gguf":
        file = GgufFile(found.path)
        config = read_gguf_config(file)
        reader = GgufWeights(file, config)
    else:
        config = read_hf_config(found.path)
        reader = HfWeights(found.path, config)
    check_complete(config, reader)
    return config, reader
