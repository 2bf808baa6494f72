"""The trace that a caller is in, as W3C trace context, without needing a tracing library."""

import sys


def current_traceparent() -> str:
    """Return the W3C `traceparent` of the OpenTelemetry span that is current here; empty where there is none.

    A program that traces has loaded OpenTelemetry; where nobody has, there is no span, and this loads nothing.
    """
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return ""
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return ""
    trace_id, span_id = trace.format_trace_id(context.trace_id), trace.format_span_id(context.span_id)
    return f"00-{trace_id}-{span_id}-{int(context.trace_flags):02x}"
