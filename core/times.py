"""Format of times, everywhere: ISO 8601 in UTC, so that two machines and two commands agree."""

from datetime import UTC, datetime


def utc(unix_s: float) -> str:
    """A time of the Unix clock, to the second."""
    return f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%dT%H:%M:%SZ}"
