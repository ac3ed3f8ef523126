"""Changes to the files of secrets and keys, each durable when it is answered. They are made outside the router's loop,
because they wait for a disk, and one after the other, in the order of their requests. Decides nothing.
"""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import ParamSpec, TypeVar

from dormouse.router.front.exchange import refuse
from dormouse.schemas.errors import ConfigError

P = ParamSpec("P")
T = TypeVar("T")


class FileChanges:
    """See the module."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "changes")

    async def make(self, what: str, change: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """``what``: of which file, for people. One that has been asked for is made, also if nobody waits for it any
        more. Raises HttpError: then nothing was changed.
        """
        made = asyncio.get_running_loop().run_in_executor(self._thread, partial(change, *args, **kwargs))
        with told(what):
            return await asyncio.shield(made)

    def close(self) -> None:
        """After all that was asked for."""
        self._thread.shutdown()


@contextmanager
def told(what: str) -> Iterator[None]:
    """Turns errors of the file of secrets, or of keys, into answers."""
    try:
        yield
    except ConfigError as error:
        raise refuse(400, "bad_request", str(error)) from None
    except OSError as error:
        text = f"the file of {what} cannot be written: {error.strerror}; nothing was changed; free space on its disk"
        raise refuse(507, "not_kept", text) from None
