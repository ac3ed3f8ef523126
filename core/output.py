"""Output of the `dormouse` command: JSON, tables, times. Knows no command."""

import json
import sys
from collections.abc import Iterable
from typing import Any, Final

import click

from dormouse.core.errortext import gist
from dormouse.core.terminal import harmless, harmless_json, own
from dormouse.schemas.errors import DormouseError

MIN_LAST: Final = 12
"""Characters of a table's last column beside which the others stand on one line."""

SHORT: Final = 12
"""Characters of a value that is kept on one line before the words of headers are."""


shown: Final[list[str]] = []
"""Has "json" once a command has printed a document: a failure after that is no second one."""


def show_json(value: Any) -> None:
    shown.append("json")
    click.echo(harmless_json(json.dumps(value, indent=2, ensure_ascii=False)))


def show_answer(answer: bytes) -> None:
    """JSON as it came."""
    click.echo(harmless_json(answer.decode(errors="replace")))


def show_bytes(kind: str, pieces: Iterable[bytes]) -> None:
    """An answer of this content type: to a file as it is, and to a terminal only text. Raises DormouseError."""
    looked_at = sys.stdout.isatty()
    if looked_at and not kind.startswith("text/"):
        raise DormouseError("the answer is bytes: write them to a file (`dormouse ... > FILE`)")
    sink = (sys.stdout if looked_at else own(sys.stdout)).buffer
    for piece in pieces:
        sink.write(piece)
        sink.flush()


def over(text: str) -> None:
    """A line of progress, in the place of the one before, for who looks."""
    if sys.stderr.isatty():
        own(sys.stderr).write(f"\r\033[K{harmless(text)}")
        own(sys.stderr).flush()


def clear() -> None:
    """The screen, for a new one."""
    own(sys.stdout).write("\033[2J\033[1;1H")


def _fitted(columns: list[str], cells: list[list[str]], width: int) -> list[int] | None:
    """Of each column, for lines that break between words: short values and words of long ones stay whole, words of
    headers if there is room. None if there is none for the values.
    """
    texts = [[line[place] for line in cells] for place in range(len(columns))]
    least = [max(len(text) if len(text) <= SHORT else _longest_word(text) for text in column) for column in texts]
    whole = [max(_longest_word(column), of_values) for column, of_values in zip(columns, least, strict=True)]
    wanted = [max(map(len, [column, *text])) for column, text in zip(columns, texts, strict=True)]
    widths = whole if sum(whole) + len(whole) <= width else least
    left = width - sum(widths) - len(widths)
    for _ in range(max(0, left)):  # one more to the column that would be broken most often
        place = max(range(len(columns)), key=lambda place: wanted[place] / max(1, widths[place]))
        widths[place] += wanted[place] > widths[place]
    return None if left < 0 else widths


def _longest_word(text: str) -> int:
    return max(map(len, text.split()), default=0)


def _cell(text: str) -> str:
    """In one line: of what has several, their gist."""
    return gist(text) if "\n" in text else text


def table(rows: list[dict[str, Any]], columns: list[str]) -> None:
    """A table of some columns; plain tab-separated text when nobody looks."""
    if not rows:
        return
    cells = [["-" if row.get(column) is None else harmless(str(row[column])) for column in columns] for row in rows]
    if not sys.stdout.isatty():
        for line in [columns, *cells]:
            click.echo("\t".join(map(_cell, line)))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console(file=own(sys.stdout), markup=False, emoji=False)  # cells are text, whatever they have in brackets
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    narrow = sum(widths) + 2 * (len(widths) - 1) > console.width
    whole = sum(widths[:-1]) + len(widths) + MIN_LAST <= console.width
    shown = Table(box=None, header_style="bold", pad_edge=False, collapse_padding=narrow)
    fitted = None if whole or not narrow else _fitted(columns, cells, console.width)
    for place, column in enumerate(columns):
        first = place + 1 < len(columns)  # what is long is last: an error, a reason
        width = fitted[place] if fitted else None
        shown.add_column(column, no_wrap=whole and first, overflow="fold", width=width)
    for line in cells:
        shown.add_row(*map(_cell, line))
    console.print(shown)
