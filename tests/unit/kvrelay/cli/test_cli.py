"""Commands as a person or a script meets them: output, exit codes, one clear line on errors."""

import importlib
import json
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner, Result

import kvrelay
from kvrelay.cli.console import flag_of
from kvrelay.cli.main import app
from kvrelay.errors import CapacityError, InvalidRequest, ModelNotFound
from kvrelay.v1 import sampling_pb2
from tests.unit.kvrelay.fake_gateway import FakeGateway, answer


def run(*argv: str, stdin: str | None = None) -> Result:
    result = CliRunner().invoke(app, list(argv), input=stdin, prog_name="kvrelay")
    assert "Traceback" not in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


ROLES = ["gateway", "prefill", "decode"]
QUESTIONS = ["generate", "chat", "tokenize", "models", "status", "health"]
COMMANDS = ["demo", "serve", "check", *ROLES, *QUESTIONS, "version"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "--help" in result.stdout


def test_help_lists_every_command() -> None:
    text = run("--help").stdout
    assert all(command in text for command in COMMANDS)


def test_version_is_the_packages() -> None:
    assert run("version").stdout.strip() == kvrelay.__version__
    assert run("--version").stdout.strip() == kvrelay.__version__


def test_text_is_streamed_to_standard_output_only(target: str, gateway: FakeGateway) -> None:
    result = run("generate", "Hi", "--target", target, "--max-tokens", "7", "--temperature", "0", "--stop", "x")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "Hello there\n", "")
    (request,) = gateway.requests
    assert request.text == "Hi"
    assert request.sampling_params.max_tokens == 7
    assert request.sampling_params.HasField("temperature")
    assert not request.sampling_params.HasField("top_p")
    assert list(request.sampling_params.stop) == ["x"]


def test_text_can_come_from_standard_input(target: str, gateway: FakeGateway) -> None:
    assert run("generate", "-", "--target", target, stdin="from a pipe").exit_code == 0
    assert gateway.requests[0].text == "from a pipe"


def test_chat_message_goes_with_its_system_prompt(target: str, gateway: FakeGateway) -> None:
    assert run("generate", "Hi", "--chat", "--system", "Be brief.", "--target", target).exit_code == 0
    assert [(m.role, m.content) for m in gateway.requests[0].chat.messages] == [("system", "Be brief."), ("user", "Hi")]


def test_generate_prints_figures_as_json(target: str) -> None:
    report = json.loads(run("generate", "Hi", "--json", "--target", target).stdout)
    assert report["text"] == "Hello there"
    assert report["transport"] == "shm"
    assert report["usage"]["prompt_tokens"] == 4


def test_verbose_shows_phases_beside_the_text(target: str) -> None:
    result = run("generate", "Hi", "--verbose", "--target", target)
    assert result.stdout == "Hello there\n"
    assert "prefill" in result.stderr


def test_target_may_come_from_its_variable(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_TARGET", target)
    assert run("generate", "Hi").exit_code == 0


def test_wrong_value_names_the_flag_and_is_a_usage_error(target: str, gateway: FakeGateway) -> None:
    gateway.script = [InvalidRequest("sampling_params.top_p", "must be in (0, 1], not 7")]
    result = run("generate", "Hi", "--top-p", "7", "--target", target)
    assert (result.exit_code, result.stderr) == (2, "error: --top-p: must be in (0, 1], not 7\n")


@pytest.mark.parametrize("error", [ModelNotFound("model 'x' is not served here"), CapacityError("the queue is full")])
def test_server_error_is_one_line_and_a_failure(
    target: str, gateway: FakeGateway, error: ModelNotFound | CapacityError
) -> None:
    gateway.script = [error]
    result = run("generate", "Hi", "--target", target)
    assert (result.exit_code, result.stderr) == (1, f"error: {error}\n")


@pytest.mark.parametrize("argv", [["generate", "Hi"], ["status"], ["health"], ["chat"]])
def test_nobody_there_says_what_to_do(argv: list[str]) -> None:
    result = run(*argv, "--target", "127.0.0.1:1")
    assert result.exit_code == 1
    assert "nothing answers at 127.0.0.1:1" in result.stderr
    assert "kvrelay serve" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "argv", [["generate"], ["generate", "Hi", "--system", "x"], ["nonsense"], ["generate", "Hi", "--max-tokens", "x"]]
)
def test_wrong_usage_ends_with_2(argv: list[str]) -> None:
    result = run(*argv)
    assert result.exit_code == 2
    assert result.stderr


