"""The command line's way to a node: HTTP over the router's Unix socket, with the standard library only.

Importing this is cheap on purpose: every `dormouse` command pays for it.
"""

import http.client
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

CONNECT_S: Final = 5.0


class Unreachable(Exception):
    """No node answers there."""


class Refused(Exception):
    """The node answered with an error."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float | None) -> None:
        super().__init__("localhost", timeout=CONNECT_S)
        self._path = path
        self._timeout_s = timeout_s

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.sock.settimeout(CONNECT_S)
            self.sock.connect(self._path)
            self.sock.settimeout(self._timeout_s)
        except BaseException:
            self.sock.close()
            raise


class AdminClient:
    """Calls to one node. ``run`` is its run directory."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self._path = str(run / "t" / "admin")

    @contextmanager
    def _exchange(
        self, method: str, path: str, body: bytes | None, timeout_s: float | None
    ) -> Iterator[http.client.HTTPResponse]:
        connection = _UnixConnection(self._path, timeout_s)
        try:
            try:
                # A node that refuses before it has read the body closes, and what it said is there to be read.
                with suppress(BrokenPipeError, ConnectionResetError):
                    connection.request(method, path, body, {"Content-Type": "application/json"})
                response = connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                raise Unreachable(
                    f"no node answers in {self.run} ({error}); start one with `dormouse up`, or name another with --run"
                ) from error
            with response:
                if response.status >= 400:
                    raise _refusal(response)
                yield response
        finally:
            connection.close()

    def call(self, method: str, path: str, value: Any = None, timeout_s: float | None = 60.0) -> Any:
        """One exchange of JSON. Raises Refused, Unreachable."""
        body = None if value is None else json.dumps(value).encode()
        with self._exchange(method, path, body, timeout_s) as response:
            return json.loads(response.read())

    def invoke(self, name: str, body: bytes) -> bytes:
        with self._exchange("POST", f"/functions/{quote(name, safe='')}/invoke", body, None) as response:
            return response.read()

    def logs(self, name: str, lines: int, follow: bool) -> Iterator[bytes]:
        """The log in pieces; without end if ``follow``."""
        path = f"/admin/functions/{quote(name, safe='')}/logs?tail={lines}&follow={int(follow)}"
        with self._exchange("GET", path, None, None if follow else 60.0) as response:
            while piece := response.read1(65536):
                yield piece

    def remove(self, name: str) -> Any:
        return self.call("DELETE", f"/admin/functions/{quote(name, safe='')}")


def _refusal(response: http.client.HTTPResponse) -> Refused:
    data = response.read()
    try:
        error = json.loads(data)["error"]
        return Refused(response.status, error["code"], error["message"])
    except (ValueError, KeyError, TypeError):
        return Refused(response.status, "unknown", os.fsdecode(data[:500]))
