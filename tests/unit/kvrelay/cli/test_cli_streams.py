"""Commands as real processes: encodings that are not UTF-8, bytes that are no text, readers that leave early."""

import json
import os
import subprocess
import sys

import pytest

from tests.unit.kvrelay.fake_gateway import FakeGateway, answer

ODD = "ünï🙂 日本"


def run(
    *argv: str | bytes, target: str, environment: dict[str, str], stdin: bytes = b""
) -> "subprocess.CompletedProcess[bytes]":
    outcome = subprocess.run(
        [sys.executable, "-m", "kvrelay.cli.main", *argv],
        env={**_plain_environment(), "KVRELAY_TARGET": target, **environment},
        input=stdin,
        check=False,
        capture_output=True,
        timeout=30,
    )
    assert b"Traceback" not in outcome.stderr
    return outcome


def _plain_environment() -> dict[str, str]:
    names = ("LANG", "LC_ALL", "LC_CTYPE", "PYTHONIOENCODING", "PYTHONUTF8")
    return {name: value for name, value in os.environ.items() if name not in names}


@pytest.mark.parametrize(("encoding", "shown"), [("ascii", "?n?? ??"), ("latin-1", "ünï? ??"), ("utf-8", ODD)])
def test_terminal_that_cannot_show_a_character_gets_another(
    target: str, gateway: FakeGateway, encoding: str, shown: str
) -> None:
    gateway.script = [*answer(ODD)]
    environment = {"PYTHONIOENCODING": encoding}
    outcome = run("generate", "Hi", target=target, environment=environment)
    assert (outcome.returncode, outcome.stdout.decode(encoding)) == (0, shown + "\n")
    chat = run("chat", target=target, stdin=b"Hi\n", environment=environment)
    assert (chat.returncode, chat.stdout.decode(encoding)) == (0, shown + "\n")
    as_json = run("generate", "Hi", "--json", target=target, environment=environment)
    assert json.loads(as_json.stdout.decode(encoding))["text"] == ODD, "no character is lost where it can be written"


@pytest.mark.parametrize("environment", [{"LANG": "C"}, {"PYTHONIOENCODING": "ascii"}])
def test_text_arrives_whole_without_a_locale(target: str, gateway: FakeGateway, environment: dict[str, str]) -> None:
    assert run("generate", "-", target=target, stdin=ODD.encode(), environment=environment).returncode == 0
    assert run("generate", ODD, target=target, environment=environment).returncode == 0
    assert [request.text for request in gateway.requests] == [ODD, ODD]


@pytest.mark.parametrize("environment", [{"LANG": "C.UTF-8"}, {"LANG": "C"}])
def test_bytes_that_are_no_text_are_named(target: str, gateway: FakeGateway, environment: dict[str, str]) -> None:
    bad = b"ab\xff"
    told = b"byte 0xff at character 2 is not UTF-8 text\n"
    for outcome, field in (
        (run("generate", bad, target=target, environment=environment), b"the prompt"),
        (run("generate", "-", target=target, stdin=bad, environment=environment), b"the prompt"),
        (run("generate", "Hi", b"--stop=ab\xff", target=target, environment=environment), b"--stop"),
        (run("chat", target=target, stdin=bad, environment=environment), b"the messages"),
    ):
        assert (outcome.returncode, outcome.stderr) == (2, b"error: " + field + b": " + told)
    assert gateway.requests == []


def test_reader_that_leaves_ends_the_command_quietly_and_cancels(target: str, gateway: FakeGateway) -> None:
    gateway.script = [*answer("word " * 4000, range(4000))]
    command = [sys.executable, "-m", "kvrelay.cli.main", "generate", "Hi", "--target", target]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(20) == 0
    assert gateway.cancelled.wait(10)
