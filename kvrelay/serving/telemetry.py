"""Structured logs and trace spans.

Owns the log format (JSON unless a person is watching, always with role, trace_id and span_id) and the W3C trace context
that travels in metadata, session commands and hand-offs. Never logs prompt text: fields that could hold it are cut.
Spans work without an exporter, so that ids always propagate; `configure_tracing` adds one.
"""

import logging
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, Final

import structlog
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from kvrelay.channel import NO_PROXY
from kvrelay.target import is_on_this_machine

Attribute = str | bool | int | float

_TRACEPARENT: Final = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_LEVELS: Final = ("debug", "info", "warning", "error")
_PROMPT_FIELDS: Final = frozenset({"prompt", "text", "messages", "content", "token_ids"})


# --- logs -----------------------------------------------------------------------------------------------------------


def configure_logging(role: str, json: bool | None = None, level: str = "info") -> None:
    """Send structlog's events and the standard library's records to stderr in one format.

    Args:
        role: `gateway`, `prefill`, `decode` or another name of this process; in every line.
        json: One JSON object a line. None: JSON when stderr is not a terminal.
        level: `debug`, `info`, `warning` or `error`.

    Raises:
        ValueError: The level is none of these.
    """
    if level not in _LEVELS:
        raise ValueError(f"level must be one of {', '.join(_LEVELS)}, not {level!r}")
    min_level = getattr(logging, level.upper())
    as_json = not sys.stderr.isatty() if json is None else json
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _role_adder(role),
        _add_trace_ids,
        _cut_prompt_fields,
    ]
    if as_json:
        shared.append(structlog.processors.format_exc_info)
    # Tracebacks are plain: the pretty ones print local variables, which may hold a prompt.
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if as_json
        else structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    )
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(min_level),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    # Libraries are chatty below warnings; their details are wanted only when ours are.
    root.setLevel(logging.DEBUG if level == "debug" else max(min_level, logging.WARNING))
    for chatty in ("asyncio", "grpc", "urllib3", "filelock", "httpx"):
        logging.getLogger(chatty).setLevel(max(min_level, logging.WARNING))


