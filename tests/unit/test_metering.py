"""What is metered: nothing of what was held or computed is lost, or counted twice, whoever it is counted for."""

import random
from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dormouse.controller import ledger as ledger_module
from dormouse.controller.ledger import (
    BY_DAYS,
    BY_HOURS,
    BY_MINUTES,
    DAY,
    HOUR,
    MAX_ACCOUNTS,
    MINUTE_S,
    NOTHING,
    Account,
    Ledger,
    Used,
    aligned,
)
from dormouse.controller.metering import NOBODY, SESSIONS, Metering
from dormouse.core.decisions.leases.metering import LeaseMeter
from dormouse.core.decisions.memory.holdings import Holdings, OwnerGroup, split
from dormouse.core.decisions.memory.pools.regions import Regions
from dormouse.core.decisions.memory.residency import Residency
from dormouse.core.decisions.memory.wake_plan import ModelTooLarge
from dormouse.gpuserver.store.memory.segments import Segments
from dormouse.gpuserver.store.memory.slabs import SlabSpan
from dormouse.gpuserver.store.metering import HostMeter
from dormouse.schemas import messages as m

UNIT = 512
NOW_S = 1_700_000_000.0


# --- an amount, and its parts


@given(st.integers(0, 1 << 80), st.lists(st.integers(0, 1 << 40), min_size=1, max_size=9))
def test_parts_add_up(amount: int, parts: list[int]) -> None:
    shares = split(amount, parts)
    whole = sum(parts)
    assert sum(shares) == amount
    assert all(share >= 0 for share in shares)
    weights = parts if whole else [1] * len(parts)
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share - amount * weight // sum(weights)) <= 1


STEP = st.tuples(st.integers(0, 5), st.sampled_from("abc"), st.sampled_from(["", "x", "y", "xy"]), st.integers(0, 9))


@given(st.lists(STEP, max_size=60))
def test_groups_hold_what_their_things_have(steps: list[tuple[int, str, str, int]]) -> None:
    held, now_ms, things = Holdings(), 0, dict[str, tuple[str, int]]()
    expected: Counter[str] = Counter()
    found: Counter[str] = Counter()
    for passed_ms, key, owners, nbytes in steps:
        now_ms += passed_ms
        for names, each in things.values():
            expected[names] += each * passed_ms
        held.put(key, OwnerGroup.of("k", owners), nbytes, now_ms)
        things[key] = owners, nbytes
        if nbytes == 9:
            found.update({"".join(group.owners): amount for group, amount in held.take(now_ms)})
    found.update({"".join(group.owners): amount for group, amount in held.take(now_ms)})
    assert +found == +expected
    for key in list(things):
        held.drop(key, now_ms)
    assert held.empty


# --- a GPU


