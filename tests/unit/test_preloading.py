"""What idle GPUs are given before anybody asks for it: decisions of the scheduling core."""

from random import Random
from typing import Any

import pytest

from dormouse.core.decisions.scheduling import events as ev
from dormouse.core.decisions.scheduling import holding
from dormouse.core.decisions.scheduling.preloading import MAX_WISHED, PLAN_S, REFUSED_S, REST_S, SLICE
from dormouse.core.decisions.scheduling.scheduler import Scheduler
from dormouse.core.decisions.scheduling.topology import Topology
from dormouse.schemas.messages import Done, PoolStats
from dormouse.schemas.policy import EVICTIONS, Policy

MB = 1_000_000
HOST_BPS = 1e9


class Node:
    """A core, and executors that do what it says at once: a model is there when its lease ends, in ``now_s``."""

    def __init__(self, gpus: int = 1, room_mb: int = 300, policy: Policy | None = None, switch: bool = False) -> None:
        topology = Topology(
            host_bps=HOST_BPS, switch_bps=HOST_BPS if switch else 0.0, switches=(0,) * gpus if switch else ()
        )
        self.core = Scheduler(
            seed=1, revoke_s=5.0, max_waiting=100, policy=policy or Policy(preload=True), topology=topology
        )
        self.now_s = 0.0
        self.requests = 0
        self.orders: list[ev.PreloadOn] = []  # that nothing has come of yet
        self.room_mb = room_mb
        self.there: dict[int, dict[str, int]] = {gpu: {} for gpu in range(gpus)}  # MB
        for gpu in range(gpus):
            self.do(ev.ExecutorUp(gpu, 1, self.stats(gpu)))

    def stats(self, gpu: int) -> PoolStats:
        used = sum(self.there[gpu].values())
        return PoolStats(weights_nbytes=used * MB, free_nbytes=(self.room_mb - used) * MB)

    def do(self, event: ev.Event) -> list[ev.Action]:
        if not isinstance(event, ev.Tick):
            self.later(0.0)
        actions = self.core.handle(event, self.now_s)
        self.core.check()
        self.orders += [action for action in actions if isinstance(action, ev.PreloadOn)]
        return actions

    def model(self, name: str, mb: int, base: str = "") -> None:
        self.do(ev.FunctionKnown(name, 1.0, 0.98, 1.0, base=base))
        self.do(ev.InstanceKnown(name, name))
        self.do(ev.ModelSized(name, 1, mb * MB))

    def ask(self, name: str) -> list[ev.Action]:
        self.requests += 1
        return self.do(ev.Asked(self.requests, name, self.now_s + 1.0, 1))

    def calm(self) -> None:
        """What comes is given up."""
        while self.orders:
            self.preloaded(self.orders[0], "yielded")

    def over(self, wake: ev.WakeOn, mb: int | None = None, run_s: float = 0.01) -> list[ev.Action]:
        """Its lease is; of its model so much is there (all)."""
        gpu, name = wake.lease.gpu, wake.instance
        self.now_s += run_s
        model = self.core.models[name]
        self.there[gpu][name] = model.nbytes // MB if mb is None else mb
        done = Done(
            serial=wake.lease.serial, outcome="ended", gpu_us=10, copied_nbytes=0, peer_nbytes=0, file_nbytes=0,
            resident=[(name, self.there[gpu][name] * MB)], peak_activation_nbytes=0, version=1, stats=self.stats(gpu),
        )  # fmt: skip
        return self.do(ev.LeaseOver(gpu, 1, done))

    def use(self, name: str, times: int = 1) -> None:
        for _ in range(times):
            (wake,) = [action for action in self.ask(name) if isinstance(action, ev.WakeOn)]
            self.calm()
            self.over(wake)

    def lose(self, gpu: int, *names: str) -> list[ev.Action]:
        """The executor says that these are there no more."""
        self.calm()
        for name in names:
            del self.there[gpu][name]
        return self.do(ev.Evicted(gpu, 1, tuple((name, 0) for name in names), self.stats(gpu)))

    def later(self, seconds: float) -> list[ev.PreloadOn]:
        """What is to be brought by then, if executors bring nothing."""
        until_s = self.now_s + seconds
        while (due_s := self.core.next_deadline_s) is not None and due_s <= until_s:
            self.now_s = max(self.now_s, due_s)
            self.do(ev.Tick())
        self.now_s = until_s
        return list(self.orders)

    def preloaded(self, order: ev.PreloadOn, outcome: str = "there") -> list[ev.Action]:
        self.orders.remove(order)
        model = self.core.models[order.instance]
        if outcome == "there":
            self.there[order.gpu][order.instance] = model.nbytes // MB
        resident = tuple((name, mb * MB) for name, mb in self.there[order.gpu].items())
        nbytes = order.nbytes if outcome == "there" else 0
        return self.do(ev.PreloadOver(order.gpu, 1, order.instance, outcome, nbytes, resident, self.stats(order.gpu)))


