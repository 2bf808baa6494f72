"""One definition of each setting, four sources, and messages that name what is wrong."""

from enum import StrEnum
from pathlib import Path
from typing import ClassVar, Literal

import pytest
from pydantic import Field, ValidationError

from kvrelay.serving.settings import RoleSettings, parse_settings


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class DecodeLike(RoleSettings):
    """A role for the tests."""

    section: ClassVar[str] = "decode"

    num_blocks: int = Field(64, ge=1, description="blocks in the pool")
    colour: Colour = Field(Colour.RED, description="a closed set")
    transports: tuple[Literal["shm", "grpc"], ...] = Field(("shm", "grpc"), description="a list of a closed set")
    run_dir: Path | None = Field(None, description="a path")
    share: float | None = Field(None, gt=0.0, le=1.0, description="a number with an open end")


class NeedsModel(RoleSettings):
    """A role with a required setting."""

    model: str = Field(description="what to serve")


def parse(*argv: str) -> DecodeLike:
    return parse_settings(DecodeLike, argv, "kvrelay decode")


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as caught:
        parse(*argv)
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    return captured.err


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return str(path)


def test_defaults_listen_on_loopback_only() -> None:
    settings = parse()
    assert (settings.host, settings.port, settings.num_blocks, settings.colour) == ("127.0.0.1", 0, 64, Colour.RED)


def test_flag_beats_variable_beats_file_beats_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write(tmp_path, "num_blocks: 1\nport: 1\nlog_level: error\n")
    assert parse("--config", config).num_blocks == 1
    monkeypatch.setenv("KVRELAY_NUM_BLOCKS", "2")
    monkeypatch.setenv("KVRELAY_PORT", "2")
    assert parse("--config", config).num_blocks == 2
    settings = parse("--config", config, "--num-blocks", "3")
    assert (settings.num_blocks, settings.port, settings.log_level, settings.drain_timeout_s) == (3, 2, "error", 30.0)


def test_config_file_may_be_named_by_its_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_CONFIG", write(tmp_path, "num_blocks: 5"))
    assert parse().num_blocks == 5


def test_own_section_beats_shared_keys_and_others_are_ignored(tmp_path: Path) -> None:
    config = write(tmp_path, "log_level: debug\nport: 1\nmodel: x\ndecode:\n  port: 2\nprefill:\n  chunk: 7\n")
    settings = parse("--config", config)
    assert (settings.port, settings.log_level) == (2, "debug")


def test_lists_are_comma_separated_in_flags_and_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse("--transports", "grpc").transports == ("grpc",)
    monkeypatch.setenv("KVRELAY_TRANSPORTS", "grpc, shm")
    assert parse().transports == ("grpc", "shm")


def test_lists_are_lists_in_files(tmp_path: Path) -> None:
    assert parse("--config", write(tmp_path, "transports: [grpc]")).transports == ("grpc",)


def test_switch_has_an_opposite() -> None:
    assert [parse(*argv).log_json for argv in ([], ["--log-json"], ["--no-log-json"])] == [None, True, False]


def test_empty_variable_means_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_NUM_BLOCKS", "")
    assert parse().num_blocks == 64


def test_settings_are_frozen() -> None:
    settings = parse()
    with pytest.raises(ValidationError, match="frozen"):
        settings.port = 1


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--num-blocks", "0"], ["--num-blocks", "'0'", "must be at least 1"]),
        (["--num-blocks", "many"], ["--num-blocks", "'many'", "integer"]),
        (["--colour", "green"], ["--colour", "'green'", "red, blue"]),
        (["--transports", "shm,pigeon"], ["--transports", "'pigeon'", "shm, grpc"]),
        (["--port", "70000"], ["--port", "'70000'", "must be from 0 to 65535"]),
        (["--log-level", "loud"], ["--log-level", "'loud'", "debug, info, warning, error"]),
        (["--drain-timeout-s", "nan"], ["--drain-timeout-s", "finite"]),
        (["--drain-timeout-s", "-1"], ["--drain-timeout-s", "'-1'", "must be at least 0"]),
        (["--share", "0"], ["--share", "'0'", "must be above 0.0 and at most 1.0"]),
        (["--no-such-flag"], ["--no-such-flag"]),
        (["--num", "3"], ["--num"]),
    ],
)
def test_bad_flag_is_named_with_its_value_and_what_is_allowed(
    capsys: pytest.CaptureFixture[str], argv: list[str], parts: list[str]
) -> None:
    message = refused(capsys, *argv)
    assert all(part in message for part in parts), message


