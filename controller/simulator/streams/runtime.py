"""State of the runtime of a simulated lease: plain data. Its behaviour is runtimes.py's."""

from typing import TYPE_CHECKING

from dormouse.controller.simulator.leases import SimulatedLease
from dormouse.controller.simulator.streams.batch import StreamBatch
from dormouse.controller.simulator.streams.cost import EqualSteps
from dormouse.controller.simulator.streams.learning import StepsLearned
from dormouse.controller.simulator.streams.model import LlmSpec
from dormouse.schemas.messages import StepTimes

if TYPE_CHECKING:
    from dormouse.controller.simulator.streams.runtimes import RuntimeLeases


class SimulatedRuntime:
    """The state of a language model's lease beside that of a function. ``steps`` are planned, ``count`` of them under
    way, which take ``work_s``; ``stepped``: they are computed, but for copies that they need. ``idles``: the core was
    told in this turn that the turn may be another's. ``lent``: that step is in another's turn. ``lives`` tells a void
    expectation of the lease's end. ``cold``: its process was not there when it got its seat. ``turning``: it has a
    turn, and has had no step in it.
    """

    __slots__ = (
        *(
            "batch",
            "block_nbytes",
            "busy_s",
            "cold",
            "count",
            "extent_blocks",
            "fresh",
            "idles",
            "learned",
            "leases",
            "lent",
            "lent_s",
        ),
        *("lives", "opening", "prompts", "spec", "stepped", "steps", "times", "turning", "wants", "work_s", "yielding"),
    )

    def __init__(self, spec: LlmSpec, leases: "RuntimeLeases") -> None:
        self.spec, self.leases = spec, leases
        self.extent_blocks, self.block_nbytes = spec.extent_blocks, spec.block_nbytes
        self.learned = StepsLearned(spec.step_tokens)
        self.batch = StreamBatch(
            spec.cost, step_tokens=spec.step_tokens, sequences=spec.sequences, closed=spec.closed,
            learned=self.learned,
        )  # fmt: skip
        self.steps = EqualSteps(0, 0.0, 0.0)
        self.count = 0
        self.work_s = self.busy_s = 0.0
        self.stepped = self.yielding = self.idles = self.wants = self.opening = self.turning = False
        self.lent = False
        self.lent_s: float | None = None  # when its last lent step ended
        self.prompts = False  # it has reported some, since it wants a turn
        self.times: StepTimes | None = None  # as reported
        self.fresh, self.cold = True, False  # the seat has had no step
        self.lives = 0

    def left(self) -> None:
        """Its seat, and all KV with it."""
        self.batch.give_up()
        self.fresh = True


def runtime_of(lease: SimulatedLease) -> SimulatedRuntime:
    assert lease.runtime is not None
    return lease.runtime