def lost(policy: Policy | None = None, **more: Any) -> Node:
    """A node where "a" was asked for four times, "b" once, and neither is there any more."""
    node = Node(policy=policy, **more)
    node.model("a", 100)
    node.model("b", 100)
    node.model("never", 100)
    node.use("b")
    node.use("a", 4)
    for gpu, there in node.there.items():
        node.lose(gpu, *list(there))
    return node


def test_an_idle_gpu_is_given_what_is_asked_for_most_and_then_the_next() -> None:
    node = lost()
    assert node.later(REST_S / 2) == []
    (first,) = node.later(PLAN_S)
    assert (first.gpu, first.instance, first.version, first.nbytes) == (0, "a", 1, 100 * MB)
    assert first.saved_s == pytest.approx(0.09)  # of 0.1 s that the copy takes, a run hides 0.01
    assert first.rate_s == pytest.approx(node.core.functions["a"].rate(node.now_s), rel=0.01)
    assert node.later(10 * PLAN_S) == [first]  # one at a time
    node.preloaded(first)
    (second,) = node.later(PLAN_S)
    assert second.instance == "b"
    node.preloaded(second)
    assert node.later(10 * PLAN_S) == []  # "never" has had no request: nothing is known of it
    counts = node.core.counts("a")
    assert (counts.preloads, counts.copied_nbytes) == (1, 100 * MB)


def test_a_request_comes_first() -> None:
    node = lost()
    node.model("c", 100)
    (wake,) = [action for action in node.ask("c") if isinstance(action, ev.WakeOn)]
    assert node.later(10 * PLAN_S) == []  # it computes
    node.over(wake)
    (first,) = node.later(PLAN_S)
    assert first.instance == "a"
    (wake,) = [action for action in node.ask("a") if isinstance(action, ev.WakeOn)]
    assert wake.wake_nbytes == 100 * MB  # of what is on its way its executor knows
    node.preloaded(first, "yielded")
    assert node.later(10 * PLAN_S) == []
    node.over(wake)
    (again,) = node.later(PLAN_S)
    assert again.instance == "b"


def test_nothing_is_brought_while_a_request_waits() -> None:
    node = lost(Policy(preload=True, turns=1))
    (wake,) = [action for action in node.ask("a") if isinstance(action, ev.WakeOn)]
    node.ask("b")
    node.do(ev.Woken(0, 1, wake.lease.serial, 1))
    assert node.later(PLAN_S) == []


def test_neighbours_on_a_switch_have_the_link_to_themselves() -> None:
    node = lost(gpus=2, switch=True)
    (first,) = node.later(PLAN_S)
    node.model("c", 50)
    other = 1 - first.gpu
    node.there[other]["c"] = 20
    node.do(ev.Evicted(other, 1, (("c", 20 * MB),), node.stats(other)))
    actions = node.ask("c")
    (wake,) = [action for action in actions if isinstance(action, ev.WakeOn)]
    assert wake.lease.gpu == other
    assert ev.StopPreloadOn(first.gpu) in actions
    node.preloaded(first, "yielded")
    assert node.later(0.04) == []
    node.over(wake)
    assert node.later(PLAN_S)[0].instance == "a"


def test_what_has_its_model_elsewhere_stays_there() -> None:
    node = Node(gpus=2)
    node.model("a", 100)
    node.use("a", 4)
    assert node.later(10 * PLAN_S) == []


def test_requests_of_long_ago_count_no_more() -> None:
    node = lost(Policy(preload=True, half_life_ms=1000))
    node.now_s += 12.0
    node.lose(0)
    assert node.later(10 * PLAN_S) == []


def test_what_was_refused_is_not_tried_again_at_once() -> None:
    node = lost(room_mb=100)
    (first,) = node.later(PLAN_S)
    node.preloaded(first, "refused")
    (other,) = node.later(PLAN_S)
    assert (first.instance, other.instance) == ("a", "b")
    node.preloaded(other, "refused")
    node.lose(0)
    assert node.later(REFUSED_S / 2) == []
    node.now_s += REFUSED_S
    node.lose(0)
    assert node.later(PLAN_S)[0].instance == "a"


