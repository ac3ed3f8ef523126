"""Several simulated nodes as one: each has its own functions, GPUs, links and scheduler. Deterministic."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from dormouse.controller.simulator.engine import Simulation
from dormouse.controller.simulator.streams.serving import Streams


class Cluster:
    """Nodes that have nothing in common: each serves its functions, ``node_of[f]`` has function f. The same face as one
    simulation's; they run one after the other.
    """

    def __init__(self, nodes: Sequence[Simulation], node_of: Sequence[int]) -> None:
        self.nodes = list(nodes)
        self._node_of = np.asarray(node_of)
        self._number_of = np.zeros(len(node_of), np.int64)  # of a function, on its node
        for node in range(len(self.nodes)):
            mine = self._node_of == node
            self._number_of[mine] = np.arange(int(mine.sum()))
        self.on_busy: Callable[[int, float, float], None] | None = None
        self.streams: Streams | None = None

    @property
    def busy_s(self) -> list[float]:
        return [busy_s for node in self.nodes for busy_s in node.busy_s]

    @property
    def wakes(self) -> int:
        return sum(node.wakes for node in self.nodes)

    @property
    def links_busy_s(self) -> dict[str, float]:
        each = enumerate(self.nodes)
        return {f"node{number}-{name}": busy_s for number, node in each for name, busy_s in node.links_busy_s.items()}

    @property
    def host_nbytes(self) -> int:
        return sum(node.host_nbytes for node in self.nodes)

    def run(
        self,
        times_s: npt.NDArray[np.float64],
        functions: npt.NDArray[np.int64],
        warm: int = 0,
        progress: Callable[[int], None] | None = None,
    ) -> npt.NDArray[np.float64]:
        """As `Simulation.run`."""
        latency_s = np.full(len(times_s), np.nan)
        self.streams = Streams(len(times_s)) if any(node.streams is not None for node in self.nodes) else None
        done = gpus = 0
        for number, node in enumerate(self.nodes):
            mine = np.flatnonzero(self._node_of[functions] == number)
            node.on_busy = _from_gpu(self.on_busy, gpus)
            latency_s[mine] = node.run(
                times_s[mine],
                self._number_of[functions[mine]],
                int((mine < warm).sum()),
                _after(progress, done),
            )
            if self.streams is not None and node.streams is not None:
                self.streams.put(mine, node.streams)
            done += len(mine)
            gpus += len(node.busy_s)
        return latency_s


OnBusy = Callable[[int, float, float], None]


def _from_gpu(told: OnBusy | None, first: int) -> OnBusy | None:
    return None if told is None else lambda gpu, began_s, ended_s: told(first + gpu, began_s, ended_s)


def _after(told: Callable[[int], None] | None, before: int) -> Callable[[int], None] | None:
    return None if told is None else lambda count: told(before + count)
