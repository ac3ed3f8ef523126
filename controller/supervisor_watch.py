"""Watches from a child whether the supervisor lives. Owns a descriptor of its process."""

import os
import select
from typing import Final

EXIT_S: Final = 2.0


class SupervisorWatch:
    """Of the process that is this one's parent now."""

    def __init__(self) -> None:
        self._fd = os.pidfd_open(os.getppid())

    def died(self) -> bool:
        """Whether it is gone, or goes within a moment.

        The parent-death signal is sent when the thread that started us ends, while others of a killed process may still
        live; until the last has ended, even getppid() says that nothing has happened.
        """
        return bool(select.select([self._fd], [], [], EXIT_S)[0])