def test_what_is_worth_more_stays() -> None:
    """There is room for one. What is there keeps it, though the other is asked for as often: copies cost something."""
    node = Node(room_mb=100)
    node.model("a", 100)
    node.model("b", 100)
    node.use("a", 4)
    node.lose(0, "a")
    node.use("b", 4)
    assert node.later(10 * PLAN_S) == []
    node.lose(0, "b")
    node.use("a", 20)
    node.lose(0, "a")
    node.use("b")
    (order,) = node.later(10 * PLAN_S)
    assert order.instance == "a"  # 24 times against five


def test_an_adapter_comes_with_its_base_for_which_all_count() -> None:
    """The base is 200 MB for two adapters of 10 MB, the other model as large and asked for more than each of them."""
    node = Node(room_mb=250)
    node.model("base", 200)
    node.model("math", 210, base="base")
    node.model("code", 210, base="base")
    node.model("other", 210)
    for name, times in (("math", 3), ("code", 3), ("other", 4)):
        node.use(name, times)
        node.lose(0, name)
    (order,) = node.later(PLAN_S)
    assert (order.instance, order.nbytes) == ("base", 200 * MB)
    node.orders.clear()
    shared = (("base", 200 * MB), ("math", 200 * MB), ("code", 200 * MB))
    stats = PoolStats(weights_nbytes=200 * MB, free_nbytes=50 * MB)
    node.do(ev.PreloadOver(0, 1, "base", "there", 200 * MB, shared, stats))
    (adapter,) = node.later(PLAN_S)
    assert (adapter.instance, adapter.nbytes) in (("math", 10 * MB), ("code", 10 * MB))


def test_an_adapter_that_nobody_has_asked_for_does_not_come_beside_its_base() -> None:
    node = Node(room_mb=250)
    node.model("base", 200)
    node.model("math", 210, base="base")
    node.use("base", 4)
    node.do(ev.Evicted(0, 1, (("math", 200 * MB),), node.stats(0)))
    assert node.later(10 * PLAN_S) == []


def test_an_adapter_whose_base_has_no_room_does_not_come() -> None:
    node = Node(room_mb=250)
    node.model("base", 240)
    node.model("math", 260, base="base")
    node.do(ev.Asked(99, "math", 1.0, 1))  # refused: no GPU holds it
    (order,) = node.later(10 * PLAN_S)
    assert order.instance == "base"
    node.preloaded(order)
    assert node.later(10 * PLAN_S) == []


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_by_every_order_of_evictions(eviction: str) -> None:
    node = lost(Policy(preload=True, eviction=eviction))
    assert node.later(PLAN_S)[0].instance == "a"


def test_not_where_it_is_off_or_models_are_bound() -> None:
    assert lost(Policy()).later(10 * PLAN_S) == []
    assert lost(Policy(preload=True, placement="bound")).later(10 * PLAN_S) == []


def test_it_can_be_turned_on_while_the_node_runs() -> None:
    node = lost(Policy())
    node.do(ev.PolicyChosen(Policy(preload=True)))
    assert node.later(PLAN_S)[0].instance == "a"


def test_word_of_an_executor_that_is_gone_changes_nothing() -> None:
    node = lost()
    (order,) = node.later(PLAN_S)
    node.do(ev.ExecutorUp(0, 2, node.stats(0)))
    node.preloaded(order)
    assert node.core.gpus[0].resident == {}
    assert node.later(PLAN_S)[0].instance == "a"


class Many(Node):
    """Sixty functions, twelve of them with adapters over two bases, asked for by chance; some of it is there."""

    def __init__(self, seed: int, room_mb: int) -> None:
        super().__init__(room_mb=100_000)
        rng = Random(seed)
        sizes = {f"f{n}": rng.randint(10, 200) for n in range(46)} | {"base0": 150, "base1": 90}
        bases = dict.fromkeys(sizes, "")
        for n in range(12):
            bases[f"a{n}"] = f"base{n % 2}"
            sizes[f"a{n}"] = sizes[bases[f"a{n}"]] + rng.randint(1, 20)
        for name, mb in sizes.items():
            self.model(name, mb, bases[name])
        for _ in range(150):
            self.use(rng.choice(list(sizes)))
        self.room_mb = room_mb
        self.there[0] = {name: sizes[name] for name in list(sizes)[::5] if not bases[name]}
        self.room_mb += sum(self.there[0].values())
        gone = [(name, 0) for name in sizes if name not in self.there[0]]
        self.orders.clear()
        self.calm()
        self.do(ev.Evicted(0, 1, tuple(gone), self.stats(0)))


