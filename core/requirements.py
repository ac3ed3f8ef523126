"""Checks a function's requirements for pip: pure. Refuses by name those that no environment can have.

Only names with versions: an address, a path or an option of pip would reach places that the node's owner has not
chosen. torch is the node's own, in its version.
"""

import re
import tomllib
from collections.abc import Iterator
from typing import Final

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from dormouse.core import nottoml

MAX_NBYTES: Final = 32 << 10
MAX_PROJECT_NBYTES: Final = 256 << 10
"""Of a pyproject.toml, which has more in it."""

MAX_LINES: Final = 500

CUDA: Final = re.compile(r"nvidia-.*|triton|pytorch-triton|cuda-.*")
"""Packages that a build of torch for GPUs brings along."""

_HASH: Final = re.compile(r"\s--hash[= ](\w+:[0-9a-fA-F]+)(?=\s|$)")
_NOT_WRITTEN: Final = re.compile(r"\$\{|\s-")
"""pip puts a variable of its environment in the place of ``${NAME}``, and what follows a dash is an option."""

MAX_DOTS: Final = 200
"""In a line of TOML: tomllib's time grows with the square of a name's parts, a.b.c, and with each line below it."""


class RequirementsRefused(Exception):
    """``code`` says why, the text what to do."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


def of_project(text: str) -> str:
    """The dependencies that a pyproject.toml names, one a line. Raises RequirementsRefused."""
    if any(line.count(".") > MAX_DOTS for line in text.split("\n")):  # no name goes over a line's end
        said = f"a line of pyproject.toml has more than {MAX_DOTS} dots; write its dependencies one a line"
        raise RequirementsRefused("bad_requirements", said)
    try:
        project = tomllib.loads(text.removeprefix("\ufeff")).get("project", {})
    except (ValueError, RecursionError) as error:  # also of a number with thousands of digits
        said = f"pyproject.toml is not TOML: {nottoml.cause(text, error)}"
        raise RequirementsRefused("bad_requirements", said) from None
    if not isinstance(project, dict):
        raise RequirementsRefused("bad_requirements", "project in pyproject.toml is no table; write [project]")
    dynamic = project.get("dynamic")
    if isinstance(dynamic, list) and "dependencies" in dynamic:
        text = (
            "pyproject.toml says that its dependencies are dynamic, and nothing of it is run here; write them as "
            "[project] dependencies, or into requirements.txt"
        )
        raise RequirementsRefused("bad_requirements", text)
    found = project.get("dependencies", [])
    if not isinstance(found, list) or not all(isinstance(each, str) and "\n" not in each for each in found):
        raise RequirementsRefused("bad_requirements", "dependencies in pyproject.toml is no list of lines of text")
    return "".join(f"{each}\n" for each in found)


def checked(text: str, torch: str) -> str:
    """The requirements, one a line, or ""; ``torch`` is the node's version. Raises RequirementsRefused."""
    if len(text.encode()) > MAX_NBYTES:
        raise RequirementsRefused("bad_requirements", f"the requirements have more than {MAX_NBYTES:,} bytes")
    lines = list(_lines(text))
    if len(lines) > MAX_LINES:
        raise RequirementsRefused("bad_requirements", f"there are {len(lines)} requirements; at most {MAX_LINES}")
    return "".join(f"{_checked(line, torch)}\n" for line in lines)


def _lines(text: str) -> Iterator[str]:
    for line in text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\\\n", " ").splitlines():
        if line := re.sub(r"(^|\s)#.*", "", line).strip():
            yield line


def _checked(line: str, torch: str) -> str:
    """The line for pip: written anew from the parsed parts, and never the caller's line."""
    if line.startswith("-"):
        text = (
            f"{line[:80]!r} is an option of pip: the node file says which index there is ([environments]); leave it out"
        )
        raise RequirementsRefused("bad_requirements", text)
    try:
        text = str(Requirement(_HASH.sub("", line)))
        wanted = Requirement(text)
        here = wanted.marker is None or wanted.marker.evaluate()
        holds = wanted.specifier.contains(torch, prereleases=True)
    except (InvalidRequirement, ValueError, LookupError, RecursionError):  # the last three: of a marker or a version
        text = f"{line[:80]!r} is no requirement; write a name and versions, such as numpy>=2, and no path"
        raise RequirementsRefused("bad_requirements", text) from None
    if wanted.url is not None:
        text = f"{wanted.name} is named by an address; write {wanted.name}==VERSION, to be had from the node's index"
        raise RequirementsRefused("bad_requirements", text)
    if _NOT_WRITTEN.search(text):
        raise RequirementsRefused("bad_requirements", f"{line[:80]!r} has a variable or an option in it; leave it out")
    written = " ".join([text, *(f"--hash={each}" for each in _HASH.findall(line))])
    name = str(canonicalize_name(wanted.name))
    if here and CUDA.fullmatch(name):
        text = f"{name} is a part of CUDA, which no instance has: it computes on GPUs through the node's torch {torch}"
        raise RequirementsRefused("cuda_refused", f"{text}; leave it out")
    if here and name == "torch" and not holds:
        cuda = re.search(r"\+(cu|rocm|xpu)", str(wanted.specifier)) is not None
        why = "is a build for GPUs" if cuda else "is another version"
        text = f"{line[:80]!r} {why}: functions have the node's torch {torch}; write torch without a version"
        raise RequirementsRefused("cuda_refused" if cuda else "torch_held", text)
    if here and name == "torch" and "+" in str(wanted.specifier):
        return name  # the node's own build, by a name that its files need not have
    return written
