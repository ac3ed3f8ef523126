"""Leases of runtimes at random: books hold, and nobody has memory or a turn that is another's."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from played_leases import GRANULE, SEAT_IDLE_S, Played

from dormouse.core.decisions.leases import events as e
from dormouse.core.decisions.leases.held import GOING, SEATED, TURN, LeaseState
from dormouse.schemas import messages as m


class AnyOrder(RuleBasedStateMachine):
    """Whatever is said in whatever order: books hold, nobody has memory or a turn that is another's."""

    shared = adapters = ""

    def __init__(self) -> None:
        super().__init__()
        self.played = Played(granules=6, models="abc", shared=self.shared, adapters=self.adapters)

    def of(self, name: str) -> str:
        """Its runtime."""
        return "g" if name in self.shared else name

    @rule(name=st.sampled_from("abc"))
    def wake(self, name: str) -> None:
        if self.played.lease(name) is None and not any(
            isinstance(first, e.WakeAsked) and first.wake.instance == name for first in self._coming()
        ):
            self.played.wake(name)

    def _coming(self) -> list[Any]:
        return list(self.played.machine._state.coming)

    @rule(name=st.sampled_from("abc"), kind=st.sampled_from(["pause", "turn", "revoke"]))
    def controller(self, name: str, kind: str) -> None:
        if (lease := self.played.lease(name)) is not None:
            message = {"pause": m.Pause, "turn": m.Turn, "revoke": m.Revoke}[kind]
            self.played.do(message(serial=lease.serial))

    @rule(name=st.sampled_from("abc"), extents=st.integers(1, 4))
    def grow(self, name: str, extents: int) -> None:
        if (name := self.of(name)) in self.played.turn and name not in self.played.asked:
            self.played.say(name, m.KvWanted(extents=extents, nbytes=GRANULE))

    @rule(name=st.sampled_from("abc"), count=st.integers(1, 3))
    def shrink(self, name: str, count: int) -> None:
        name = self.of(name)
        gone, self.played.kv[name] = self.played.kv[name][:count], self.played.kv[name][count:]
        if gone:
            self.played.say(name, m.KvReturned(extents=gone))

    @rule(name=st.sampled_from("abc"), wants=st.booleans())
    def want(self, name: str, wants: bool) -> None:
        self.played.say(self.of(name), m.Stepped(busy_us=5) if wants else m.StepsWanted())

    @rule(name=st.sampled_from("abc"), idle=st.integers(0, 4), recompute_us=st.sampled_from([0, 5, 10**6]))
    def step(self, name: str, idle: int, recompute_us: int) -> None:
        if (name := self.of(name)) not in self.played.reclaims:
            self.played.step(name, idle, recompute_us)

    @rule(name=st.sampled_from("abc"))
    def wait(self, name: str) -> None:
        if (name := self.of(name)) in self.played.turn:
            self.played.say(name, m.StepWaits())

    @rule(name=st.sampled_from("abc"), after_s=st.sampled_from([0.0, 3.0, SEAT_IDLE_S]))
    def rest(self, name: str, after_s: float) -> None:
        self.played.rests(self.of(name))
        self.played.now_s += after_s
        self.played.do(e.Tick())

    @rule(nbytes=st.integers(1, 6))
    def relieve(self, nbytes: int) -> None:
        if self.played.machine._state.relieving is None:
            self.played.do(e.Relieve(0, nbytes * GRANULE, 0))

    @precondition(lambda self: self.played.obeys)
    @rule()
    def stop_obeying(self) -> None:
        self.played.obeys = False

    @rule(name=st.sampled_from("abc"))
    def obey_late(self, name: str) -> None:
        self.played.obeys = True
        name = self.of(name)
        self.played.obey(name)
        if name in self.played.reclaims:
            self.played.give_back(name)

    @rule(name=st.sampled_from("abc"), dies=st.booleans())
    def end(self, name: str, dies: bool) -> None:
        if (lease := self.played.lease(name)) is None:
            return
        if dies:
            self.played.dies(self.of(name))
        else:
            self.played.do(e.SeatUnwanted(lease.serial))

    @invariant()
    def what_is_mapped_is_what_its_leases_have(self) -> None:
        """Else it could become another's, and be read there."""
        residency = self.played.machine.residency
        for name, offsets in self.played.mapped.items():
            members = self.played.machine._state.members(name)
            seated = [lease.instance for lease in members if residency.seated(lease.instance)]
            segments = {segment for instance in seated for segment in residency.places(instance)}
            assert offsets <= {granule.offset for granule in residency.pool.granules(segments)}

    @invariant()
    def kv_is_the_runtimes(self) -> None:
        residency = self.played.machine.residency
        for name, extents in self.played.kv.items():
            if extents:
                assert set(extents) <= set(residency.claimed(f"kv of {name}")), (
                    "KV that is given away while it is mapped"
                )
        going = [lease for lease in self.played.machine.leases.values() if lease.state in GOING]
        lent = [books for books in self.played.machine._state.runtimes.values() if books.lent]
        if not going and not self.played.reclaims and not lent:
            books = self.played.machine._state.runtimes.values()
            waiting = [each.name for each in books if each.kv_wanted is not None]
            assert not waiting, "KV waits for nobody"
            assert self.played.machine._state.relieving is None, "an operation waits for nobody"
        running = [lease for lease in self.played.machine.leases.values() if lease.state is LeaseState.RUNNING]
        assert len(running) <= 1
        assert len(lent) <= 1
        assert all("turn" in self.played.owes[books.name] for books in lent), "a step that will not be given back"

    @rule(seconds=st.floats(0.001, 4.0))
    def time_passes(self, seconds: float) -> None:
        self.played.now_s += seconds
        self.played.do(e.Tick())

    def teardown(self) -> None:
        self.played.check_metered()


