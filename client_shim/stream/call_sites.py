"""Finds the line that issued an operation: the nearest frame that is neither PyTorch's nor ours, kept cheaply, named
only when an error is raised.

A site is (code object, instruction offset); the line number is looked up later, because `f_lineno` decodes a table
each time.
"""

import sys
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import CodeType

import torch

Site = tuple[CodeType, int]

HIDDEN = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
MAX_FILES = 1 << 14


@lru_cache(MAX_FILES)
def is_hidden(filename: str) -> bool:
    return filename.startswith((*HIDDEN, "<"))


def call_site(depth: int = 2) -> Site | None:
    """The nearest caller outside PyTorch and this package, `depth` frames up at least."""
    frame = sys._getframe(depth)
    while frame is not None:
        code = frame.f_code
        # By its file: code that torch.compile made holds constants that have no hash, and so has none itself.
        if not is_hidden(code.co_filename):
            return code, frame.f_lasti
        frame = frame.f_back  # type: ignore[assignment]
    return None


def describe(site: Site) -> str:
    code, instruction = site
    positions = next(islice(code.co_positions(), instruction // 2, None), (None,) * 4)
    return f'File "{code.co_filename}", line {positions[0] or code.co_firstlineno}, in {code.co_name}'
