"""The GGUF container: what the `gguf` package writes is read back, and nothing damaged is accepted."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from engine.model.files.gguf_file import GgufFile
from kvrelay.errors import InvalidRequest

RNG = np.random.default_rng(0)


def write(path: Path, **tensors: np.ndarray) -> Path:
    """A file with every kind of metadata and the given fp32 tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -100)
    writer.add_uint16("u16", 60000)
    writer.add_int16("i16", -30000)
    writer.add_uint32("u32", 4_000_000_000)
    writer.add_int32("i32", -2_000_000_000)
    writer.add_uint64("u64", 2**63)
    writer.add_int64("i64", -(2**62))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "größe\n")
    writer.add_array("texts", ["a", "", "ö"])
    writer.add_array("numbers", [1, -2, 3])
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_of_every_type_is_read(tmp_path: Path) -> None:
    metadata = GgufFile(write(tmp_path / "a.gguf")).metadata
    assert metadata == {
        "general.architecture": "llama",
        "u8": 200,
        "i8": -100,
        "u16": 60000,
        "i16": -30000,
        "u32": 4_000_000_000,
        "i32": -2_000_000_000,
        "u64": 2**63,
        "i64": -(2**62),
        "f32": 0.5,
        "f64": 0.1,
        "yes": True,
        "text": "größe\n",
        "texts": ["a", "", "ö"],
        "numbers": [1, -2, 3],
    }


def test_header_of_a_real_model_equals_the_packages_reading(smollm2_gguf: Path) -> None:
    ours, theirs = GgufFile(smollm2_gguf), gguf.GGUFReader(smollm2_gguf)
    assert [(t.name, t.shape, t.type, t.offset, t.num_bytes) for t in ours.tensors.values()] == [
        (t.name, tuple(map(int, t.shape[::-1])), t.tensor_type, t.data_offset, t.n_bytes) for t in theirs.tensors
    ]
    for key in ("llama.attention.layer_norm_rms_epsilon", "tokenizer.ggml.token_type", "tokenizer.chat_template"):
        assert ours.metadata[key] == theirs.fields[key].contents()
    tokens = ours.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    assert len(tokens) == 49152
    assert tokens[-1] == theirs.fields["tokenizer.ggml.tokens"].contents(49151)


def test_tensors_are_read_in_their_shapes(tmp_path: Path) -> None:
    values = {"vector": RNG.random(7, np.float32), "matrix": RNG.random((5, 3), np.float32)}
    file = GgufFile(write(tmp_path / "a.gguf", **values))
    for name, expected in values.items():
        assert np.array_equal(file.dequantize(name), expected)
    assert np.array_equal(file.dequantize("matrix", num_rows=2), values["matrix"][:2])


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"])
def test_types_that_only_llama_cpp_writes_are_dequantized(kind: str, tmp_path: Path) -> None:
    quantization = gguf.GGMLQuantizationType[kind]
    elements, num_bytes = gguf.GGML_QUANT_SIZES[quantization]
    # Small bytes make small fp16 scales wherever those lie in a block.
    blocks = RNG.integers(0, 60, (4, 512 // elements * num_bytes), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tensor("weight", blocks, raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = GgufFile(tmp_path / "a.gguf").dequantize("weight")
    assert found.shape == (4, 512)
    assert np.array_equal(found, gguf.quants.dequantize(blocks, quantization))


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.gguf", matrix=RNG.random((4, 8), np.float32)).read_bytes()
    path = tmp_path / "cut.gguf"
    for length in range(0, len(whole) - 1, 3):
        path.write_bytes(whole[:length])
        with pytest.raises(InvalidRequest) as caught:
            GgufFile(path)
        assert caught.value.field == "model"


@pytest.mark.parametrize(
    ("offset", "value", "what"),
    [
        (0, b"GGML", "does not start with GGUF"),
        (4, b"\x01\0\0\0", "version is 1,"),
        (4, b"\0\0\0\x03", "version is 50331648"),
        (8, b"\xff" * 8, "claims 18446744073709551615 tensors"),
        (16, b"\xff" * 8, "metadata entries"),
        (24, b"\xff" * 8, "ends inside its header"),
    ],
)
def test_damaged_headers_are_refused(offset: int, value: bytes, what: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", matrix=RNG.random((4, 8), np.float32))
    content = bytearray(path.read_bytes())
    content[offset : offset + len(value)] = value
    path.write_bytes(content)
    with pytest.raises(InvalidRequest, match=what):
        GgufFile(path)


def test_random_damage_never_escapes_as_another_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", matrix=RNG.random((4, 8), np.float32))
    whole = path.read_bytes()
    refused = 0
    for _ in range(300):
        content = bytearray(whole)
        for position in RNG.integers(0, 500, 3):
            content[position] = RNG.integers(0, 256)
        path.write_bytes(content)
        try:
            GgufFile(path)
        except InvalidRequest:
            refused += 1
    assert refused > 100


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read"):
        GgufFile(tmp_path / "none.gguf")