def test_in_any_order_books_agree_and_nobody_waits_for_nothing() -> None:
    run_state_machine_as_test(AnyOrder, settings=settings(max_examples=120, stateful_step_count=40, deadline=None))


class AnyOrderShared(AnyOrder):
    """The same of a runtime that computes for two."""

    shared = "ab"

    @invariant()
    def who_has_a_seat_has_it_at_the_runtime(self) -> None:
        seated = [each for each in self.played.machine._state.members("g") if each.state in SEATED and not each.refused]
        if seated:
            assert "g" in self.played.seat, "all was unmapped under one who has a seat"
            assert "seat" not in self.played.owes["g"]

    @invariant()
    def somebody_is_asked_for_what_is_to_be_computed(self) -> None:
        machine = self.played.machine
        books = machine._state.runtimes.get("g")
        if books is None or not books.wanting or self.played.owes["g"]:
            return
        members = machine._state.members("g")
        asked = any(lease.wants or lease.state in TURN or lease.state is LeaseState.CLOSING for lease in members)
        assert asked or self._coming(), "steps that nobody will compute"


class AnyOrderAdapters(AnyOrderShared):
    """Each of the two has an adapter, of which its runtime lets go when it comes to that."""

    adapters = "ab"

    def __init__(self) -> None:
        super().__init__()
        self.played.slow = True

    @invariant()
    def who_has_sequences_and_no_seat_asks_for_it(self) -> None:
        state = self.played.machine._state
        for lease in state.members("g"):
            if lease.state is LeaseState.AWAY and lease.rests_s is None:
                assert lease.wants or lease.serial in state.coming, "sequences that nobody will compute"


def test_in_any_order_an_adapter_is_unmapped_before_it_is_anothers() -> None:
    run_state_machine_as_test(
        AnyOrderAdapters, settings=settings(max_examples=120, stateful_step_count=40, deadline=None)
    )


def test_in_any_order_a_shared_runtime_is_let_go_of_by_one_and_kept_by_the_other() -> None:
    run_state_machine_as_test(
        AnyOrderShared, settings=settings(max_examples=120, stateful_step_count=40, deadline=None)
    )
