"""Logs: one JSON object per line, constant event names, values as keys; one bounded file per process."""

import logging
import logging.handlers
import sys
from pathlib import Path
from typing import Any, Final

import orjson

# structlog imports rich, where it is installed, for tracebacks in colour, which no log of ours has: half of what the
# start of a small process takes. A later import of rich succeeds.
_hidden = sys.modules.setdefault("rich", None) is None  # type: ignore[arg-type]
import structlog  # noqa: E402

if _hidden:
    del sys.modules["rich"]

ROTATE_NBYTES: Final = 4 << 20


def _dumps(value: dict[str, Any], **_: Any) -> str:
    return orjson.dumps(value, default=str).decode()


def configure(role: str, path: Path | None, level: str = "info") -> None:
    """Send everything, the standard library's records too, to ``path`` (rotated once), or to stderr."""
    handler: logging.Handler
    if path is None:
        handler = logging.StreamHandler(sys.stderr)
    else:
        try:
            handler = logging.handlers.RotatingFileHandler(path, maxBytes=ROTATE_NBYTES, backupCount=1)
        except OSError:  # while the disk takes no file, a process does without: each record tries again
            handler = logging.handlers.RotatingFileHandler(path, maxBytes=ROTATE_NBYTES, backupCount=1, delay=True)
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(_dumps),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(role=role)


def get_logger() -> Any:
    return structlog.get_logger()
