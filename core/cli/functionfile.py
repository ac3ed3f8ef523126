"""Finds a function's file for a command. If a folder has none, a file that Python cannot read may be the cause.

`core.folder` looks for a name in the files' text only, as the router knows it too, and parses nothing.
"""

import warnings
from pathlib import Path
from typing import Final

from dormouse.core import folder

_MOST: Final = 100
"""Files that are tried: more than a function's folder has beside each other."""

_MAX_NBYTES: Final = 1 << 20
"""Of one: nobody writes more by hand."""


def find(path: Path) -> folder.FunctionFolder:
    """Raises NoFunction."""
    try:
        return folder.find(path)
    except folder.NoFunction as error:
        names = sorted(path.glob("*.py"))[:_MOST] if path.is_dir() else []
        if broken := [why for name in names if name.is_file() and (why := _broken(name))]:
            more = f" (and {len(broken) - 1} more files)" if len(broken) > 1 else ""
            raise folder.NoFunction(f"{broken[0]}{more}: that may be why {error}") from error
        raise


def _broken(file: Path) -> str:
    """Why Python cannot read it; "" if it can."""
    with open(file, "rb") as opened:
        source = opened.read(_MAX_NBYTES + 1)
    if len(source) > _MAX_NBYTES:
        return ""
    try:
        with warnings.catch_warnings(action="ignore"):
            compile(source, str(file), "exec", dont_inherit=True)
    except SyntaxError as error:
        where = f" in line {error.lineno}" if error.lineno else ""
        return f"{file.name} has an error{where}: {error.msg}"
    except (ValueError, RecursionError, MemoryError) as error:
        return f"{file.name} cannot be read as Python: {error or type(error).__name__}"
    return ""
