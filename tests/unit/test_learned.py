"""What steps take, from runtimes' news to the scheduler and the catalogue."""

from pathlib import Path
from typing import Any

from dormouse.controller.catalogue import CatalogueFile
from dormouse.controller.learned import KEEP_S, RuntimeNews
from dormouse.core.decisions.scheduling import events as ev
from dormouse.core.decisions.scheduling.scheduler import Scheduler
from dormouse.schemas import messages as m

TIMES = m.StepTimes(step_us=20_000.0, prompt_token_us=300.0, sequence_us=0.0)


class Log:
    def __init__(self) -> None:
        self.said: list[str] = []

    def warning(self, event: str, **_: Any) -> None:
        self.said.append(event)


def load(times: m.StepTimes | None, *instances: str) -> m.RuntimeLoad:
    told = m.EngineLoad(
        running=0, waiting=0, preempted=0, blocks=0, used=0, idle=0, block_nbytes=0, reused_nbytes=0, times=times
    )
    return m.RuntimeLoad(instances=list(instances), number=1, pid=1, load=told)


def scheduler() -> Scheduler:
    core = Scheduler(seed=1, revoke_s=1.0, max_waiting=10)
    core.handle(ev.ExecutorUp(0, 1, m.PoolStats(free_nbytes=1000)), 0.0)
    for name in ("a", "b"):
        core.handle(ev.InstanceKnown(f"{name}.1", name, "", "group"), 0.0)
    return core


def test_news_go_to_the_scheduler_once() -> None:
    core = scheduler()
    news = RuntimeNews(core, Log())
    gone = m.RuntimeLoad(instances=["a.1"], number=1, pid=1, load=None)
    for nothing in (load(None, "a.1"), load(TIMES, "gone.1"), gone, m.Trouble(text="x")):
        assert news.heard(0, nothing, []) == []
    (event,) = news.heard(0, load(TIMES, "a.1", "gone.1"), [])
    assert event == ev.StepsTimed(("a.1",), TIMES)
    core.handle(event, 0.0)
    assert core.functions["a"].times == TIMES
    assert news.heard(0, load(TIMES, "a.1"), []) == []
    assert news.heard(0, load(TIMES, "a.1", "b.1"), []) == [ev.StepsTimed(("b.1",), TIMES)]


def test_where_runtimes_are_is_told_when_it_changes() -> None:
    core = scheduler()
    news, here = RuntimeNews(core, Log()), load(None, "a.1", "b.1", "gone.1")
    assert news.heard(7, here, [here]) == []
    (event,) = news.heard(0, here, [here])
    assert event == ev.RuntimesOn(0, 1, ("group",))
    core.handle(event, 0.0)
    assert core.gpus[0].runtimes == ("group",)
    assert news.heard(0, here, [here]) == []
    assert news.heard(0, here, []) == [ev.RuntimesOn(0, 1, ())]


def test_they_are_written_now_and_then_and_at_the_end(tmp_path: Path) -> None:
    catalogue = CatalogueFile(tmp_path / "c")
    for name in ("a", "b"):
        catalogue.keep(m.FunctionSpec(name=name, version=1, entry="a.py", snapshot=""))
    learned = RuntimeNews(scheduler(), Log())
    learned.heard(0, load(TIMES, "a.1"), [])
    learned.keep(catalogue, 0.0)
    learned.heard(0, load(TIMES, "b.1"), [])
    learned.keep(catalogue, KEEP_S / 2)
    assert list(catalogue.step_times()) == ["a"]
    learned.keep(catalogue, KEEP_S / 2, last=True)
    assert catalogue.step_times() == {"a": TIMES, "b": TIMES}
    catalogue.close()


def test_what_batches_take_is_written_when_it_is_news(tmp_path: Path) -> None:
    catalogue, core = CatalogueFile(tmp_path / "c"), scheduler()
    catalogue.keep(m.FunctionSpec(name="a", version=1, entry="a.py", snapshot=""))
    learned = RuntimeNews(core, Log())
    core.handle(ev.FunctionKnown("a", 1.0, 0.98, 1.0, batch_times=((1, 0.5),)), 0.0)
    learned.keep(catalogue, 0.0)
    assert catalogue.batch_times() == {"a": ((1, 0.5),)}
    batches = core.functions["a"].batches
    assert batches is not None
    for _ in range(3):
        batches.times.took(1, 0.52)  # as good as the same
    learned.keep(catalogue, KEEP_S)
    assert catalogue.batch_times() == {"a": ((1, 0.5),)}
    batches.times.took(8, 0.75)
    learned.keep(catalogue, 1.5 * KEEP_S)
    assert catalogue.batch_times() == {"a": ((1, 0.5),)}, "it is not time to"
    learned.keep(catalogue, 2.0 * KEEP_S)
    assert catalogue.batch_times() == {"a": ((1, 0.52), (8, 0.75))}
    for _ in range(5):
        batches.times.took(8, 1.0)
    learned.keep(catalogue, 2.0 * KEEP_S, last=True)
    assert catalogue.batch_times() == {"a": ((1, 0.52), (8, 1.0))}
    catalogue.close()


def test_what_batches_took_before_counts_until_more_is_known() -> None:
    core = scheduler()
    core.handle(ev.FunctionKnown("a", 1.0, 0.98, 1.0, batch_times=((1, 0.5), (8, 0.75))), 0.0)
    function = core.functions["a"]
    assert function.batches is not None
    assert (function.best_s, function.predicted_s(0.0, 8)) == (0.5, 0.75)
    function.batches.times.took(8, 0.9)
    core.handle(ev.FunctionKnown("a", 1.0, 0.98, 1.0, batch_times=((1, 0.1),)), 0.0)
    assert function.batches.times.known == {1: 0.5, 8: 0.75}, "the median of two"