def test_piped_chat_answers_every_line_and_remembers(target: str, gateway: FakeGateway) -> None:
    result = run("chat", "--target", target, "--system", "S", stdin="first\n\nsecond\n/reset\nthird\n/exit\nnever\n")
    assert (result.exit_code, result.stdout) == (0, "Hello there\n" * 3)
    turns = [[(m.role, m.content) for m in request.chat.messages] for request in gateway.requests]
    assert turns == [
        [("system", "S"), ("user", "first")],
        [("system", "S"), ("user", "first"), ("assistant", "Hello there"), ("user", "second")],
        [("system", "S"), ("user", "third")],
    ]


def test_chat_ends_with_its_input(target: str, gateway: FakeGateway) -> None:
    assert run("chat", "--target", target, stdin="").exit_code == 0
    assert gateway.requests == []


def test_status_shows_the_workers(target: str) -> None:
    text = run("status", "--target", target).stdout
    assert all(word in text for word in ("decode-0", "prefill-0", "connected", "not connected", "9 of 10", "tiny"))


def test_status_says_which_kernels_run_and_why_they_are_slow(target: str) -> None:
    shown = run("status", "--target", target)
    assert "native (avx2)" in shown.stdout
    assert "\nprefill-0: torch, slow: native kernels cannot be had, no C++ compiler\n" in shown.stdout


def test_status_as_json_holds_all_that_is_known(target: str) -> None:
    shown = json.loads(run("status", "--target", target, "--json").stdout)
    assert shown["target"] == target
    assert shown["workers"][0]["num_free_blocks"] == 9
    assert shown["models"][0]["name"] == "tiny"


@pytest.mark.parametrize(
    ("service", "exit_code"), [("kvrelay.v1.InferenceService", 0), ("", 0), ("not.Ready", 1), ("no.Such", 1)]
)
def test_health_is_told_by_the_exit_code(target: str, service: str, exit_code: int) -> None:
    assert run("health", "--target", target, "--service", service).exit_code == exit_code


@pytest.mark.parametrize(
    ("command", "module"),
    [("gateway", "gateway.__main__"), ("prefill", "prefill_service.__main__"), ("decode", "decode_service.__main__")],
)
def test_role_gets_its_flags_and_decides_the_exit_code(
    command: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, list[str]]] = []

    def load(name: str) -> SimpleNamespace:
        def main(argv: list[str]) -> int:
            seen.append((name, argv))
            return 3

        return SimpleNamespace(main=main)

    monkeypatch.setattr(importlib, "import_module", load)
    result = run(command, "--port", "0", "--model", "x", "--unknown=1")
    assert result.exit_code == 3
    assert seen == [(module, ["--port", "0", "--model", "x", "--unknown=1"])]


def test_check_finds_a_good_plan_good() -> None:
    result = run("check", "--json", "--port", "0", "--prefill", "2", "--transport", "grpc")
    shown = json.loads(result.stdout)
    assert (result.exit_code, shown["ok"]) == (0, True)
    assert [row["process"] for row in shown["plan"]] == ["gateway", "prefill-0", "prefill-1", "decode-0"]
    assert "--transport grpc" in shown["plan"][1]["flags"]