class Gpu:
    """Anything that happens to a residency; beside its meter a second one looks at every segment, each time."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.books = Residency(Regions(64 * UNIT))
        self.meter = LeaseMeter(self.books, lambda _: ["k"])
        self.now_s = 0.0
        self.held: Counter[tuple[str, ...]] = Counter()  # by owners, byte-milliseconds
        self.stated: list[m.Metered] = []
        self.kv: list[int] = []

    def passes(self) -> None:
        before_ms = int(self.now_s * 1000)
        self.now_s += self.random.random()
        passed_ms = int(self.now_s * 1000) - before_ms
        for segment in self.books.pool.segments():
            owners = tuple(sorted(self.books.holders(segment)))
            self.held[owners] += self.books.pool.nbytes(segment) * passed_ms
        self.meter.at(self.now_s)

    def happens(self) -> None:
        rng, books = self.random, self.books
        name = rng.choice("abcd")
        match rng.randrange(9):
            case 0:
                sizes = {number: (1 + number % 5) * UNIT for number in rng.sample(range(12), 5)}
                if not books.seated(name):
                    books.retire(books.learn(name, sizes.items()))
            case 1:
                if not books.seated(name):
                    books.retire(books.unlearn(name))
            case 2 | 3:
                if not books.seated(name):
                    try:
                        books.wake(name, lambda: {each: rng.random() for each in "abcd"}, 1.0, alone=False)
                    except ModelTooLarge:
                        return
            case 4:
                books.retire(books.leave(name))
            case 5:
                if (grown := books.grow("kv of k", 2, UNIT, dict, 1.0, owner="kv of k")) is not None:
                    self.kv += grown[0]
            case 6 if self.kv:
                books.forget([self.kv.pop()])
            case 7:
                books.relieve()
            case 8 if books.seated(name) and (here := [s for s in books.pool.segments() if s >= 0]):
                books.claim(name, rng.choice(here))

    def run(self, events: int) -> None:
        for _ in range(events):
            self.passes()
            self.happens()
            self.meter.sync(self.now_s)
            self.stated += self.meter.statements(self.now_s)
        self.passes()
        self.stated += self.meter.state(self.now_s)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32))
def test_what_a_gpu_held_is_stated_to_the_byte_millisecond(seed: int) -> None:
    gpu = Gpu(seed)
    gpu.run(120)
    found: Counter[tuple[str, ...]] = Counter()
    for stated in gpu.stated:
        for held in stated.held:
            owners = ("kv of k",) if held.kind == "kv" else tuple(held.owners)
            found[owners] += held.nbyte_ms
            assert held.kind == ("kv" if "kv of k" in owners else "weights")
    assert +found == +gpu.held


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1 << 32))
def test_what_functions_are_charged_is_what_was_stated(seed: int) -> None:
    gpu, metering = Gpu(seed), Metering(Ledger(), lambda function: function == "f-d")
    for number, name in enumerate("abcdk"):
        metering.instance_up(name, f"f-{name}", f"t{number % 2}")
    for _ in range(4):
        gpu.run(40)
        for stated in gpu.stated:
            metering.gpu(stated, NOW_S)
        gpu.stated.clear()
    _, used = metering.ledger.since(0, NOW_S)
    assert sum(use.weights + use.adapter for use in used.values()) + sum(use.kv for use in used.values()) == sum(
        gpu.held.values()
    )
    assert sum(use.kv for use in used.values()) == gpu.held["kv of k",]
    assert all(use.adapter == 0 for account, use in used.items() if account.function != "f-d")


def stated(gpu: Gpu) -> dict[tuple[str, ...], m.HeldBytes]:
    return {tuple(held.owners): held for each in gpu.meter.state(gpu.now_s) for held in each.held}


def test_a_backbone_is_paid_by_who_used_it_by_time() -> None:
    gpu = Gpu(0)
    for name in "ab":
        gpu.books.learn(name, [(1, 4 * UNIT)])
    gpu.books.wake("a", dict, 1.0)
    gpu.meter.sync(0.0)
    gpu.now_s = 3.0
    gpu.meter.at(gpu.now_s)
    gpu.books.wake("b", dict, 1.0)
    gpu.books.leave("a")
    gpu.meter.sync(3.0)
    gpu.now_s = 4.0
    held = stated(gpu)["a", "b"]
    assert (held.nbyte_ms, held.parts) == (4 * UNIT * 4000, [3000, 1000])
    gpu.books.leave("b")
    gpu.meter.sync(4.0)
    gpu.now_s = 10.0
    held = stated(gpu)["a", "b"]
    assert (held.nbyte_ms, held.parts) == (4 * UNIT * 6000, [3000, 1000]), "while nobody uses it, as when somebody did"


def share(serial: int, **fields: int) -> m.StepShare:
    return m.StepShare(serial=serial, **fields)


def test_a_step_is_paid_by_tokens_and_kv_by_blocks() -> None:
    gpu = Gpu(0)
    gpu.books.grow("kv of k", 2, UNIT, dict, 1.0, owner="kv of k")
    gpu.meter.sync(0.0)
    shares = {"a": share(1, tokens=30, prompt=29, made=1, kv_blocks=3), "b": share(2, tokens=1, made=1, kv_blocks=1)}
    gpu.meter.at(1.0)
    assert gpu.meter.stepped("kv of k", 3_100, shares) == {"a": 3_000, "b": 100}
    gpu.meter.sync(1.0)
    gpu.now_s = 2.0
    (told,) = gpu.meter.state(2.0)
    assert [(use.instance, use.gpu_us, use.prompt, use.made) for use in told.uses] == [
        ("a", 3_000, 29, 1),
        ("b", 100, 0, 1),
    ]
    (held,) = told.held
    assert (held.kind, held.owners, held.nbyte_ms) == ("kv", ["a", "b"], 2 * UNIT * 2000)
    assert held.parts == [3000, 1000]
    gpu.meter.stepped("kv of k", 100, {"b": shares["b"]})
    gpu.now_s = 3.0
    (later,) = gpu.meter.state(3.0)
    assert later.held[0].parts == [3, 1001], "a step counts a millisecond of what was there before it, and no more"
    metering = Metering(Ledger(), lambda _: False)
    for name, tenant in (("a", "t"), ("b", "u")):
        metering.instance_up(name, f"f-{name}", tenant)
    assert [metering.gpu(each, NOW_S) for each in (told, later)] == [{"t": 30, "u": 1}, {"u": 1}]


def test_activations_are_of_who_made_them() -> None:
    gpu = Gpu(0)
    gpu.meter.activations("a", 100, ["a"])
    gpu.meter.at(1.0)
    gpu.meter.activations("b", 150, ["a", "b"])
    gpu.meter.at(3.0)
    gpu.meter.activations("b", 40, ["b"])
    gpu.now_s = 4.0
    held = {owners[0]: each.nbyte_ms for owners, each in stated(gpu).items()}
    assert held == {"a": 100 * 3000, "b": 50 * 2000 + 40 * 1000}


def test_long_statements_come_in_pieces() -> None:
    gpu = Gpu(0)
    for number in range(m.ENTRIES + 3):
        gpu.meter.busy(f"i{number}", 1.0)
    told = gpu.meter.state(1.0)
    assert [len(each.uses) for each in told] == [m.ENTRIES, 3]


# --- host memory


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32))
def test_what_the_host_held_is_stated_to_the_byte_millisecond(seed: int) -> None:
    """Also of segments with equal bytes, which come to lie in one place."""
    rng, books = random.Random(seed), Segments()
    meter = HostMeter(books, lambda holder: holder if isinstance(holder, str) and holder != "ticket" else "")
    living, now_ms, spans = [], 0, 0
    expected: defaultdict[tuple[str, ...], int] = defaultdict(int)
    found: defaultdict[tuple[str, ...], int] = defaultdict(int)
    for _ in range(80):
        passed_ms = rng.randrange(50)
        now_ms += passed_ms
        lying: dict[SlabSpan, set[str]] = {}
        for segment in books.by_id.values():
            if segment.span is not None:
                lying.setdefault(segment.span, set()).update(str(each) for each in segment.holders if each != "ticket")
        for span, owners in lying.items():
            expected[tuple(sorted(owners))] += span.nbytes * passed_ms
        match rng.randrange(5):
            case 0:
                spans += 1
                segment = books.new(8, "s", SlabSpan(1, spans * 8, 8))
                books.hold(segment, rng.choice(["f", "g", "ticket"]))
                living.append(segment)
            case 1 if living:
                books.hold(rng.choice(living), rng.choice(["f", "g", "h"]))
            case 2 if living:
                segment = rng.choice(living)
                for holder in list(segment.holders)[: rng.randrange(3)]:
                    books.release(segment, holder)
                living = [each for each in living if each.id in books.by_id]
            case 3 if living and (segment := rng.choice(living)).fingerprint is None:
                books.pin(segment)
                books.identify(segment, bytes([rng.randrange(3)]))
                books.unpin(segment)
            case 4 if living:
                for segment in living:
                    if segment.fingerprint is not None:
                        books.mark_filed(segment)
                books.move_down(8)
        meter.sync(now_ms / 1000 + 1e-6)
        if rng.random() < 0.1:
            for each in meter.state(now_ms / 1000 + 1e-6):
                for held in each.held:
                    found[tuple(held.owners)] += held.nbyte_ms
    for each in meter.state(now_ms / 1000 + 1e-6):
        for held in each.held:
            found[tuple(held.owners)] += held.nbyte_ms
    assert {key: value for key, value in found.items() if value} == {k: v for k, v in expected.items() if v}


def test_host_memory_is_paid_by_who_used_gpus() -> None:
    metering = Metering(Ledger(), lambda _: False)
    for name in "abc":
        metering.instance_up(name, f"f-{name}", "t")
    uses = [m.InstanceUse(instance=name, seat_ms=ms, gpu_us=0) for name, ms in (("a", 10), ("b", 30))]
    both = m.HeldBytes(kind="host", owners=["f-a", "f-b"], nbyte_ms=400)
    idle = m.HeldBytes(kind="host", owners=["f-b", "f-c"], nbyte_ms=10)
    metering.gpu(m.Metered(held=[], uses=uses), NOW_S)
    for _ in range(2):  # the second time nobody has used anything
        metering.host(m.HostMetered(held=[both, idle]), NOW_S)
    unused = m.HeldBytes(kind="host", owners=["f-a", "f-c"], nbyte_ms=11)
    metering.host(m.HostMetered(held=[unused, m.HeldBytes(kind="host", owners=[], nbyte_ms=5)]), NOW_S)
    _, used = metering.ledger.since(0, NOW_S)
    host = {account.function: use.host for account, use in used.items()}
    assert host == {"f-a": 200 + 5, "f-b": 600 + 20, "f-c": 6, "": 5}


# --- whose it is


def test_what_is_of_whom() -> None:
    metering = Metering(Ledger(), lambda _: False)
    metering.deployed([("kept", "t1")])
    metering.instance_up("i1", "f", "t2")
    metering.instance_up("s1", "", "default")
    metering.instance_gone("i1")
    uses = [m.InstanceUse(instance=name, seat_ms=1, gpu_us=1) for name in ("i1", "s1", "kept", "who")]
    metering.gpu(m.Metered(held=[], uses=uses), NOW_S)
    metering.served(m.Served(functions=[("kept", "t1", 3)]), NOW_S)
    metering.host(m.HostMetered(held=[m.HeldBytes(kind="gold", owners=["f"], nbyte_ms=5)]), NOW_S)
    _, used = metering.ledger.since(0, NOW_S)
    assert used == {
        Account("t2", "f"): Used(gpu_us=1),
        Account("default", SESSIONS): Used(gpu_us=1),
        Account("t1", "kept"): Used(gpu_us=1, requests=3),
        NOBODY: Used(gpu_us=1),
    }


# --- the ledger


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 1 << 32))
def test_use_since_any_time_is_what_was_added_since(seed: int) -> None:
    """As finely as it is kept; and totals lose nothing, however much is forgotten of when."""
    rng, ledger, account = random.Random(seed), Ledger(), Account("t", "f")
    added: list[tuple[int, int]] = []  # minute, amount
    minute = 30_000_000
    for _ in range(300):
        minute += rng.choice([0, 0, 1, 1, 2, 7, 90, 700]) if rng.random() < 0.9 else rng.randrange(5000)
        amount = rng.randrange(1, 100)
        ledger.add(account, Used(gpu_us=amount), minute * MINUTE_S + rng.randrange(60))
        added.append((minute, amount))
        books = ledger.books[account]
        assert books.total.gpu_us == sum(amount for _, amount in added)
        assert len(books.marks) <= BY_MINUTES + BY_HOURS // HOUR + BY_DAYS // DAY + 5
    now_s = minute * MINUTE_S + 59.0
    for age in [rng.randrange(BY_DAYS) for _ in range(30)] + [0, 1, BY_MINUTES, BY_HOURS, BY_DAYS]:
        since_s, used = ledger.since((minute - age) * MINUTE_S, now_s)
        fine_s = MINUTE_S if age <= BY_MINUTES else DAY * MINUTE_S if age > BY_HOURS - HOUR else HOUR * MINUTE_S
        assert (minute - age) * MINUTE_S - since_s < fine_s
        expected = sum(amount for at, amount in added if at * MINUTE_S >= since_s)
        assert used.get(account, NOTHING).gpu_us == expected


def test_a_clock_that_goes_back_stands_still() -> None:
    ledger, account = Ledger(), Account("t", "f")
    ledger.add(account, Used(requests=1), NOW_S)
    ledger.add(account, Used(requests=1), NOW_S - 5000)
    since_s, used = ledger.since(NOW_S - 60, NOW_S - 5000)
    assert used[account].requests == 2
    assert since_s <= NOW_S


def test_how_far_back_is_known() -> None:
    now = 30_000_000
    assert aligned(now - 7, now) == now - 7
    assert aligned(now - 3 * HOUR, now) % HOUR == 0
    assert aligned(0, now) == (now - BY_DAYS) // DAY * DAY


def test_accounts_are_bounded() -> None:
    ledger = Ledger()
    for number in range(MAX_ACCOUNTS + 5):
        ledger.add(Account("t", f"f{number}"), Used(requests=1), NOW_S + number * MINUTE_S)
    assert len(ledger.books) == MAX_ACCOUNTS
    assert [account.function for account in ledger.closed] == [f"f{number}" for number in range(5)]


def test_a_tenant_of_many_accounts_makes_the_node_forget_its_own() -> None:
    ledger = Ledger()
    idle = [Account("idle", f"f{number}") for number in range(3)]
    for account in idle:
        ledger.add(account, Used(requests=1), NOW_S)
    for number in range(2 * MAX_ACCOUNTS):
        ledger.add(Account("many", f"f{number}"), Used(requests=1), NOW_S + (number + 1) * MINUTE_S)
    assert len(ledger.books) == MAX_ACCOUNTS
    assert all(account in ledger.books for account in idle)
    assert [account.function for account in ledger.closed[:3]] == ["f0", "f1", "f2"]


def test_of_tenants_with_as_many_accounts_the_one_that_adds_forgets_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "MAX_ACCOUNTS", 2)
    ledger = Ledger()
    for age, account in enumerate([Account("t", "old"), Account("u", "f"), Account("u", "g")]):
        ledger.add(account, Used(requests=1), NOW_S + age * MINUTE_S)
    assert list(ledger.books) == [Account("t", "old"), Account("u", "g")]


@pytest.mark.parametrize("kind", ["weights", "adapter"])
def test_an_adapters_bytes_are_those_that_only_adapters_have(kind: str) -> None:
    metering = Metering(Ledger(), lambda function: function.startswith("lora"))
    for name, function in (("a", "lora1"), ("b", "lora2"), ("c", "base")):
        metering.instance_up(name, function, "t")
    owners = ["a", "b"] if kind == "adapter" else ["a", "b", "c"]
    metering.gpu(m.Metered(held=[m.HeldBytes(kind="weights", owners=owners, nbyte_ms=60)], uses=[]), NOW_S)
    _, used = metering.ledger.since(0, NOW_S)
    assert {getattr(use, kind) for use in used.values()} == {60 // len(owners)}
