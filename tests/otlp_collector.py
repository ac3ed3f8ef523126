"""A collector of OTLP over HTTP for tests: real requests, decoded by the protocol's own classes."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector:
    """``spans`` are all that came; while ``hanging`` is set, or ``status`` is no 200, nothing is taken."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, str]] = []
        self.tries = 0
        self.status = 200
        self.goes_on = threading.Event()
        self.goes_on.set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["content-length"]))
                collector.tries += 1
                collector.goes_on.wait()
                if collector.status == 200 and self.path == "/v1/traces":
                    collector.take(data)
                self.send_response(collector.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def take(self, data: bytes) -> None:
        for one in ExportTraceServiceRequest.FromString(data).resource_spans:
            self.resources.append({each.key: each.value.string_value for each in one.resource.attributes})
            for scope in one.scope_spans:
                self.spans += scope.spans

    def of(self, trace: str) -> dict[str, Any]:
        """The spans of one trace, by name."""
        return {span.name: span for span in list(self.spans) if span.trace_id.hex() == trace}

    def close(self) -> None:
        self.goes_on.set()
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    try:
        yield collector
    finally:
        collector.close()
