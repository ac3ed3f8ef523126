"""What is said at deploy of a deadline that cannot be met."""

import pytest
from msgspec import structs

from dormouse.controller.service import deadline_warning, service_level
from dormouse.core.decisions.scheduling import events as ev
from dormouse.core.decisions.scheduling.scheduler import Scheduler
from dormouse.core.quantities import duration
from dormouse.schemas import messages as m

TIMES = m.StepTimes(step_us=2000.0, prompt_token_us=1000.0, sequence_us=10.0)
GIB = 1 << 30


@pytest.mark.parametrize(
    ("ttft_ms", "nbytes", "timed", "says"),
    [
        (500, 1 << 20, True, ""),
        (250, 1 << 20, True, "a prompt of 256 tokens takes 258 ms on this node with nobody else there"),
        (250, 1 << 20, False, ""),
        (500, 10 * GIB, True, "cannot be when the model sleeps: to bring its 10.0 GiB to a GPU takes 1.07 s"),
    ],
)
def test_of_an_adapter_by_what_the_steps_of_its_base_take(ttft_ms: int, nbytes: int, timed: bool, says: str) -> None:
    core = Scheduler(seed=1, revoke_s=5.0, max_waiting=9)
    base = m.FunctionSpec(name="chat", version=1, entry="", snapshot="", llm=m.LlmSettings())
    llm = m.LlmSettings(ttft_ms=ttft_ms, base="chat")
    spec = m.FunctionSpec(name="math", version=1, entry="", snapshot="", llm=llm)
    core.handle(service_level(base, TIMES if timed else None), 0.0)
    core.handle(service_level(spec), 0.0)
    core.handle(ev.InstanceKnown("i", "math"), 0.0)
    core.handle(ev.ModelSized("i", 1, nbytes), 0.0)
    found = deadline_warning(core, spec, "i")
    begin = f"a first token is wanted within {duration(ttft_ms)}"
    assert (found.startswith(begin), says in found) == (
        bool(says),
        True,
    )


@pytest.mark.parametrize(("deadline_ms", "says"), [(2000, False), (1000, True)])
def test_of_a_function_by_its_copy(deadline_ms: int, says: bool) -> None:
    core = Scheduler(seed=1, revoke_s=5.0, max_waiting=9)
    spec = m.FunctionSpec(name="f", version=1, entry="", snapshot="", deadline_ms=deadline_ms)
    core.handle(service_level(spec), 0.0)
    core.handle(ev.InstanceKnown("i", "f"), 0.0)
    core.handle(ev.ModelSized("i", 1, 10 * GIB), 0.0)
    assert ("an answer is wanted within 1 s" in deadline_warning(core, spec, "i")) == says


def test_of_an_instance_that_nobody_knows_nothing_is_said() -> None:
    core = Scheduler(seed=1, revoke_s=5.0, max_waiting=9)
    spec = m.FunctionSpec(name="f", version=1, entry="", snapshot="", deadline_ms=1)
    assert deadline_warning(core, spec, "i") == ""


def test_a_time_limit_that_ends_before_the_deadline_is_said() -> None:
    """Such as that of ``--timeout 5``, which is 5 ms."""
    core = Scheduler(seed=1, revoke_s=5.0, max_waiting=9)
    spec = m.FunctionSpec(name="f", version=1, entry="", snapshot="", deadline_ms=1000, timeout_ms=5)
    assert "a request ends after 5 ms (timeout), before it is late" in deadline_warning(core, spec, "i")
    assert deadline_warning(core, structs.replace(spec, timeout_ms=1000), "i") == ""
