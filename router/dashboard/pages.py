"""The dashboard's files, as they lie beside this module. They reveal nothing of the node, and need no key."""

from pathlib import Path
from typing import Final

from dormouse.router.front.exchange import HttpError, refuse

PLACE: Final = Path(__file__).parent / "static"
FIRST: Final = "index.html"
KINDS: Final = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
HEADERS: Final = (
    (
        b"content-security-policy",
        b"default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'; "
        b"require-trusted-types-for 'script'; trusted-types 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-cache"),  # the next version of the node has others
)


class PageFiles:
    """All of them, read once."""

    def __init__(self) -> None:
        self._files = {path.name: path.read_bytes() for path in PLACE.iterdir() if path.suffix in KINDS}

    def file(self, name: str) -> tuple[bytes, bytes]:
        """Its bytes and their type. Raises HttpError."""
        name = name or FIRST
        if (data := self._files.get(name)) is None:
            raise missing(name)
        return data, KINDS[Path(name).suffix]


def missing(name: str) -> HttpError:
    return refuse(404, "unknown_route", f"the dashboard has no file {name}; it is at /")
