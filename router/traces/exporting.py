"""Export of spans to an OTLP endpoint, on a thread of OpenTelemetry's SDK, and its counts. Bounded.

An endpoint that hangs has its time and no more, then the next batch is sent; spans that do not fit meanwhile are
dropped.
"""

import logging
import threading
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from dormouse.core.config import TracingSection
from dormouse.router.traces.spans import GivenIds, emit
from dormouse.schemas import messages as m

MAX: Final = 8192
"""Spans that wait, some 10 MB."""

BATCH: Final = 512
PAUSE_MS: Final = 500
ANSWER_S: Final = 5.0
"""For the endpoint to take a batch, with what the SDK tries again."""

STOP_S: Final = 2.0
TROUBLE_CHARACTERS: Final = 300


class _Trouble(logging.Handler):
    """The last thing of which the SDK complained. Its words go nowhere else: it would repeat them for days."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()[:TROUBLE_CHARACTERS]


class _Counting(SpanExporter):
    """``spans`` by whether the endpoint took them. Called by one thread."""

    def __init__(self, exporter: SpanExporter, trouble: _Trouble) -> None:
        self._exporter, self._trouble = exporter, trouble
        self.exported = self.failed = 0
        self.why = ""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._trouble.text = ""
        result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            self.why = ""  # before the count, by which others know that there is news
            self.exported += len(spans)
        else:
            self.why = self._trouble.text or "the endpoint does not take them"
            self.failed += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


def address(endpoint: str) -> str:
    """Without a path, OTLP's own."""
    return endpoint if urlsplit(endpoint).path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"


class Exporting:
    """``node`` is the name of this one."""

    def __init__(self, config: TracingSection, node: str) -> None:
        trouble = _Trouble()
        logger = logging.getLogger("opentelemetry")
        logger.addHandler(trouble)
        logger.propagate = False
        self._counting = _Counting(OTLPSpanExporter(address(config.endpoint), timeout=ANSWER_S), trouble)
        self._processor = BatchSpanProcessor(
            self._counting, max_queue_size=MAX, schedule_delay_millis=PAUSE_MS, max_export_batch_size=BATCH
        )
        self._ids = GivenIds()
        provider = TracerProvider(
            sampler=ALWAYS_ON,
            resource=Resource.create({SERVICE_NAME: "dormouse", SERVICE_INSTANCE_ID: node}),
            id_generator=self._ids,
            shutdown_on_exit=False,
        )
        provider.add_span_processor(self._processor)
        self._tracer = provider.get_tracer("dormouse")
        self._taken = self._dropped = 0

    def put(self, requests: Sequence[m.TracedRequest]) -> None:
        for request in requests:
            spans = 1 + len(request.spent_s) + (request.copy_s is not None)
            done = self._counting.exported + self._counting.failed
            if self._taken - done + spans > MAX:
                self._dropped += spans
            else:
                self._taken += spans
                emit(self._tracer, self._ids, request)

    @property
    def busy(self) -> bool:
        """Whether spans wait."""
        return self._counting.exported + self._counting.failed < self._taken

    @property
    def said(self) -> m.SpansSent:
        counting = self._counting
        return m.SpansSent(
            exported=counting.exported, failed=counting.failed, dropped=self._dropped, trouble=counting.why
        )

    def close(self) -> None:
        """Send the waiting spans, if that is quick."""
        ending = threading.Thread(target=self._processor.shutdown, daemon=True)
        ending.start()
        ending.join(STOP_S)