def test_bad_variable_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_COLOUR", "green")
    assert refused(capsys) == "kvrelay decode: KVRELAY_COLOUR: 'green' is not valid: must be one of red, blue\n"


def test_every_bad_setting_is_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(refused(capsys, "--port", "-1", "--colour", "green").splitlines()) == 2


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("num_blocks: 0", ["key 'num_blocks'", "must be at least 1"]),
        ("num_block: 3", ["unknown key 'num_block'", "did you mean 'num_blocks'?"]),
        ("zzz: 3", ["unknown key 'zzz'", "known: "]),
        ("decode:\n  num_block: 3", ["unknown key 'num_block'"]),
        ("- a", ["must hold keys and values"]),
        ("decode: 3", ["section 'decode'"]),
        ("a: [", ["is not YAML"]),
    ],
)
def test_bad_file_is_named_with_the_key(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str, parts: list[str]
) -> None:
    message = refused(capsys, "--config", write(tmp_path, content))
    assert all(part in message for part in parts), message


def test_missing_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot read /no/such.yaml" in refused(capsys, "--config", "/no/such.yaml")


def test_missing_setting_says_every_way_to_give_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_settings(NeedsModel, [], "kvrelay prefill")
    assert caught.value.code == 2
    assert "--model is required (or KVRELAY_MODEL, or key 'model'" in capsys.readouterr().err


def test_help_lists_every_flag_with_variable_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse("--help")
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for field in DecodeLike.model_fields:
        assert f"--{field.replace('_', '-')}" in text
        assert f"[KVRELAY_{field.upper()}]" in text
    assert "(default: 64)" in text
    assert "{red,blue}" in text


def test_switches_of_the_command_are_in_the_help_but_no_settings(capsys: pytest.CaptureFixture[str]) -> None:
    switches = {"--json": "print one JSON object instead"}
    assert parse_settings(DecodeLike, ["--json", "--port", "3"], "kvrelay check", switches).port == 3
    with pytest.raises(SystemExit):
        parse_settings(DecodeLike, ["--help"], "kvrelay check", switches)
    assert "print one JSON object instead" in capsys.readouterr().out


def test_port_of_a_kubernetes_service_is_no_setting(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVRELAY_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KVRELAY_PORT_50051_TCP", "tcp://10.0.0.1:50051")
    monkeypatch.setenv("KVRELAY_PORT", "tcp://10.0.0.1:50051")
    assert parse().port == 0
    told = "kvrelay decode: KVRELAY_PORT=tcp://10.0.0.1:50051 describes a Kubernetes Service, not a setting: ignored\n"
    assert capsys.readouterr().err == told
    assert parse("--port", "7").port == 7
    assert capsys.readouterr().err == "", "nothing was left out"


@pytest.mark.parametrize(
    ("name", "text"), [("PORT", "tcp://10.0.0.1"), ("PORT", "http://10.0.0.1:1"), ("NUM_BLOCKS", "tcp://10.0.0.1:1")]
)
def test_wrong_variables_are_not_taken_for_a_service(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    monkeypatch.setenv(f"KVRELAY_{name}", text)
    assert f"KVRELAY_{name}: {text!r} is not valid" in refused(capsys)


def test_text_that_is_no_unicode_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (
        refused(capsys, "--host", "a\udcff") == "kvrelay decode: --host: byte 0xff at character 1 is not UTF-8 text\n"
    )
    monkeypatch.setenv("KVRELAY_HOST", "\udc80")
    assert "KVRELAY_HOST: byte 0x80" in refused(capsys)
