"""Damaged model files are loaded or refused with the one typed error, within a second and without a gigabyte."""

import json
import random
import resource
import shutil
import struct
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from safetensors import safe_open

from engine.model.cpu.model import NativeModel
from engine.model.kernel_choice import Compute
from engine.model.loader import load_model
from kvrelay.errors import InvalidRequest
from kvrelay.formats.gguf_header import read_gguf_metadata
from kvrelay.text.guard import guarded
from kvrelay.text.tokenizer import load_tokenizer
from tests.hostile_files import GgufParts, damaged_bytes, damaged_value
from tests.tiny_models import write_tiny_gguf, write_tiny_model
from tests.unit.kvrelay.text.test_hf_tokenizer import byte_level_backend, write_folder

_MOST_SECONDS = 1.0
_MOST_MIB = 512
_MAX_MESSAGE_CHARS = 1500
JSON_FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")
INDEX = "model.safetensors.index.json"

Damage = Callable[[random.Random, Path], Path]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model in both formats, with tokenizer and chat template."""
    folder = write_tiny_model(tmp_path_factory.mktemp("sound"), "llama")
    write_folder(folder, byte_level_backend())
    write_tiny_gguf(folder, folder / "plain.gguf")
    parts = GgufParts.read(folder / "plain.gguf")
    pieces = [f"<{index}>" for index in range(parts.tensors[0].shape[0])]
    tokenizer: dict[str, object] = {
        "model": "llama",
        "tokens": [*pieces[:-4], "▁", "a", "b", "ab"],
        "scores": [float(-index) for index in range(len(pieces))],
        "token_type": [3] * 4 + [1] * (len(pieces) - 4),
    }
    parts.metadata |= {f"tokenizer.ggml.{name}": value for name, value in tokenizer.items()}
    parts.metadata["tokenizer.chat_template"] = "{% for m in messages %}{{ m.content }}<2>{% endfor %}"
    (folder / "model.gguf").write_bytes(parts.written())
    return folder


def load_all(path: Path, compute: Compute = "torch") -> None:
    """Read whatever workers and the gateway read from a model, the one even if the other refuses it."""
    errors: list[InvalidRequest] = []
    try:
        model = load_model(str(path), compute=compute, num_threads=1)
        if isinstance(model, NativeModel):
            model.close()
    except InvalidRequest as error:
        errors.append(error)
    try:
        tokenizer = load_tokenizer(path)
        if tokenizer.has_chat_template:
            tokenizer.encode_chat([("user", "ab")])
    except InvalidRequest as error:
        errors.append(error)
    if errors:
        raise errors[0]


def gguf_bytes(sound: Path, folder: Path) -> Damage:
    whole = (sound / "model.gguf").read_bytes()

    def damage(rng: random.Random, _: Path) -> Path:
        (folder / "model.gguf").write_bytes(damaged_bytes(rng, whole, 12_000))
        return folder / "model.gguf"

    return damage


def gguf_values(sound: Path, folder: Path) -> Damage:
    parts = GgufParts.read(sound / "model.gguf")

    def damage(rng: random.Random, _: Path) -> Path:
        (folder / "model.gguf").write_bytes(parts.damaged(rng))
        return folder / "model.gguf"

    return damage


def safetensors_header(sound: Path, folder: Path) -> Damage:
    whole = (sound / "model.safetensors").read_bytes()
    size = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + size])

    def damage(rng: random.Random, _: Path) -> Path:
        if rng.random() < 0.5:
            changed = damaged_bytes(rng, whole, 8 + size)
        else:
            text = json.dumps(damaged_value(rng, header)).encode()
            changed = len(text).to_bytes(8, "little") + text + whole[8 + size :]
        (folder / "model.safetensors").write_bytes(changed)
        return folder

    return damage


def json_files(sound: Path, folder: Path) -> Damage:
    shards = dict.fromkeys(_tensor_names(sound / "model.safetensors"), "model.safetensors")
    contents = {name: (sound / name).read_text(encoding="utf-8") for name in JSON_FILES}
    contents[INDEX] = json.dumps({"metadata": {}, "weight_map": shards})

    def damage(rng: random.Random, _: Path) -> Path:
        for name, content in contents.items():
            (folder / name).write_text(content, encoding="utf-8")
        name = rng.choice(list(contents))
        if rng.random() < 0.3:
            (folder / name).write_bytes(damaged_bytes(rng, contents[name].encode(), len(contents[name])))
        else:
            (folder / name).write_text(json.dumps(damaged_value(rng, json.loads(contents[name]))))
        return folder

    return damage


def _tensor_names(path: Path) -> list[str]:
    with safe_open(path, framework="numpy") as file:
        return list(file.keys())


KINDS = (gguf_bytes, gguf_values, safetensors_header, json_files)


def run(kind: Callable[[Path, Path], Damage], sound: Path, folder: Path, count: int, seed: int) -> Counter[str]:
    """Load `count` damaged models and return how many were refused and how many loaded."""
    shutil.copytree(sound, folder, dirs_exist_ok=True)
    damage = kind(sound, folder)
    outcomes: Counter[str] = Counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(count):
        path = damage(random.Random(f"{seed}/{number}"), folder)
        where = f"{kind.__name__}, seed {seed}/{number}"
        started = time.process_time()
        refusal = _refusal(path, "native" if kind is gguf_bytes else "torch", where)
        assert time.process_time() - started < _MOST_SECONDS, where
        outcomes["refused" if refusal else "loaded"] += 1
        if refusal:
            # The chat that is rendered is a request's, all else the model's.
            assert refusal.field in ("model", "chat.messages"), where
            assert len(str(refusal)) < _MAX_MESSAGE_CHARS, where
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) / 1024 < _MOST_MIB
    return outcomes


def _refusal(path: Path, compute: Compute, where: str) -> InvalidRequest | None:
    try:
        load_all(path, compute)
    except InvalidRequest as error:
        return error
    except BaseException as error:
        raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
    return None


def test_the_sound_model_loads(sound: Path) -> None:
    load_all(sound)
    load_all(sound / "model.gguf")
    load_all(sound / "model.gguf", "native")


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_load_or_are_refused_with_the_one_error(
    kind: Callable[[Path, Path], Damage], sound: Path, tmp_path: Path
) -> None:
    outcomes = run(kind, sound, tmp_path, 100, seed=0)
    assert outcomes["refused"] > 20


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_thousands_of_damaged_files(kind: Callable[[Path, Path], Damage], sound: Path, tmp_path: Path) -> None:
    outcomes = run(kind, sound, tmp_path, 2_500, seed=1)
    assert outcomes["refused"] > 500


@pytest.mark.parametrize(
    ("file", "content", "what"),
    [
        ("config.json", "[" * 100_000, "cannot read .*config.json"),
        ("tokenizer_config.json", "[" * 100_000, "cannot read .*tokenizer_config.json"),
        ("chat_template.jinja", "{{ " + "(" * 5000 + ")" * 5000 + " }}", "chat template cannot be compiled"),
        (INDEX, json.dumps({"weight_map": {"a": "b" * 5000}}), "lacks b+"),
        (INDEX, json.dumps({"weight_map": {"a": "b\0"}}), "lacks b"),
    ],
)
def test_json_and_templates_that_trip_their_readers_are_refused(
    file: str, content: str, what: str, sound: Path, tmp_path: Path
) -> None:
    shutil.copytree(sound, tmp_path, dirs_exist_ok=True)
    (tmp_path / file).write_text(content, encoding="utf-8")
    with pytest.raises(InvalidRequest, match=what) as caught:
        load_all(tmp_path)
    assert len(str(caught.value)) < _MAX_MESSAGE_CHARS


def test_a_token_id_far_beyond_the_others_costs_no_memory(sound: Path, tmp_path: Path) -> None:
    content = json.loads((sound / "tokenizer.json").read_text(encoding="utf-8"))
    content["model"]["vocab"]["far"] = 4_000_000_000
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    started = time.process_time()
    with pytest.raises(InvalidRequest, match=r"gives the id 4000000000 to 'far', but has \d+ tokens only"):
        load_tokenizer(tmp_path)
    assert time.process_time() - started < _MOST_SECONDS


def test_a_piece_far_longer_than_a_word_costs_no_time(sound: Path, tmp_path: Path) -> None:
    parts = GgufParts.read(sound / "model.gguf")
    parts.metadata["tokenizer.ggml.tokens"][-1] = "a" * 10_000
    (tmp_path / "a.gguf").write_bytes(parts.written())
    with pytest.raises(InvalidRequest, match=r"tokenizer\.ggml\.tokens has a piece of 10000 characters, above 512"):
        load_tokenizer(tmp_path / "a.gguf")


def test_arrays_longer_than_any_vocabulary_are_refused_before_they_are_read(tmp_path: Path) -> None:
    count = (1 << 24) + 1
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 0, count)
    (tmp_path / "a.gguf").write_bytes(head)
    with (tmp_path / "a.gguf").open("r+b") as file:
        file.truncate(len(head) + count)  # sparse: takes no room
    with pytest.raises(InvalidRequest, match=f"claims an array of {count} elements"):
        read_gguf_metadata(tmp_path / "a.gguf")


def test_a_failed_assertion_inside_the_tokenizers_library_is_an_error_of_the_file(tmp_path: Path) -> None:
    # The library's class cannot be imported, and is known by its name.
    panic = type("PanicException", (BaseException,), {})

    def fail(error: BaseException) -> None:
        raise error

    for error in (panic("called `Option::unwrap()`"), ValueError("called `Option::unwrap()`")):
        with pytest.raises(InvalidRequest, match=r"a\.json is not a sound tokenizer: .*unwrap"):
            guarded(tmp_path / "a.json", partial(fail, error))
    with pytest.raises(KeyboardInterrupt):
        guarded(tmp_path / "a.json", partial(fail, KeyboardInterrupt()))
