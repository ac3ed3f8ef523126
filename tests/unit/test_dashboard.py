"""What the dashboard is told: rows that have changed and no others, times on GPUs, and those who watch."""

import asyncio
import copy
import shutil
import subprocess
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from router_rig import loaded, one, spec

from dormouse.core.decisions.requests import events as e
from dormouse.core.decisions.requests.state import RouterState
from dormouse.core.problems import problems
from dormouse.router.access import tenancy
from dormouse.router.access.access import ANYBODY, Caller
from dormouse.router.dashboard import pages, watch
from dormouse.router.dashboard.pages import PageFiles
from dormouse.router.dashboard.rows import MAX_PROBLEMS, TEXT, NodeView, difference, view
from dormouse.router.dashboard.spans import MAX, GpuSpan, Spans, before
from dormouse.router.dashboard.watch import OF_ONE, OF_TENANTS, Sampler, Watcher
from dormouse.router.front.exchange import HttpError
from dormouse.router.front.recent import Past
from dormouse.schemas import messages as m


def status(*names: str, **row: Any) -> dict[str, Any]:
    """As router/admin/overview.py has it."""
    node = {"name": "n", "address": "a", "peers": {"gpu0": 1}, "gone": [], "missing": [], "down": {}, "run": "/r"}
    functions = {
        name: {"state": "idle", "tenant": name.partition("-")[0], "queued": 0, "percentile": 98.0, "error": None} | row
        for name in names
    }
    store = {"answered": True, "trouble": "", "segments": 1}
    store |= {f"{tier}{part}": 1 for tier in ("host", "file") for part in ("_nbytes", "_budget_nbytes")}
    store |= {"host_budget_nbytes": None, "file_budget_nbytes": None}
    gpus = {0: {"epoch": 1, "capacity_nbytes": 9, "host_bps": 7}}
    waits: dict[str, Any] = {"oldest": [], "others": {}}
    known: dict[str, Any] = {"node": node, "functions": functions, "gpus": gpus, "store": store}
    return known | {"waiting": 0, "waits": waits, "tenants": {}}


# --- rows


def test_nothing_is_said_where_nothing_has_changed() -> None:
    said = status("shop-a", "shop-b")
    other = copy.deepcopy(said)
    other["gpus"][0]["host_bps"] = 8  # measured anew all the time, and not shown
    assert difference(view(said, True), view(other, True)) == {}


def test_a_change_is_the_rows_that_changed_and_those_that_are_gone() -> None:
    before = view(status("shop-a", "shop-b", "shop-c"), True)
    said = status("shop-b", "shop-c", "shop-d")
    said["functions"]["shop-c"]["queued"] = 2
    said["node"]["gone"] = ["gpu0"]
    said["gpus"] = {}
    after = view(said, True)
    changed = difference(before, after)
    assert set(changed) == {"node", "problems", "gpus", "functions"}
    assert changed["gpus"] == {"0": None}
    assert {name: row and row["queued"] for name, row in changed["functions"].items()} == {
        "shop-a": None,
        "shop-c": 2,
        "shop-d": 0,
    }
    assert changed["problems"] == ["gpu0 has ended, and is started again"]


def test_a_snapshot_is_the_difference_from_nothing() -> None:
    now = view(status("shop-a"), True)
    assert difference(NodeView(), now)["functions"] == now.functions
    assert orjson.dumps(difference(NodeView(), now))


def test_problems_are_those_of_status() -> None:
    said = status("shop-a", state="failed", error="Traceback\nValueError: no")
    assert view(said, True).problems == problems(said)
    assert view(said, True).functions["shop-a"]["broken"] is True


def test_a_tenant_hears_nothing_of_the_store() -> None:
    """Which is not its own, and not a problem."""
    key = Caller("key 1", None, "", frozenset({"deploy"}), "shop")
    said = view(tenancy.part_of(key, status("shop-a", "other-b")), False)
    assert (said.problems, said.gpus, set(said.functions)) == ([], {}, {"shop-a"})


def test_who_may_not_read_logs_reads_no_errors() -> None:
    said = status("shop-a", state="failed", error="Traceback\nValueError: SECRET")
    shown = view(said, True, reads=False)
    assert shown.functions["shop-a"]["error"] == "see its log"
    assert shown.problems == ["shop-a is failed: see its log (dormouse logs shop-a)"]
    assert view(status("shop-a"), True, reads=False).functions["shop-a"]["error"] is None


