"""This Dormouse's version, where two processes must agree: the package's version, and how messages are declared.

A node writes it into its run directory before anything else there can be misread; a command that exchanges messages
with a node (not HTTP) compares. Messages have no versions of their own, because a node's processes start together.
"""

import hashlib
import importlib.metadata
import tomllib
from pathlib import Path

from dormouse.core.paths import RunPaths
from dormouse.schemas import messages, stream
from dormouse.schemas.errors import ConfigError


def this_version() -> str:
    """For example ``0.1.0 (messages 3f2a91c0)``.

    The sources' hash, comments included: what a message means is not only in its fields, and asking for a restart too
    often does no harm.
    """
    files = [*sorted(Path(str(messages.__file__)).parent.glob("*.py")), Path(str(stream.__file__))]
    sources = b"".join(file.read_bytes() for file in files)
    return f"{package_version()} (messages {hashlib.sha256(sources).hexdigest()[:8]})"


def package_version() -> str:
    """For example ``0.1.0``."""
    try:
        return importlib.metadata.version("dormouse")
    except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
        project = tomllib.loads(Path(__file__).resolve().parents[1].joinpath("pyproject.toml").read_text())
        return str(project["project"]["version"])


def expect_same_version(run: str) -> None:
    """Raises ConfigError if the node in ``run`` would not understand this process, OSError if there is no node."""
    paths = RunPaths(run)
    try:
        theirs = paths.version.read_text()
    except FileNotFoundError:
        paths.pid.stat()  # a node from before there were versions, or none?
        theirs = "of an older version"
    ours = this_version()
    if theirs != ours:
        raise ConfigError(
            f"this node runs Dormouse {theirs}, this command is Dormouse {ours}: "
            "restart the node (`dormouse down`, `dormouse up`) or use its own command"
        )
