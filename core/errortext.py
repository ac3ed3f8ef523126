"""Shortens the text of a user's exception where the whole has no room, or is not for the reader to see. Pure.

A text is a traceback as Python writes it, or a sentence; after it come hints, lines that begin with HINT.
"""

import re
from typing import Final

HINT: Final = "dormouse: "
"""Begins a line of ours after what the exception says."""

GIST_CHARS: Final = 200
OUTWARD_CHARS: Final = 2000

_BEGINS: Final = "Traceback (most recent call last)"
_GROUP: Final = re.compile(r"^  [|+] ?")
_PART: Final = re.compile(r"^\s*\+-\+-")
_PATH: Final = re.compile(r"(?<![\w/:])/(?:[^\s/'\":,;()]+/)+")


def gist(text: str) -> str:
    """One line: of a traceback, what was raised, with the first line of what it says."""
    raised = _raised(text) or [""]
    return raised[0][:GIST_CHARS] + (" …" if len(raised) > 1 else "")


def hints(text: str) -> list[str]:
    return [line.removeprefix(HINT) for line in text.splitlines() if line.startswith(HINT)]


def traced(text: str) -> bool:
    """Whether there are frames in it."""
    return _BEGINS in text or '  File "' in text


def outward(text: str) -> str:
    """For those who may not read the function's log: no frame of its code, and of a path its last part."""
    if not traced(text):
        return text
    said: list[str] = []
    frame = False
    for line in _raised(text):
        frame = line.lstrip().startswith('File "') or (frame and line.startswith("    "))
        if frame:  # it is left out, and so is what announces it
            said[-1:] = [before.removesuffix(", issued by") for before in said[-1:]]
        elif _BEGINS not in line:
            said.append(_PATH.sub("", line))
    whole = "\n".join(said)
    return "\n".join([whole[:OUTWARD_CHARS], *hints(text), "the function's log has the rest"])


def _raised(text: str) -> list[str]:
    """The exception, which follows the last traceback's frames, and these are indented; then the rest of its text."""
    lines = [line for line in text.rstrip().splitlines() if not line.startswith(HINT)]
    while lines and not lines[0].strip():
        del lines[0]
    whole = next((number for number, line in enumerate(lines) if _PART.match(line)), len(lines))
    if whole < len(lines):  # a group of exceptions: its own line comes before those of its parts
        lines = [_GROUP.sub("", line) for line in lines[:whole]]
    begin = (
        max(
            (
                number
                for number, line in enumerate(lines)
                if line.startswith(("Traceback", "Exception Group Traceback"))
            ),
            default=-1,
        )
        + 1
    )
    if begin == 0 and lines and lines[0].lstrip().startswith('File "'):  # a SyntaxError's, maybe stripped
        begin = 1
    traced = begin > 0
    found = next((n for n in range(begin, len(lines)) if not (traced and lines[n].startswith("  "))), len(lines) - 1)
    return lines[max(0, found) :]