def test_who_shares_is_bounded() -> None:
    """Of 500 functions with one backbone each shares with 499."""
    row = view(status("a", shared_with=[f"f-{number}" for number in range(499)]), True).functions["a"]
    assert (len(row["shared_with"]), row["shared_count"]) == (20, 499)


def test_what_functions_write_is_bounded() -> None:
    names = [f"f-{number}" for number in range(MAX_PROBLEMS + 9)]
    said = view(status(*names, state="failed", error="x" * 100_000), True)
    assert [len(row["error"]) for row in said.functions.values()] == [TEXT] * len(names)
    assert len(said.problems) == MAX_PROBLEMS + 1
    assert said.problems[-1] == "and 9 more"


# --- times on GPUs


def span(name: str = "f", begun_s: float = 1.0, source: str = "host") -> GpuSpan:
    return GpuSpan(0, name, "shop", 0, begun_s, source, 0.5)


def answered(request: int, **timing: Any) -> e.Answer:
    return e.Answer(request, "i1", b"", 0, e.Timing(**timing))


def test_a_request_that_is_over_is_told_once() -> None:
    spans = Spans()
    spans.begun(7, span())
    spans.ended(answered(7, copy_s=0.25, source="disk"), 3.0)
    told, dropped = spans.taken()
    assert [each.told() for each in told] == [[1, "f", 0, 1.0, 1.25, 3.0, "disk", "ok", 0.5]]
    assert (dropped, spans.taken()) == ({}, ([], {}))


def test_a_request_that_goes_on_is_told_when_it_begins_and_when_it_ends() -> None:
    spans = Spans()
    spans.begun(7, span())
    (open_,), _ = spans.taken()
    assert (open_.ended_s, spans.taken()[0]) == (None, [])
    spans.ended(e.Fail(7, m.Failure(code="function_raised", status=500, text=""), e.Timing()), 2.0)
    (over,), _ = spans.taken()
    assert (over.number, over.ended_s, over.outcome) == (1, 2.0, "function_raised")


def test_a_request_that_lost_its_executor_has_two_spans() -> None:
    spans = Spans()
    spans.begun(7, span())
    spans.begun(7, span(begun_s=2.0))
    spans.ended(e.Drop(7), 3.0)
    told, _ = spans.taken()
    assert [(each.number, each.ended_s, each.outcome) for each in told] == [
        (1, 2.0, "executor_lost"),
        (2, 3.0, "cancelled"),
    ]


def test_a_copy_ends_no_later_than_its_request() -> None:
    """What an instance or the clock says of it cannot be beyond."""
    first = m.AnswerBegun(request=1, queue_us=0, runtime_us=0, wake_us=10**12, prefill_us=0)
    spans = Spans()
    for request, timing in ((1, {"copy_s": 99.0}), (2, {"first": first})):
        spans.begun(request, span())
        spans.ended(answered(request, **timing), 2.0)
    assert [each.copied_s for each in spans.taken()[0]] == [2.0, 2.0]


def test_more_requests_than_a_person_can_see_are_counted() -> None:
    spans = Spans()
    for request in range(MAX + 5):
        spans.begun(request, span())
        spans.ended(answered(request), 2.0)
    told, dropped = spans.taken()
    assert (len(told), dropped) == (MAX, {("f", "shop"): 5})
    for request in range(MAX + 5):
        spans.begun(request, span())
    assert [len(spans.taken()[0]) for _ in range(3)] == [MAX, 5, 0], "what goes on can be told later"


