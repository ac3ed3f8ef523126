"""Requests as spans of OpenTelemetry: one of each request, and one of each part of its time below it.

Their ids are those that the function has received, so that its own outgoing requests hang below the request.
"""

from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags, Tracer
from opentelemetry.trace.span import TraceState

from dormouse.schemas import messages as m


class GivenIds(RandomIdGenerator):
    """Numbers for the next span; else random ones."""

    def __init__(self) -> None:
        self.trace = self.span = 0

    def generate_trace_id(self) -> int:
        given, self.trace = self.trace, 0
        return given or super().generate_trace_id()

    def generate_span_id(self) -> int:
        given, self.span = self.span, 0
        return given or super().generate_span_id()


_ROOT: Final = Context()


def emit(tracer: Tracer, ids: GivenIds, request: m.TracedRequest) -> None:
    ids.trace, ids.span = int(request.trace[3:35], 16), int(request.trace[36:52], 16)
    attributes: dict[str, str | int] = {
        "dormouse.function": request.function,
        "dormouse.tenant": request.tenant,
        "dormouse.request_id": request.id,
        "dormouse.outcome": request.outcome,
    }
    if request.source:
        attributes["dormouse.model"] = request.source
    if request.status:
        attributes["http.response.status_code"] = request.status
    began_ns = request.began_ns
    span = tracer.start_span(
        request.function, _above(request), kind=SpanKind.SERVER, attributes=attributes, start_time=began_ns
    )
    ids.trace = 0  # with a span above it, it was not asked for
    if request.status >= 500:
        span.set_status(Status(StatusCode.ERROR, request.outcome))
    below = trace.set_span_in_context(span, _ROOT)
    for name, spent_s in request.spent_s.items():
        ended_ns = began_ns + round(spent_s * 1e9)
        part = _part(tracer, below, name, began_ns, ended_ns)
        if name == "run" and request.copy_s is not None:
            copied_ns = min(began_ns + round(request.copy_s * 1e9), ended_ns)
            _part(tracer, trace.set_span_in_context(part, _ROOT), "copy", began_ns, copied_ns)
        began_ns = ended_ns
    span.end(began_ns)


def _part(tracer: Tracer, above: Context, name: str, began_ns: int, ended_ns: int) -> Span:
    span = tracer.start_span(name, above, start_time=began_ns)
    span.end(ended_ns)
    return span


def _above(request: m.TracedRequest) -> Context:
    parent = int(request.above, 16)
    if not parent:
        return _ROOT
    state = TraceState.from_header([request.state] if request.state else [])
    flags = TraceFlags(TraceFlags.SAMPLED)
    context = SpanContext(int(request.trace[3:35], 16), parent, is_remote=True, trace_flags=flags, trace_state=state)
    return trace.set_span_in_context(trace.NonRecordingSpan(context), _ROOT)
