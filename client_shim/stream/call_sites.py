"""Which line issued an operation: the nearest frame that is neither PyTorch's nor ours, kept cheaply, named only when
an error is raised.

A site is (code object, instruction offset); the line number is looked up later, because `f_lineno` decodes a table
each time.
"""

import sys
from itertools import islice
from pathlib import Path
from types import CodeType

import torch

Site = tuple[CodeType, int]

HIDDEN = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_hidden: dict[CodeType, bool] = {}


def call_site(depth: int = 2) -> Site | None:
    """The nearest caller outside PyTorch and this package, `depth` frames up at least."""
    frame = sys._getframe(depth)
    hidden = _hidden
    while frame is not None:
        code = frame.f_code
        skip = hidden.get(code)
        if skip is None:
            skip = hidden[code] = code.co_filename.startswith(HIDDEN) or code.co_filename.startswith("<")
        if not skip:
            return code, frame.f_lasti
        frame = frame.f_back  # type: ignore[assignment]
    return None


def describe(site: Site) -> str:
    code, instruction = site
    positions = next(islice(code.co_positions(), instruction // 2, None), (None,) * 4)
    return f'File "{code.co_filename}", line {positions[0] or code.co_firstlineno}, in {code.co_name}'
