"""Which runtime of a language model has the next turn: by margins, or in turn; scripted, with exact outcomes."""

from typing import Final

import pytest

from dormouse.core.decisions.scheduling import events as ev
from dormouse.core.decisions.scheduling.scheduler import Scheduler
from dormouse.schemas.messages import PoolStats, PromptsDue, StepsDue, StepTimes
from dormouse.schemas.policy import Policy

GB: Final = 1_000_000_000
TIMES: Final = StepTimes(step_us=20_000.0, prompt_token_us=1_000.0, sequence_us=0.0)
"""A step takes 20 ms, and 1 ms more for each token of prompts."""

TTFT_S, TPOT_S = 2.0, 0.1


class Gpu:
    """One GPU with a lease of each runtime; ``a`` computes. All but the last of them wait for a turn."""

    def __init__(self, *names: str, order: str = "margin", ttft_s: dict[str, float] | None = None) -> None:
        policy = Policy(turn_order=order)
        self.core = Scheduler(seed=1, revoke_s=1.0, max_waiting=100, policy=policy)
        self.now_s = 0.0
        self.serials: dict[str, int] = {}
        self.tell(ev.ExecutorUp(0, 1, PoolStats(free_nbytes=80 * GB)))
        for request, name in enumerate(names):
            within_s = (ttft_s or {}).get(name, TTFT_S)
            self.tell(ev.FunctionKnown(name, within_s, 0.99, 1.0, "", "", TPOT_S, TIMES))
            self.tell(ev.InstanceKnown(name, name, "", name))
            self.tell(ev.ModelSized(name, 1, GB))
            for wake in self.tell(ev.Asked(request, name, self.now_s + within_s, 1, False)):
                if isinstance(wake, ev.WakeOn):
                    self.serials[name] = wake.lease.serial
            self.there(name, GB)
            self.tell(ev.TurnIdle(0, 1, self.serials[name]))

    def there(self, name: str, nbytes: int) -> None:
        """So much of its model is on the GPU."""
        self.tell(ev.Evicted(0, 1, ((name, nbytes),), PoolStats(free_nbytes=70 * GB)))

    def tell(self, event: ev.Event) -> list[ev.Action]:
        actions = self.core.handle(event, self.now_s)
        self.core.check()
        return actions

    def wants(self, name: str, tokens: int = 0, waited_s: float = 0.0, decoding: int = 0) -> list[ev.Action]:
        serial = self.serials[name]
        prompts = [PromptsDue(serial=serial, tokens=tokens, waited_us=int(waited_s * 1e6))] if tokens else []
        return self.tell(ev.TurnWanted(0, 1, serial, StepsDue(prompts=prompts, decoding=decoding)))

    def next(self, name: str) -> ev.TurnOn:
        """This one has computed its step; who has the turn then."""
        _, turn = self.tell(ev.TurnIdle(0, 1, self.serials[name]))
        assert isinstance(turn, ev.TurnOn)
        return turn

    def who(self, turn: ev.TurnOn) -> str:
        return next(name for name, serial in self.serials.items() if serial == turn.serial)


def test_the_prompt_with_the_least_margin_is_first() -> None:
    """Of equal deadlines that which has waited longer, less what its prompt takes: 2 - 0.5 - 0.12 against 2 - 0.4 - 0.3
    s.
    """
    gpu = Gpu("b", "c", "a")
    gpu.tell(ev.TurnBusy(0, 1, gpu.serials["a"]))
    gpu.wants("b", tokens=100, waited_s=0.5)
    gpu.wants("c", tokens=280, waited_s=0.4)
    turn = gpu.next("a")
    assert (gpu.who(turn), turn.why) == ("c", "prompts")
    assert turn.margin_s == pytest.approx(2.0 - 0.4 - (2 * 0.02 + 0.28))
    turn = gpu.next("c")
    assert gpu.who(turn) == "b"
    assert turn.margin_s == pytest.approx(2.0 - 0.5 - 0.12)


