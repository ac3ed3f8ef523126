"""Choice of the instance for a simulated request, where a function may have several: one that has no request, the first
ones first; else the first. Pure. It has the place of core/decisions/requests/replicas.py and is simpler: all instances
are there from the beginning, and a request does not change from one to another. Those of functions with batches and of
language models come and go (extras.py).
"""


def instance_names(function: str, count: int) -> list[str]:
    """The first has the function's name."""
    return [function, *(f"{function}.{number}" for number in range(1, count))]


class SimulatedInstances:
    """``several``: instances by function, of functions that have more than one."""

    def __init__(self) -> None:
        self.several: dict[str, list[str]] = {}
        self._open: dict[str, int] = {}  # requests, by instance
        self._taken: dict[int, str] = {}  # by request

    def of(self, function: str, count: int) -> list[str]:
        """Its instances."""
        if count == 1:
            return [function]
        if function not in self.several:
            self.several[function] = instance_names(function, count)
            self._open |= dict.fromkeys(self.several[function], 0)
        return self.several[function]

    def take(self, function: str, request: int) -> str:
        family = self.several.get(function)
        if family is None:
            return function
        name = next((each for each in family if not self._open[each]), function)
        self._open[name] += 1
        self._taken[request] = name
        return name

    def free(self, request: int) -> None:
        """The request has met its fate, or has to be asked again."""
        if (name := self._taken.pop(request, None)) is not None:
            self._open[name] -= 1