def test_what_was_before_is_told_of_the_last_requests() -> None:
    def past(at: float, outcome: str = "ok", **timing: Any) -> Past:
        return Past(at, "r", "t", outcome, e.Timing(**timing), False)

    known = [
        ("a", past(1000.0, run_s=2.0, queue_s=0.25, wait_s=0.25, source="host", copy_s=0.5, gpu=1)),
        ("b", past(990.0, "function_raised", run_s=4.0, source="gpu", gpu=0)),
        ("a", past(995.0, run_s=1.0)),  # it has had no GPU
        ("a", past(1001.0, run_s=1.0, copy_s=9.0, gpu=0)),  # the clock was set back meanwhile
    ]
    assert before(known, 1000.0, 50.0) == [
        [-3, "b", 0, 36.0, None, 40.0, "gpu", "function_raised", 0.0],
        [-2, "a", 1, 48.0, 48.5, 50.0, "host", "ok", 0.5],
        [-1, "a", 0, 49.0, 50.0, 50.0, "", "ok", 0.0],
    ]
    many = before((("a", past(float(at), gpu=0)) for at in range(MAX + 5)), 300.0, 300.0)
    assert [many[0][0], many[0][5], many[-1][0], len(many)] == [-MAX, 5.0, -1, MAX]


# --- those who watch


class World:
    """A router that has a status, and the readers of its stream."""

    log = SimpleNamespace(error=lambda *_, **__: None)

    def __init__(self) -> None:
        self.picture = RouterState(4, 64, "1-")
        self.minutes: dict[str, list[int]] = {}
        self.past: list[tuple[str, Past]] = []
        told = {"now": 0.0, "since": 5.0, "minutes": self.minutes}
        self.requests: Any = SimpleNamespace(
            watcher=None, since_s=5.0, minutes=lambda caller: copy.deepcopy(told), since=self._since
        )
        self.samples = 0
        self.said = status("shop-a", "other-b")
        self.revoked: set[Caller] = set()
        self.sampler = Sampler(self, self._status, lambda caller: caller not in self.revoked)

    def _since(self, caller: Caller, at: float) -> list[tuple[str, Past]]:
        return [(name, past) for name, past in self.past if caller.sees(name, name.partition("-")[0]) and past.at >= at]

    async def _status(self) -> dict[str, Any]:
        self.samples += 1
        return copy.deepcopy(self.said)


class Reader:
    """Takes what it is given, unless it does not read."""

    def __init__(self, world: World, caller: Caller = ANYBODY) -> None:
        self.frames: list[tuple[str, Any]] = []
        self.reads = True
        self.news = asyncio.Event()
        self.watcher: Watcher = world.sampler.enter(caller, self._take)

    def _take(self, frame: bytes) -> bool:
        if not self.reads:
            return False
        name, data = frame.decode().removesuffix("\n\n").split("\n")
        self.frames.append((name.removeprefix("event: "), orjson.loads(data.removeprefix("data: "))))
        self.news.set()
        return True

    async def next(self) -> tuple[str, Any]:
        while not self.frames:
            self.news.clear()
            await asyncio.wait_for(self.news.wait(), 60)
        return self.frames.pop(0)