def _role_adder(role: str) -> structlog.typing.Processor:
    def add_role(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        event.setdefault("role", role)
        return event

    return add_role


def _add_trace_ids(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    context = trace.get_current_span().get_span_context()
    if context.is_valid:
        event.setdefault("trace_id", trace.format_trace_id(context.trace_id))
        event.setdefault("span_id", trace.format_span_id(context.span_id))
    return event


def _cut_prompt_fields(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for name in _PROMPT_FIELDS.intersection(event):
        value = event[name]
        event[name] = f"[{len(value)} not logged]" if hasattr(value, "__len__") else "[not logged]"
    return event


# --- traces ---------------------------------------------------------------------------------------------------------


class _Tracing:
    """The process's tracer provider. Without an exporter it only mints and propagates ids."""

    def __init__(self) -> None:
        self.provider = TracerProvider(resource=Resource.create({"service.name": "kvrelay"}), shutdown_on_exit=False)
        self.tracer = self.provider.get_tracer("kvrelay")

    def replace(self, service_name: str) -> None:
        resource = Resource.create({"service.name": service_name})
        self.provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self.tracer = self.provider.get_tracer("kvrelay")

    def add_processor(self, processor: SpanProcessor) -> Callable[[], None]:
        self.provider.add_span_processor(processor)
        return processor.shutdown


_tracing = _Tracing()


def configure_tracing(service_name: str, otlp_endpoint: str | None = None) -> None:
    """Name this process in traces and, if an endpoint is given, export spans there.

    Args:
        service_name: `service.name` of the resource, e.g. `kvrelay-gateway`.
        otlp_endpoint: OTLP/gRPC collector, e.g. `http://127.0.0.1:4317`; plain text for `http`, TLS for `https`.
            None: no exporter.
    """
    shutdown_tracing()
    _tracing.replace(service_name)
    if otlp_endpoint:
        # Imported late: the exporter costs start-up time, and most runs have none.
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        is_near = is_on_this_machine(otlp_endpoint)
        exporter = OTLPSpanExporter(
            endpoint=otlp_endpoint,
            insecure=not otlp_endpoint.startswith("https://"),
            channel_options=(NO_PROXY,) if is_near else None,  # type: ignore[arg-type]  # numbers are taken as well
        )
        _tracing.add_processor(BatchSpanProcessor(exporter))


def shutdown_tracing() -> None:
    """Send what is left to the exporter and stop it. Spans made later still carry ids but go nowhere."""
    _tracing.provider.shutdown()


@contextmanager
def in_memory_spans() -> Iterator[InMemorySpanExporter]:
    """Collect the spans that end inside the block; `exporter.get_finished_spans()` returns them. For tests."""
    exporter = InMemorySpanExporter()
    processor = SimpleSpanProcessor(exporter)
    previous = (_tracing.provider, _tracing.tracer)
    _tracing.replace("kvrelay-test")
    _tracing.provider.add_span_processor(processor)
    try:
        yield exporter
    finally:
        _tracing.provider, _tracing.tracer = previous


@contextmanager
def span(
    name: str, parent_traceparent: str = "", *, kind: SpanKind = SpanKind.INTERNAL, **attributes: Attribute
) -> Iterator[Span]:
    """Run the block inside a new current span.

    Args:
        name: A glossary verb, e.g. `prefill`, `kv.export`.
        parent_traceparent: W3C trace context of the parent. Empty or unreadable: the current span, else a new trace.
        kind: SERVER for a call that came in, CLIENT for one that goes out.
        **attributes: Set at the start; more can be set on the yielded span.

    An exception marks the span as failed with its type only, since its text might quote a request, and goes on.
    """
    with _tracing.tracer.start_as_current_span(
        name,
        context=_parent_context(parent_traceparent),
        kind=kind,
        attributes=attributes,
        record_exception=False,
        set_status_on_exception=False,
    ) as started:
        try:
            yield started
        except BaseException as error:
            started.set_attribute("error.type", type(error).__name__)
            if isinstance(error, Exception):
                started.set_status(Status(StatusCode.ERROR))
            raise


def emit_span(
    name: str,
    parent_traceparent: str = "",
    *,
    duration_ns: int,
    end_time_ns: int | None = None,
    attributes: Mapping[str, Attribute] | None = None,
) -> str:
    """Record a span that was measured elsewhere, for example on the device's thread, and return its traceparent.

    Args:
        name: A glossary verb.
        parent_traceparent: As in `span`.
        duration_ns: How long it took.
        end_time_ns: When it ended, in nanoseconds since the epoch. None: now.
        attributes: Set on the span.
    """
    end = time.time_ns() if end_time_ns is None else end_time_ns
    finished = _tracing.tracer.start_span(
        name, context=_parent_context(parent_traceparent), attributes=attributes, start_time=end - max(0, duration_ns)
    )
    finished.end(end)
    return traceparent(finished)


def traceparent(of: Span | None = None) -> str:
    """Return the W3C `traceparent` of a span. None: of the current one. Empty where there is none."""
    context = (trace.get_current_span() if of is None else of).get_span_context()
    if not context.is_valid:
        return ""
    trace_id, span_id = trace.format_trace_id(context.trace_id), trace.format_span_id(context.span_id)
    return f"00-{trace_id}-{span_id}-{int(context.trace_flags):02x}"


def parse_traceparent(value: str) -> SpanContext | None:
    """Return the remote span context that a W3C `traceparent` names; None if it is not one."""
    match = _TRACEPARENT.fullmatch(value)
    if match is None:
        return None
    context = SpanContext(
        trace_id=int(match[1], 16), span_id=int(match[2], 16), is_remote=True, trace_flags=TraceFlags(int(match[3], 16))
    )
    return context if context.is_valid else None


def _parent_context(parent_traceparent: str) -> Context | None:
    remote = parse_traceparent(parent_traceparent) if parent_traceparent else None
    # None lets the tracer take the current span.
    return None if remote is None else trace.set_span_in_context(NonRecordingSpan(remote))
