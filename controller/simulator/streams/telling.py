"""Reports of simulated runtimes to the scheduling core, on their turns and steps: pure."""

from collections.abc import Callable

from dormouse.controller.simulator.agenda import Agenda
from dormouse.controller.simulator.leases import SimulatedLease
from dormouse.controller.simulator.streams.runtime import runtime_of
from dormouse.core.decisions.rules.step_times import news
from dormouse.core.decisions.scheduling import events as ev
from dormouse.schemas.messages import PromptsDue, StepsDue


class RuntimeTells:
    """Of one node."""

    def __init__(self, agenda: Agenda, tell: Callable[[ev.Event], None]) -> None:
        self._agenda, self._tell = agenda, tell

    def idle(self, lease: SimulatedLease) -> None:
        """Its turn may be another's."""
        wake = lease.wake.lease
        self._tell(ev.TurnIdle(wake.gpu, wake.epoch, wake.serial, not runtime_of(lease).batch.count))

    def want_turn(self, lease: SimulatedLease) -> None:
        runtime, wake = runtime_of(lease), lease.wake.lease
        batch, begins, prompts = runtime.batch, runtime.batch.begins, []
        if begins:
            waited_s = self._agenda.now_s + runtime.spec.ttft_s - min([stream.first_s for stream in begins])
            tokens = sum([stream.left for stream in begins])
            prompts = [PromptsDue(serial=wake.serial, tokens=tokens, waited_us=int(waited_s * 1e6))]
        due = StepsDue(prompts=prompts, decoding=batch.count - len(begins))
        self._tell(ev.TurnWanted(wake.gpu, wake.epoch, wake.serial, due))

    def learn(self, lease: SimulatedLease) -> None:
        """Learn the times of the steps that are over, and report them if they are news."""
        runtime = runtime_of(lease)
        prompt_tokens, learned = runtime.batch.prompt_tokens, runtime.learned
        learned.learn(prompt_tokens, runtime.batch.sequences, runtime.steps, runtime.count)
        if prompt_tokens and (times := learned.times) is not None and news(times, runtime.times):
            runtime.times = times
            self._tell(ev.StepsTimed((lease.wake.instance,), times))