def run(work: Callable[[World], Any]) -> None:
    asyncio.run(work(World()))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples that follow at once: who waits for one should not wait long."""
    for name, value in (("MIN_S", 0.0), ("PAUSE_S", 0.01), ("PATIENCE", 0), ("SPANS_S", 0.01)):
        monkeypatch.setattr(watch, name, value)


def test_a_watcher_hears_all_and_then_what_changes() -> None:
    async def work(world: World) -> None:
        reader = Reader(world)
        name, told = await reader.next()
        assert (name, set(told["functions"]), told["whole"], told["missed"]) == (
            "snapshot",
            {"shop-a", "other-b"},
            True,
            0,
        )
        world.said["functions"]["shop-a"]["queued"] = 3
        name, told = await reader.next()
        assert (name, set(told), told["functions"]["shop-a"]["queued"]) == ("change", {"functions"}, 3)
        world.minutes |= {"7": [1, 0, 0, 0], "8": [2, 0, 0, 0]}
        assert await reader.next() == ("change", {"minutes": {"7": [1, 0, 0, 0], "8": [2, 0, 0, 0]}})
        del world.minutes["7"]
        world.minutes["8"] = [2, 0, 1, 0]
        assert await reader.next() == ("change", {"minutes": {"7": None, "8": [2, 0, 1, 0]}})
        late = Reader(world)
        _, told = await late.next()
        assert (told["minutes"], told["since"]) == ({"8": [2, 0, 1, 0]}, 5.0), "what was before it came"
        for each in (reader, late):
            world.sampler.leave(each.watcher)

    run(work)


def test_the_sampler_begins_with_the_first_and_ends_with_the_last() -> None:
    async def work(world: World) -> None:
        assert (world.sampler.watched, world.requests.watcher) == (False, None)
        first, second = Reader(world), Reader(world)
        await first.next()
        world.sampler.leave(first.watcher)
        assert world.sampler.watched
        assert world.requests.watcher is not None
        world.sampler.leave(second.watcher)
        assert (world.sampler.watched, world.requests.watcher) == (False, None)
        _, pending = await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()}, timeout=60)
        assert not pending, "nothing goes on"

    run(work)


def test_two_of_the_same_rights_are_served_by_one_sample() -> None:
    async def work(world: World) -> None:
        readers = [Reader(world) for _ in range(3)]
        for reader in readers:
            await reader.next()
        assert world.samples == 1
        for reader in readers:
            world.sampler.leave(reader.watcher)

    run(work)


def test_who_does_not_read_misses_frames_and_then_has_a_new_snapshot() -> None:
    async def work(world: World) -> None:
        slow, quick = Reader(world), Reader(world)
        await slow.next()
        await quick.next()
        slow.reads = False
        for queued in range(1, 9):
            world.said["functions"]["shop-a"]["queued"] = queued
            assert (await quick.next())[0] == "change"
        slow.reads = True
        name, told = await slow.next()
        assert (name, told["functions"]["shop-a"]["queued"], told["missed"]) == ("snapshot", 8, 8)
        assert slow.frames == []
        for reader in (slow, quick):
            world.sampler.leave(reader.watcher)

    run(work)


def test_a_tenant_watches_its_own_functions() -> None:
    async def work(world: World) -> None:
        key = Caller("key 1", None, "", frozenset({"deploy"}), "shop")
        reader = Reader(world, key)
        _, told = await reader.next()
        assert (set(told["functions"]), told["gpus"], told["store"], told["whole"]) == ({"shop-a"}, {}, {}, False)
        world.said["functions"]["other-b"]["queued"] = 3
        world.said["functions"]["shop-a"]["running"] = 1
        _, told = await reader.next()
        assert set(told["functions"]) == {"shop-a"}
        spans = world.sampler._spans
        assert spans is not None
        for request, (name, tenant) in enumerate((("shop-a", "shop"), ("other-b", "other"))):
            spans.begun(request, GpuSpan(0, name, tenant, 0, 1.0, "gpu", 0.0))
        name, told = await reader.next()
        assert (name, [each[1] for each in told["spans"]]) == ("spans", ["shop-a"])
        world.sampler.leave(reader.watcher)

    run(work)


def test_there_are_at_most_so_many() -> None:
    async def work(world: World) -> None:
        def refused(caller: Caller) -> None:
            with pytest.raises(HttpError) as caught:
                Reader(world, caller)
            assert (caught.value.failure.status, caught.value.failure.code) == (503, "too_many_watchers")

        readers = [Reader(world) for _ in range(OF_ONE)]
        refused(ANYBODY)
        for tenant in ("shop", "lab"):
            keys = [Caller("key 1", None, "", frozenset({"deploy"}), tenant, (name,)) for name in ("*", "a", "b", "c")]
            readers += [Reader(world, key) for key in keys]
            refused(keys[0])
        assert len(readers) == OF_TENANTS
        refused(Caller("key 1", None, "", frozenset({"deploy"}), "third"))
        whole = Caller("key 2", None, "", frozenset({"deploy", "admin"}))
        readers += [Reader(world, whole) for _ in range(watch.MAX - OF_TENANTS)]
        refused(whole)
        world.sampler.leave(readers.pop().watcher)
        readers.append(Reader(world, whole))
        for reader in readers:
            world.sampler.leave(reader.watcher)

    run(work)


def test_who_would_not_be_let_in_any_more_watches_no_more() -> None:
    async def work(world: World) -> None:
        first, second = (Caller(f"key {n}", None, "", frozenset({"deploy"}), "shop", key=str(n)) for n in (1, 2))
        stays, goes = Reader(world, first), Reader(world, second)
        for reader in (stays, goes):
            assert (await reader.next())[0] == "snapshot"
        world.revoked.add(second)
        world.said["functions"]["shop-a"]["queued"] = 3
        assert (await stays.next())[0] == "change"
        assert (goes.watcher.left.done(), goes.frames, stays.watcher.left.done()) == (True, [], False)
        world.revoked.add(first)
        await asyncio.wait_for(stays.watcher.left, 60)
        assert not world.sampler.watched
        for reader in (stays, goes):
            world.sampler.leave(reader.watcher)  # as the transport does when it has ended

    run(work)


def test_a_sampler_that_raises_ends_its_watchers_and_not_the_node() -> None:
    async def work(world: World) -> None:
        world.said = {}
        reader = Reader(world)
        await asyncio.wait_for(reader.watcher.left, 60)
        world.sampler.leave(reader.watcher)
        assert not world.sampler.watched
        world.said = status("shop-a")
        again = Reader(world)
        assert (await again.next())[0] == "snapshot"
        world.sampler.leave(again.watcher)

    run(work)


def test_a_request_has_a_span_from_its_lease() -> None:
    """Also one that ran before somebody watched."""

    async def work(world: World) -> None:
        rig = loaded(spec("a"), spec("b"))
        world.picture = rig.policy.picture
        ticket = one(rig.arrive(1, "a"), m.Acquire).request
        rig.hear(
            m.Granted(request=ticket, lease=m.Lease(gpu=3, epoch=1, serial=1, secret=9), wake_nbytes=5, source="host")
        )
        reader = Reader(world)
        ticket = one(rig.arrive(2, "b"), m.Acquire).request
        world.sampler.handed(2)  # it has no lease yet
        rig.hear(
            m.Granted(request=ticket, lease=m.Lease(gpu=0, epoch=1, serial=1, secret=9), wake_nbytes=0, source="gpu")
        )
        world.sampler.handed(2)
        assert (await reader.next())[0] == "snapshot"
        spans: list[Any] = []
        while len(spans) < 2:
            name, told = await reader.next()
            assert name == "spans"
            spans += told["spans"]
        assert [(each[1], each[2], each[6]) for each in spans] == [("a", 3, "host"), ("b", 0, "gpu")]
        world.sampler.leave(reader.watcher)

    run(work)


# --- its files


def test_all_files_are_served_and_nothing_else() -> None:
    files = PageFiles()
    assert files.file("")[1] == b"text/html; charset=utf-8"
    for path in pages.PLACE.iterdir():
        assert files.file(path.name)[0] == path.read_bytes()
    for name in ("none.js", "pages.py"):
        with pytest.raises(HttpError):
            files.file(name)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
def test_a_schema_that_names_itself_is_written_out_up_to_a_bound() -> None:
    """60 fields of its own type, 12 levels deep, are millions."""
    itself = {"type": "object", "properties": {f"p{n}": {"$ref": "#/$defs/A"} for n in range(60)}}
    plain = {"type": "object", "properties": {"text": {"$ref": "#/$defs/T"}}, "$defs": {"T": {"type": "string"}}}
    script = f"""
        import {{ example, resolved }} from {orjson.dumps((pages.PLACE / "schema.js").as_uri()).decode()};
        const nodes = (value) => value !== null && typeof value === "object"
          ? Object.values(value).reduce((sum, each) => sum + nodes(each), 1) : 1;
        const [itself, plain] = {orjson.dumps([{"$ref": "#/$defs/A", "$defs": {"A": itself}}, plain]).decode()};
        const written = resolved(itself);
        const fields = Object.keys(example(written)).length;
        console.log(JSON.stringify([nodes(written), fields, resolved(plain), example(resolved(plain))]));
    """
    command = ["node", "--input-type=module", "--eval", script]
    nodes, fields, shown, first = orjson.loads(
        subprocess.run(command, capture_output=True, check=True, timeout=60).stdout
    )
    assert 1000 < nodes < 4000
    assert fields == 60
    assert shown == {"type": "object", "properties": {"text": {"type": "string"}}}
    assert first == {"text": ""}


def test_no_file_makes_markup_of_text_or_asks_another_host() -> None:
    for path in pages.PLACE.iterdir():
        source = path.read_text()
        for word in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "DOMParser",
            "localStorage.key",
        ):
            assert word not in source, f"{path.name} uses {word}"
        assert "//" not in source.replace("http://www.w3.org/2000/svg", "").replace("// ", ""), path.name
    assert "style=" not in (pages.PLACE / "index.html").read_text()
