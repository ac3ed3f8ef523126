"""Places that a build may reach, as ``HOST:PORT``."""

from collections.abc import Iterable
from typing import Final
from urllib.parse import SplitResult, urlsplit

PORTS: Final = {"http": 80, "https": 443}

FILES_OF_INDEX: Final = {"pypi.org:443": "files.pythonhosted.org:443"}
"""The host of a well-known index's files, if that is another one."""


def place_of(url: SplitResult) -> str:
    """Raises ValueError for one without a host, or with a port that is none."""
    port = url.port or PORTS.get(url.scheme, 443)
    if not url.hostname:
        raise ValueError("no host")
    return f"[{url.hostname}]:{port}" if ":" in url.hostname else f"{url.hostname}:{port}"


def places(urls: Iterable[str], hosts: Iterable[str]) -> tuple[str, ...]:
    """Of these addresses, as far as they are of a network, and of these hosts. Raises ValueError."""
    found = [place_of(url) for each in urls if (url := urlsplit(each)).scheme in PORTS]
    found += [FILES_OF_INDEX[each] for each in found if each in FILES_OF_INDEX]
    for each in hosts:
        url = urlsplit(f"https://{each}")
        if url.netloc != each or url.username is not None:
            raise ValueError(f"{each!r} is more than a host")
        found.append(place_of(url))
    return tuple(dict.fromkeys(found))
