"""Common parts of both clients beside wire.py: the settings of httpx2, and the meaning of its errors."""

from collections.abc import Mapping
from typing import Any, Final

import httpx2

from dormouse.client.errors import CallTimeout, ConnectionBroke, Unreached
from dormouse.client.wire import Came, HttpReply, ToSend

CONNECT_S: Final = 5.0


def settings(url: str, key: str | None, headers: Mapping[str, str] | None, verify: Any) -> dict[str, Any]:
    """Of httpx2's client. Raises ValueError."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url!r} is no address of a node; write one such as http://127.0.0.1:8700")
    said = dict(headers or {})
    if key is not None:
        said["Authorization"] = f"Bearer {key}"
    return {"base_url": url, "headers": said, "verify": verify, "follow_redirects": False}


def timeouts(seconds: float | None) -> httpx2.Timeout:
    """A function has a time limit of its own: by default its answer is waited for."""
    connect_s = CONNECT_S if seconds is None else min(CONNECT_S, seconds)
    return httpx2.Timeout(seconds, connect=connect_s)


def request(send: ToSend) -> dict[str, Any]:
    """Of httpx2's ``build_request``."""
    return {
        "method": send.method,
        "url": send.path,
        "headers": dict(send.headers),
        "content": send.content,
        "timeout": timeouts(send.timeout_s),
    }


def headers(response: httpx2.Response) -> dict[str, str]:
    return {name.lower(): value for name, value in response.headers.items()}


def reply(response: httpx2.Response) -> HttpReply:
    return HttpReply(response.status_code, headers(response), response.content)


def failed(error: httpx2.TransportError, url: str) -> Came:
    if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.PoolTimeout):
        return Unreached(f"no node answers at {url}: {error}; see `dormouse status` there")
    if isinstance(error, httpx2.TimeoutException):
        return CallTimeout(f"{url} has not answered within the timeout of this call")
    return ConnectionBroke(f"the connection to {url} ended before the answer did: {error}")
