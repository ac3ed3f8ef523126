"""What a function may require of pip: pure. Reads requirements, and refuses by name what no environment can have.

Only names with versions: an address, a path or an option of pip would reach what the node's owner has not chosen. torch
is the node's own, in its version.
"""

import re
import tomllib
from collections.abc import Iterator
from typing import Final

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

MOST_NBYTES: Final = 32 << 10
MOST_LINES: Final = 500

CUDA: Final = re.compile(r"nvidia-.*|triton|pytorch-triton|cuda-.*")
"""What a build of torch for GPUs brings along."""


class RequirementsRefused(Exception):
    """``code`` says why, the text what to do."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


def of_project(text: str) -> str:
    """The dependencies that a pyproject.toml names, one a line. Raises RequirementsRefused."""
    try:
        project = tomllib.loads(text).get("project", {})
        found = project.get("dependencies", []) if isinstance(project, dict) else []
    except tomllib.TOMLDecodeError as error:
        raise RequirementsRefused("bad_requirements", f"pyproject.toml is not TOML: {error}") from None
    if not isinstance(found, list) or not all(isinstance(each, str) and "\n" not in each for each in found):
        raise RequirementsRefused("bad_requirements", "dependencies in pyproject.toml is no list of lines of text")
    return "".join(f"{each}\n" for each in found)


def checked(text: str, torch: str) -> str:
    """The requirements, one a line, or ""; ``torch`` is the node's version. Raises RequirementsRefused."""
    if len(text.encode()) > MOST_NBYTES:
        raise RequirementsRefused("bad_requirements", f"the requirements have more than {MOST_NBYTES:,} bytes")
    lines = list(_lines(text))
    if len(lines) > MOST_LINES:
        raise RequirementsRefused("bad_requirements", f"there are {len(lines)} requirements; at most {MOST_LINES}")
    for line in lines:
        _check(line, torch)
    return "".join(f"{line}\n" for line in lines)


def _lines(text: str) -> Iterator[str]:
    for line in text.replace("\\\n", " ").splitlines():
        if line := re.sub(r"(^|\s)#.*", "", line).strip():
            yield line


def _check(line: str, torch: str) -> None:
    if line.startswith("-"):
        text = (
            f"{line[:80]!r} is an option of pip: the node file says which index there is ([environments]); leave it out"
        )
        raise RequirementsRefused("bad_requirements", text)
    try:
        wanted = Requirement(re.sub(r"\s--hash[= ]\S+", "", line))
    except InvalidRequirement:
        text = f"{line[:80]!r} is no requirement; write a name and versions, such as numpy>=2, and no path"
        raise RequirementsRefused("bad_requirements", text) from None
    if wanted.url is not None:
        text = f"{wanted.name} is named by an address; write {wanted.name}==VERSION, to be had from the node's index"
        raise RequirementsRefused("bad_requirements", text)
    name = str(canonicalize_name(wanted.name))
    here = wanted.marker is None or wanted.marker.evaluate()
    if here and CUDA.fullmatch(name):
        text = f"{name} is a part of CUDA, which no instance has: it computes on GPUs through the node's torch {torch}"
        raise RequirementsRefused("cuda_refused", f"{text}; leave it out")
    if here and name == "torch" and not wanted.specifier.contains(torch, prereleases=True):
        cuda = re.search(r"\+(cu|rocm|xpu)", str(wanted.specifier)) is not None
        why = "is a build for GPUs" if cuda else "is another version"
        text = f"{line[:80]!r} {why}: functions have the node's torch {torch}; write torch without a version"
        raise RequirementsRefused("cuda_refused" if cuda else "torch_held", text)