def test_in_turn_it_is_who_has_wanted_it_for_longer() -> None:
    gpu = Gpu("b", "c", "a", order="fifo")
    gpu.tell(ev.TurnBusy(0, 1, gpu.serials["a"]))
    gpu.wants("b", tokens=100, waited_s=0.5)
    gpu.now_s = 0.01
    gpu.wants("c", tokens=280, waited_s=0.4)
    turn = gpu.next("a")
    assert (gpu.who(turn), turn.why) == ("b", "in_turn")
    assert gpu.who(gpu.next("b")) == "c"


def test_deadlines_are_those_of_the_function_whose_prompt_it_is() -> None:
    gpu = Gpu("b", "c", "a", ttft_s={"b": 4.0, "c": 1.0})
    gpu.tell(ev.TurnBusy(0, 1, gpu.serials["a"]))
    gpu.wants("b", tokens=100, waited_s=0.5)
    gpu.wants("c", tokens=100)
    assert gpu.who(gpu.next("a")) == "c"


def test_prompts_go_before_tokens_that_can_wait() -> None:
    """The step with the prompt takes 30 ms, and tokens are due in 100."""
    gpu = Gpu("b", "c", "a")
    gpu.tell(ev.TurnBusy(0, 1, gpu.serials["a"]))
    gpu.wants("b", decoding=3)
    gpu.wants("c", tokens=10)
    turn = gpu.next("a")
    assert (gpu.who(turn), turn.why) == ("c", "prompts")
    turn = gpu.next("c")
    assert (gpu.who(turn), turn.why) == ("b", "tokens")


def test_tokens_that_would_be_late_go_before_a_prompt_that_can_wait() -> None:
    """The step with the prompt takes 120 ms, and tokens are due in 100, of which they need 20."""
    gpu = Gpu("b", "c", "a")
    gpu.tell(ev.TurnBusy(0, 1, gpu.serials["a"]))
    gpu.wants("b", decoding=3)
    gpu.wants("c", tokens=100)
    turn = gpu.next("a")
    assert (gpu.who(turn), turn.why) == ("b", "tokens_late")
    assert turn.margin_s == pytest.approx(0.08)


def test_a_prompt_that_is_nearer_to_its_deadline_goes_before_tokens_that_will_be_late() -> None:
    """It has 80 of 2,000 ms left, they 80 of 100."""
    gpu = Gpu("b", "c", "a")
    gpu.tell(ev.TurnBusy(0, 1, gpu.serials["a"]))
    gpu.wants("b", decoding=3)
    gpu.wants("c", tokens=100, waited_s=1.8)
    turn = gpu.next("a")
    assert (gpu.who(turn), turn.why) == ("c", "prompts")
    assert turn.margin_s == pytest.approx(0.08)


def test_a_first_prompt_that_comes_later_counts() -> None:
    gpu = Gpu("b", "c", "a")
    gpu.tell(ev.TurnBusy(0, 1, gpu.serials["a"]))
    gpu.wants("b", decoding=1)
    gpu.wants("c", decoding=1)
    assert gpu.wants("c", tokens=10, decoding=1) == []
    assert gpu.who(gpu.next("a")) == "c"


@pytest.mark.parametrize(("gone", "first", "margin_s"), [("", "c", 1.27), ("b", "b", 1.24)])
def test_a_wake_is_part_of_the_margin(gone: str, first: str, margin_s: float) -> None:
    """Of two prompts of 100 tokens one has waited for 70 ms longer. The other one's model has left the GPU, and comes
    again in 100.
    """
    gpu = Gpu("b", "c", "a")
    gpu.tell(ev.TurnBusy(0, 1, gpu.serials["a"]))
    if gone:
        gpu.there(gone, 0)
    gpu.core.gpus[0].woken_s = gpu.now_s - 1.0  # long ago: `a` has computed for as long as a wake
    gpu.wants("b", tokens=100, waited_s=0.54)
    gpu.wants("c", tokens=100, waited_s=0.61)
    turn = gpu.next("a")
    assert (gpu.who(turn), turn.why) == (first, "prompts")
    assert turn.margin_s == pytest.approx(margin_s)


