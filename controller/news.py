"""Reports of executors that are for people alone, by GPU: troubles, and the load of language models' runtimes."""

from collections import deque
from typing import Final

from dormouse.schemas import messages as m

MAX_TROUBLES: Final = 8


class News:
    """Reports since an executor came up."""

    def __init__(self) -> None:
        self.troubles: dict[int, deque[str]] = {}  # by GPU, the newest
        self.runtimes: dict[int, dict[int, m.RuntimeLoad]] = {}  # by GPU, by number

    def came_up(self, gpu: int) -> None:
        self.troubles[gpu] = deque(maxlen=MAX_TROUBLES)
        self.runtimes[gpu] = {}

    def heard(self, gpu: int, message: m.Trouble | m.RuntimeLoad) -> None:
        match message:
            case m.Trouble(text=text):
                self.troubles[gpu].append(text)
            case m.RuntimeLoad(number=number, load=None):
                self.runtimes[gpu].pop(number, None)
            case m.RuntimeLoad(number=number):
                self.runtimes[gpu][number] = message