def test_check_names_everything_that_is_wrong(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = run("check", "--json", "--port", str(port), "--model", str(tmp_path / "none"))
    shown = json.loads(result.stdout)
    assert (result.exit_code, shown["ok"]) == (1, False)
    wrong = {finding["subject"] for finding in shown["findings"] if finding["verdict"] == "error"}
    assert wrong == {"model", "port"}


def test_check_warns_of_too_little_kv_memory() -> None:
    result = run("check", "--num-blocks", "4", "--port", "0")
    assert result.exit_code == 0
    assert "warning" in result.stdout
    assert "less than one full context" in result.stdout


def test_check_refuses_a_misspelt_key(tmp_path: Path) -> None:
    config = tmp_path / "cluster.yaml"
    config.write_text("model: smollm2\ndecode:\n  num_block: 3\n")
    result = run("check", "--config", str(config))
    assert result.exit_code == 2
    assert result.stderr == f"error: --config: unknown key 'decode.num_block' in {config}; did you mean 'num_blocks'?\n"


def test_model_that_leads_nowhere_starts_nothing() -> None:
    for command in ("serve", "demo"):
        result = run(command, "--model", "no-such-model")
        assert result.exit_code == 2
        assert result.stderr.startswith("error: --model: no such file or folder: no-such-model")


@pytest.mark.parametrize(
    ("field", "flag"),
    [
        ("sampling_params.max_tokens", "--max-tokens"),
        ("model", "--model"),
        ("chat.messages", "the messages"),
        ("text", "the prompt"),
        ("messages[0].content", "the messages"),
        ("sampling_params.stop_token_ids[3]", "--stop-token-id"),
        ("sampling_params.logit_bias[7]", "--logit-bias"),
        ("sampling_params.stop[3]", "--stop"),
    ],
)
def test_fields_are_named_as_they_were_given(field: str, flag: str) -> None:
    assert flag_of(field) == flag


def test_odd_text_is_printed_as_it_is(target: str, gateway: FakeGateway) -> None:
    gateway.script = [*answer("[bold]ünï🙂[/bold] %s")]
    assert run("generate", "Hi", "--target", target).stdout == "[bold]ünï🙂[/bold] %s\n"


def test_target_is_taken_in_its_obvious_forms(target: str) -> None:
    port = target.rpartition(":")[2]
    for given in (port, f"http://{target}"):
        assert run("status", "--target", given).exit_code == 0
    result = run("status", "--target", "localhost")
    assert (result.exit_code, result.stderr) == (
        2,
        "error: --target: must be host:port, for instance 127.0.0.1:50051, not 'localhost'; the port is missing: "
        "localhost:PORT\n",
    )


def test_nobody_there_tells_of_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert "(http_proxy is set, and not used for this connection)" in run("status", "--target", "127.0.0.1:1").stderr


def test_every_flag_of_sampling_is_sent(target: str, gateway: FakeGateway) -> None:
    flags = ["--stop-token-id", "7", "--stop-token-id", "8", "--logit-bias", "3=-1.5", "--logit-bias", "4=2"]
    assert run("generate", "Hi", "--target", target, *flags, "--logprobs", "0", "--n", "1").exit_code == 0
    params = gateway.requests[0].sampling_params
    assert list(params.stop_token_ids) == [7, 8]
    assert dict(params.logit_bias) == {3: -1.5, 4: 2.0}
    assert (params.n, params.HasField("logprobs"), params.logprobs) == (1, True, 0)


@pytest.mark.parametrize("bias", ["3", "x=1", "3=", "=1"])
def test_bias_that_is_none_is_named(bias: str) -> None:
    result = run("generate", "Hi", "--logit-bias", bias)
    assert result.exit_code == 2
    assert "TOKEN=BIAS" in result.stderr


def test_several_answers_are_printed_one_after_the_other(target: str, gateway: FakeGateway) -> None:
    gateway.script = [*answer("second", [1], index=1), *answer("first", [2], index=0)]
    result = run("generate", "Hi", "--n", "2", "--target", target)
    assert result.stdout == "[1 of 2]\nfirst\n[2 of 2]\nsecond\n"
    shown = json.loads(run("generate", "Hi", "--n", "2", "--json", "--target", target).stdout)
    assert [(each["text"], each["seed"]) for each in shown["completions"]] == [("first", 77), ("second", 78)]


def test_logprobs_are_shown_beside_the_text_and_in_json(target: str, gateway: FakeGateway) -> None:
    entry = sampling_pb2.TokenLogprob(token_id=5, logprob=-0.5, rank=1)
    chunk, complete = answer("A", [5])
    chunk.chunk.logprobs.append(sampling_pb2.PositionLogprobs(sampled=entry, top=[entry]))
    gateway.script = [chunk, complete]
    result = run("generate", "Hi", "--logprobs", "1", "--target", target)
    assert result.stdout == "A\n"
    assert "5 -0.500" in result.stderr
    shown = json.loads(run("generate", "Hi", "--logprobs", "1", "--json", "--target", target).stdout)
    assert shown["logprobs"][0]["sampled"] == {"token_id": 5, "logprob": -0.5, "rank": 1}


def test_models_are_listed(target: str) -> None:
    text = run("models", "--target", target).stdout
    assert all(word in text for word in ("tiny", "llama", "512", "100", "yes"))
    shown = json.loads(run("models", "--json", "--target", target).stdout)
    assert [model["context_length"] for model in shown["models"]] == [512]


def test_text_is_tokenized(target: str) -> None:
    assert run("tokenize", "a bb ccc", "--target", target).stdout == "1 2 3\n"
    assert run("tokenize", "-", "--target", target, stdin="a bb").stdout == "1 2\n"
    assert run("tokenize", "four words in all", "--chat", "--target", target).stdout == "17\n"
    shown = json.loads(run("tokenize", "a bb", "--json", "--target", target).stdout)
    assert shown == {"num_tokens": 2, "token_ids": [1, 2]}
