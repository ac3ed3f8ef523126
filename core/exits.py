"""Exit statuses that are known beyond the command line; the others are in core/cli/frame.py."""

from typing import Final

UNREACHABLE: Final = 4
"""Of a command that finds no node."""

SESSION_ENDED: Final = 75
"""Of a `dormouse run` program whose node has gone: sysexits.h has it for "try again later"."""