def test_nobody_starves() -> None:
    """Three that always have tokens to compute: each has every third turn."""
    for order in ("margin", "fifo"):
        gpu = Gpu("b", "c", "a", order=order)
        gpu.tell(ev.TurnBusy(0, 1, gpu.serials["a"]))
        gpu.wants("b", decoding=1)
        gpu.wants("c", decoding=1)
        had, has = [], "a"
        for _ in range(9):
            gpu.now_s += 0.02
            turn = gpu.next(has)
            gpu.wants(has, decoding=1)
            has = gpu.who(turn)
            had.append(has)
        assert had == ["b", "c", "a"] * 3, order


def away(rests: bool = False) -> Gpu:
    """``b`` has lost its seat to ``a``, and what it had: a copy of 0.1 s, as ``a`` had until now. Both have tokens."""
    gpu = Gpu("b", "a")
    gpu.tell(ev.TurnBusy(0, 1, gpu.serials["a"]))
    gpu.wants("b", decoding=1)
    gpu.there("b", 0)
    gpu.core.gpus[0].woken_s = gpu.now_s
    gpu.tell(ev.TurnIdle(0, 1, gpu.serials["a"], rests))
    return gpu


def test_who_computes_is_not_woken_away_before_it_has_computed_for_as_long_as_a_wake() -> None:
    gpu = away()
    assert gpu.core.gpus[0].turns[0].lease.serial == gpu.serials["a"]
    assert gpu.core.next_deadline_s == pytest.approx(0.1)
    gpu.now_s = 0.05
    assert gpu.tell(ev.Tick()) == []
    gpu.now_s = 0.1
    pause, turn = gpu.tell(ev.Tick())
    assert isinstance(pause, ev.PauseOn)
    assert isinstance(turn, ev.TurnOn)
    assert gpu.who(turn) == "b"


def test_what_was_brought_for_a_lease_is_known_to_be_there_while_it_lasts() -> None:
    """Its executor tells what is resident when the lease is over; that it has all is known from the end of its wake."""
    gpu = away()
    gpu.tell(ev.Woken(0, 1, gpu.serials["b"], 100_000))
    assert gpu.core.models["b"].resident == {0: GB}
    gpu.now_s = 0.01
    _, turn = gpu.tell(ev.TurnIdle(0, 1, gpu.serials["a"]))
    assert isinstance(turn, ev.TurnOn)
    assert gpu.who(turn) == "b"


def test_nobody_waits_for_a_wake_while_the_gpu_rests() -> None:
    gpu = away()
    gpu.now_s = 0.01
    _, turn = gpu.tell(ev.TurnIdle(0, 1, gpu.serials["a"], True))
    assert isinstance(turn, ev.TurnOn)
    assert gpu.who(turn) == "b"


def test_one_that_is_there_goes_on_meanwhile() -> None:
    gpu = Gpu("b", "c", "a")
    gpu.tell(ev.TurnBusy(0, 1, gpu.serials["a"]))
    gpu.wants("b", tokens=10, waited_s=1.9)
    gpu.wants("c", decoding=1)
    gpu.there("b", 0)
    gpu.core.gpus[0].woken_s = gpu.now_s
    assert gpu.who(gpu.next("a")) == "c"


def test_an_ordinary_request_and_a_runtime_that_wants_a_turn_go_by_their_deadlines() -> None:
    """A runtime wants its turn as a request that comes then."""
    gpu = Gpu("b", "a")
    gpu.tell(ev.TurnBusy(0, 1, gpu.serials["a"]))
    gpu.wants("b", decoding=1)
    gpu.tell(ev.FunctionKnown("f", 1.0, 0.99, 1.0))
    gpu.tell(ev.InstanceKnown("f", "f"))
    gpu.tell(ev.ModelSized("f", 1, GB))
    gpu.now_s = 0.5
    gpu.tell(ev.Asked(9, "f", 1.5, 1))
    _, wake = gpu.tell(ev.TurnIdle(0, 1, gpu.serials["a"]))
    assert isinstance(wake, ev.WakeOn)


def test_an_unknown_order_is_refused() -> None:
    from dormouse.schemas.errors import ConfigError
    from dormouse.schemas.policy import checked

    with pytest.raises(ConfigError, match="turn_order is 'edf'; write one of margin, fifo"):
        checked(Policy(turn_order="edf"))