@pytest.mark.parametrize("seed", range(3))
def test_of_many_those_are_brought_that_are_chosen_of_all(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is looked at is only what may be chosen; with all of it at once, greed takes the same."""

    def brought() -> list[str]:
        node, found = Many(seed, room_mb=800), list[str]()
        while orders := node.later(10.0):
            assert len(orders) == 1
            found.append(orders[0].instance)
            node.preloaded(orders[0])
        return found

    some = brought()
    assert len(some) > 5
    monkeypatch.setattr(holding, "FEW", 1000)  # then all artefacts are made, and given to `filling` at once
    assert brought() == some


def test_a_look_is_many_slices_and_events_between_them_are_heard() -> None:
    node = Many(1, room_mb=800)
    ticks = 0
    while not node.orders:
        assert node.core.next_deadline_s is not None
        node.now_s = max(node.now_s, node.core.next_deadline_s)
        node.core.handle(ev.Tick(), node.now_s)
        ticks += 1
        if ticks == 5:  # in the middle of it
            actions = node.core.handle(ev.Asked(5000, "f7", node.now_s + 1.0, 1), node.now_s)
            (wake,) = [action for action in actions if isinstance(action, ev.WakeOn)]
            assert node.later(PLAN_S) == []  # what was chosen does not come: somebody computes there
            node.over(wake)
        if ticks > 5:
            break
    assert ticks == 6
    assert len(node.later(10 * PLAN_S)) == 1


def test_no_slice_is_much_larger_than_it_may_be() -> None:
    """Also with a base that hundreds add to. Units are of about a microsecond."""
    node = Node(room_mb=5_000)
    node.model("base", 1000)
    handle = node.core.handle  # `check` takes long for so many
    for number in range(400):
        name = f"a{number}"
        handle(ev.FunctionKnown(name, 1.0, 0.98, 1.0, base="base"), 0.0)
        handle(ev.InstanceKnown(name, name), 0.0)
        handle(ev.ModelSized(name, 1, 1010 * MB), 0.0)
        handle(ev.Asked(1000 + number, name, 1.0, 1), 0.0)
        handle(ev.Released(1000 + number), 0.0)
    looking = node.core._preloading._choosing([node.core.gpus[0]], node.now_s)
    units = list(looking)
    assert sum(units) > 50 * SLICE
    assert max(units) <= 5 * SLICE


def test_a_runtime_that_is_what_is_missing_is_opened() -> None:
    """Its model is there, as others have the same; its process is not. It is asked for once, and not again at once."""
    node = Node(room_mb=500)
    node.do(ev.FunctionKnown("chat", 1.0, 0.98, 1.0, tpot_s=0.1))
    node.do(ev.InstanceKnown("chat", "chat", "", "chat"))
    node.do(ev.ModelSized("chat", 1, 100 * MB))
    node.use("chat")
    (order,) = node.later(PLAN_S)
    assert (order.instance, order.nbytes) == ("chat", 0)
    assert order.saved_s == node.core.functions["chat"].start_s
    node.preloaded(order)
    assert node.later(REFUSED_S / 2) == []
    node.now_s += REFUSED_S
    node.lose(0)
    (again,) = node.later(PLAN_S)  # nobody has said that it is there
    node.preloaded(again)
    node.do(ev.RuntimesOn(0, 1, ("chat",)))
    node.now_s += REFUSED_S
    node.lose(0)
    assert node.later(10 * PLAN_S) == []


def two_runtimes(beside_nbytes: int) -> list[str]:
    """Which of two are opened where their models are there, and a context takes 100 MB."""
    node = Node(room_mb=500)
    node.do(ev.ExecutorUp(0, 1, node.stats(0), 100 * MB, beside_nbytes))
    for name, times in (("often", 9), ("seldom", 2)):
        node.do(ev.FunctionKnown(name, 1.0, 0.98, 1.0, tpot_s=0.1))
        node.do(ev.InstanceKnown(name, name, "", name))
        node.do(ev.ModelSized(name, 1, 100 * MB))
        node.use(name, times)
    opened: list[str] = []
    while orders := node.later(10 * PLAN_S):
        (order,) = orders
        assert order.nbytes == 0
        opened.append(order.instance)
        node.do(ev.RuntimesOn(0, 1, tuple(sorted(opened))))
        node.preloaded(order)
    return opened


def test_a_runtime_is_opened_where_its_context_has_room_beside_the_pool() -> None:
    """The pool has room for both; of two, the one comes that saves more."""
    assert two_runtimes(200 * MB) == ["often", "seldom"]
    assert two_runtimes(199 * MB) == ["often"]
    assert two_runtimes(99 * MB) == []


def test_no_runtime_without_its_model() -> None:
    """It would be there no later than the copy that a request waits for in any case."""
    node = Node(room_mb=150)
    node.do(ev.FunctionKnown("chat", 1.0, 0.98, 1.0, tpot_s=0.1))
    node.do(ev.InstanceKnown("chat", "chat", "", "chat"))
    node.do(ev.ModelSized("chat", 1, 100 * MB))
    node.model("a", 100)
    node.use("chat")
    node.use("a", 30)
    node.lose(0, "chat")
    assert node.later(10 * PLAN_S) == []


# --- what somebody waits for


@pytest.mark.parametrize("preload", [True, False])
def test_what_somebody_waits_for_comes_to_an_idle_gpu_though_nobody_has_asked_for_it(preload: bool) -> None:
    node = Node(policy=Policy(preload=preload))
    node.model("a", 100)
    node.do(ev.BringAsked("a", node.now_s + 50.0))
    (order,) = node.orders
    assert (order.gpu, order.instance, order.nbytes) == (0, "a", 100 * MB)
    assert node.core.preload_worth(0, "a")["a"] == float("inf")
    assert not node.core.is_on_gpu("a")
    node.preloaded(order)
    assert (node.core.is_on_gpu("a"), node.orders) == (True, [])
    node.do(ev.BringAsked("a", node.now_s + 50.0))
    assert node.orders == [], "it is there"


def test_what_is_given_up_is_brought_again_until_nobody_waits() -> None:
    node = Node(policy=Policy(preload=False))
    node.model("a", 100)
    node.model("b", 100)
    (wake,) = [action for action in node.ask("b") if isinstance(action, ev.WakeOn)]
    node.do(ev.BringAsked("a", node.now_s + 50.0))
    assert node.orders == [], "somebody computes"
    node.over(wake)
    (order,) = node.orders
    node.preloaded(order, "yielded")
    (order,) = node.orders
    node.preloaded(order, "refused")
    assert node.orders == [], "who waits is told"
    node.do(ev.BringAsked("a", node.now_s + 50.0))
    (order,) = node.orders
    node.now_s += 51.0
    node.preloaded(order, "yielded")
    assert node.orders == [], "it is too late"


@pytest.mark.parametrize("others", [MAX_WISHED - 1, MAX_WISHED])
def test_so_many_models_are_wished_for_and_no_more(others: int) -> None:
    node = Node(policy=Policy(preload=False))
    node.model("a", 100)
    node.model("b", 100)
    (wake,) = [action for action in node.ask("b") if isinstance(action, ev.WakeOn)]
    for name in ("a", *(f"other {number}" for number in range(others))):
        node.do(ev.BringAsked(name, node.now_s + 50.0))
    node.over(wake)
    assert [order.instance for order in node.orders] == ["a"] * (others < MAX_WISHED), "who wished first is forgotten"


def test_several_that_are_wished_for_come_to_as_many_gpus() -> None:
    node = Node(gpus=2, policy=Policy(preload=False))
    for name in ("a", "b", "c"):
        node.model(name, 100)
        node.do(ev.BringAsked(name, node.now_s + 50.0))
    assert [order.instance for order in node.orders] == ["a", "b"]
    node.preloaded(node.orders[1])
    assert [order.instance for order in node.orders] == ["a", "c"]


def test_what_is_pinned_does_not_leave_for_it() -> None:
    node = Node(policy=Policy(preload=False))
    node.model("a", 100)
    node.model("b", 100)
    node.do(ev.FunctionKnown("b", 1.0, 0.98, 1.0, pinned=True))
    node.use("b")
    node.do(ev.BringAsked("a", node.now_s + 50.0))
    worth = node.core.preload_worth(0, "a")
    assert list(worth) == ["a", "b"], "ascending: what comes is worth less than what is pinned"
    assert worth["b"] >= worth["a"]


def test_what_somebody_had_leave_comes_back_for_requests_alone() -> None:
    node = lost()
    node.do(ev.KeptAway("a", node.now_s + 600.0))
    (order,) = node.later(10 * PLAN_S)
    assert order.instance == "b"
    node.preloaded(order, "there")
    assert node.later(100 * PLAN_S) == []
    node.use("a")
    assert node.core.is_on_gpu("a")
