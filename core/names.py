"""Names of functions and tenants, and their grammar: files, cgroups and paths of URLs are made of them."""

import re
from typing import Final

NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def beside(name: str, version: int) -> str:
    """The name of a version that is served beside the one that has the function's name."""
    return f"{name}@{version}"


def base_of(name: str) -> str:
    """The function whose version is called so; its own name is that of the function."""
    return name.partition("@")[0]
