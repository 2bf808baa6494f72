"""The header reader reads what others write, and refuses every broken file with one clear error."""

import contextlib
import struct
import time
from pathlib import Path

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.errors import InvalidRequest
from kvrelay.formats.gguf_header import read_gguf_metadata
from tests.unit.kvrelay.text.gguf_files import gguf_bytes


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "all_types.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("a.u8", 200)
    writer.add_int8("a.i8", -5)
    writer.add_uint16("a.u16", 65535)
    writer.add_int16("a.i16", -300)
    writer.add_uint32("a.u32", 4_000_000_000)
    writer.add_int32("a.i32", -7)
    writer.add_float32("a.f32", 0.5)
    writer.add_bool("a.bool", True)
    writer.add_string("a.text", "grüße 🙂")
    writer.add_array("a.texts", ["x", "", "ünï"])
    writer.add_array("a.ints", [1, -2, 3])
    writer.add_array("a.floats", [0.25, -1.0])
    writer.add_uint64("a.u64", 1 << 63)
    writer.add_int64("a.i64", -(1 << 62))
    writer.add_float64("a.f64", 1e300)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_every_type_is_read_as_written(written: Path) -> None:
    values = read_gguf_metadata(written)
    assert {key: value for key, value in values.items() if key.startswith("a.")} == {
        "a.u8": 200,
        "a.i8": -5,
        "a.u16": 65535,
        "a.i16": -300,
        "a.u32": 4_000_000_000,
        "a.i32": -7,
        "a.f32": 0.5,
        "a.bool": True,
        "a.text": "grüße 🙂",
        "a.texts": ["x", "", "ünï"],
        "a.ints": [1, -2, 3],
        "a.floats": [0.25, -1.0],
        "a.u64": 1 << 63,
        "a.i64": -(1 << 62),
        "a.f64": 1e300,
    }


def test_unwanted_values_are_stepped_over(written: Path) -> None:
    assert read_gguf_metadata(written, lambda key: key in ("a.i8", "a.f64")) == {"a.i8": -5, "a.f64": 1e300}


def test_a_file_cut_anywhere_is_refused(written: Path, tmp_path: Path) -> None:
    whole = written.read_bytes()
    end = len(whole.rstrip(b"\0"))
    cut = tmp_path / "cut.gguf"
    for length in range(end - 8):
        cut.write_bytes(whole[:length])
        with pytest.raises(InvalidRequest, match="model"):
            read_gguf_metadata(cut)


@given(data=st.data())
def test_a_damaged_file_gives_values_or_the_one_error(
    written: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    damaged = bytearray(written.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(damaged)
    with contextlib.suppress(InvalidRequest):
        read_gguf_metadata(path)


def test_huge_claims_cost_neither_time_nor_memory(tmp_path: Path) -> None:
    path = tmp_path / "huge.gguf"
    key = struct.pack("<Q", 1) + b"k"
    for claim in (
        struct.pack("<IIQ", 9, 8, 1 << 60),
        struct.pack("<IIQ", 9, 5, 1 << 61),
        struct.pack("<IQ", 8, (1 << 64) - 1),
        struct.pack("<IIQ", 9, 9, 1 << 40),
    ):
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + claim + b"\0" * 100)
        with pytest.raises(InvalidRequest):
            read_gguf_metadata(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 50))
    with pytest.raises(InvalidRequest, match="claims"):
        read_gguf_metadata(path)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "cannot read"),
        (b"PK\x03\x04" + b"\0" * 40, "does not start with GGUF"),
        (gguf_bytes({}, version=1), "version is 1"),
        (gguf_bytes({}, version=0x03000000), "only 2 and 3"),
    ],
)
def test_other_files_are_refused_with_the_reason(content: bytes, why: str, tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(content)
    with pytest.raises(InvalidRequest, match=why):
        read_gguf_metadata(path)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="No such file"):
        read_gguf_metadata(tmp_path / "none.gguf")


def test_metadata_of_a_real_model_is_read_within_a_second(smollm2_gguf: Path) -> None:
    started = time.process_time()
    values = read_gguf_metadata(smollm2_gguf)
    assert time.process_time() - started < 1.0
    tokens = values["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    assert len(tokens) == 49152
    assert values["llama.block_count"] == 30
