"""Log lines and trace context."""

import json
import logging
import sys
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.trace import StatusCode

from kvrelay.serving.telemetry import (
    configure_logging,
    configure_tracing,
    emit_span,
    in_memory_spans,
    parse_traceparent,
    shutdown_tracing,
    span,
    traceparent,
)

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers, root.level = handlers, level
    structlog.reset_defaults()


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    captured = capsys.readouterr()
    assert captured.out == ""
    return [json.loads(line) for line in captured.err.splitlines()]


def test_line_has_role_time_level_and_context(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("decode")
    with structlog.contextvars.bound_contextvars(request_id=7):
        structlog.get_logger().info("handoff.committed", num_blocks=3)
    (line,) = lines(capsys)
    assert {key: line[key] for key in ("event", "role", "level", "request_id", "num_blocks")} == {
        "event": "handoff.committed",
        "role": "decode",
        "level": "info",
        "request_id": 7,
        "num_blocks": 3,
    }
    assert str(line["timestamp"]).endswith("Z")


def test_line_inside_a_span_names_the_trace(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("gateway")
    with span("prefill", PARENT) as current:
        structlog.get_logger().info("x")
        expected = traceparent(current)
    (line,) = lines(capsys)
    assert line["trace_id"] == "0af7651916cd43dd8448eb211c80319c"
    assert expected == f"00-{line['trace_id']}-{line['span_id']}-01"


def test_prompt_text_is_never_written(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("gateway")
    structlog.get_logger().info("x", prompt="my secret", text="my secret", messages=["my secret"], token_ids=[1, 2])
    logged = capsys.readouterr().err
    assert "secret" not in logged
    assert "[9 not logged]" in logged


def test_traceback_is_written_without_local_variables(capsys: pytest.CaptureFixture[str]) -> None:
    for as_json in (True, False):
        configure_logging("gateway", json=as_json)
        try:
            secret = "my " + "secret"
            raise ValueError(len(secret))
        except ValueError:
            structlog.get_logger().exception("x")
        logged = capsys.readouterr().err
        assert "ValueError: 9" in logged
        assert "my secret" not in logged


def test_level_filters_ours_and_others(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("gateway", level="warning")
    structlog.get_logger().info("hidden")
    logging.getLogger("library").info("hidden")
    structlog.get_logger().warning("shown")
    logging.getLogger("library").warning("shown %s", "too")
    assert [line["event"] for line in lines(capsys)] == ["shown", "shown too"]


def test_library_records_have_the_same_form(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("gateway")
    logging.getLogger("library").warning("careful")
    (line,) = lines(capsys)
    assert (line["event"], line["role"], line["level"]) == ("careful", "gateway", "warning")


def test_console_form_is_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("gateway", json=False)
    structlog.get_logger().info("server.started", address="x:1")
    logged = capsys.readouterr().err
    assert not logged.startswith("{")
    assert "server.started" in logged


def test_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="one of debug, info"):
        configure_logging("gateway", level="loud")


def test_spans_form_one_trace_without_any_exporter() -> None:
    with span("outer", PARENT) as outer:
        with span("inner") as inner:
            assert traceparent() == traceparent(inner)
        assert traceparent() == traceparent(outer)
    assert traceparent() == ""
    ids = [parse_traceparent(traceparent(each)) for each in (outer, inner)]
    assert all(each is not None and f"{each.trace_id:032x}" in PARENT for each in ids)
    assert len({each.span_id for each in ids if each is not None}) == 2


def test_span_without_a_parent_starts_a_trace() -> None:
    with span("a") as first:
        pass
    with span("b", "nonsense") as second:
        pass
    first_id, second_id = (traceparent(each).split("-")[1] for each in (first, second))
    assert first_id != second_id


def test_unsampled_parent_keeps_its_trace_unsampled() -> None:
    with in_memory_spans() as exporter, span("a", PARENT[:-1] + "0") as current:
        assert traceparent(current).startswith(PARENT[:35])
        assert traceparent(current).endswith("-00")
    assert exporter.get_finished_spans() == ()


def test_failed_span_says_what_failed_but_not_why() -> None:
    with in_memory_spans() as exporter, pytest.raises(ValueError, match="secret"), span("prefill", num_tokens=3):
        raise ValueError("the secret prompt")
    (finished,) = exporter.get_finished_spans()
    assert finished.attributes is not None
    assert finished.attributes["error.type"] == "ValueError"
    assert finished.attributes["num_tokens"] == 3
    assert finished.status.status_code is StatusCode.ERROR
    assert "secret" not in finished.to_json()


def test_measured_span_is_recorded_with_its_times() -> None:
    with in_memory_spans() as exporter:
        context = emit_span("kv.export", PARENT, duration_ns=2_000, end_time_ns=10_000, attributes={"num_bytes": 5})
    (finished,) = exporter.get_finished_spans()
    assert (finished.start_time, finished.end_time) == (8_000, 10_000)
    assert context == f"{PARENT[:35]}-{finished.context.span_id:016x}-01"


def test_tracing_goes_on_after_a_shutdown() -> None:
    configure_tracing("kvrelay-test")
    shutdown_tracing()
    with span("a") as current:
        assert traceparent(current)


def test_exporter_is_loaded_only_when_asked_for() -> None:
    name = "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"
    was_loaded = name in sys.modules
    configure_tracing("kvrelay-test")
    assert (name in sys.modules) == was_loaded


@pytest.mark.parametrize(
    "value",
    [
        "",
        "00",
        PARENT.upper(),
        PARENT + "-x",
        PARENT.replace("00-", "ff-"),
        f"00-{'0' * 32}-b7ad6b7169203331-01",
        f"00-{'a' * 32}-{'0' * 16}-01",
    ],
)
def test_what_is_no_trace_context_is_ignored(value: str) -> None:
    assert parse_traceparent(value) is None


@given(value=st.text(max_size=60))
def test_any_text_is_a_context_or_none(value: str) -> None:
    parsed = parse_traceparent(value)
    assert parsed is None or value.startswith(f"00-{parsed.trace_id:032x}")
