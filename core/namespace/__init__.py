"""The package ``dormouse`` itself: its version, and the names that files of functions import. The folders at the top of
the repository are its subpackages.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dormouse.client.inside import acall, call
    from dormouse.core.answers import PublicError, Response

__all__ = ["PublicError", "Response", "acall", "call"]


def __getattr__(name: str) -> Any:
    if name == "__version__":  # looked up when somebody asks: reading metadata takes longer than most imports here
        from importlib.metadata import version

        return version("dormouse")
    if name in ("acall", "call"):
        from dormouse.client import inside

        return getattr(inside, name)
    if name in __all__:
        from dormouse.core import answers

        return getattr(answers, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
