"""Which tenant has how much of host memory: by what came, and by what is in no file."""

from hypothesis import given
from hypothesis import strategies as st

from dormouse.gpuserver.store.memory.segments import Holder, Segments
from dormouse.gpuserver.store.memory.shares import HostShares
from dormouse.gpuserver.store.memory.slabs import SlabSpan

TENANTS = {"a1": "a", "a2": "a", "b1": "b"}


def tenant(holder: Holder) -> str | None:
    return TENANTS.get(holder) if isinstance(holder, str) else None


def made() -> tuple[Segments, HostShares]:
    segments = Segments()
    return segments, HostShares(segments, tenant, {"a": 100, "b": 10, "": 50}.__getitem__)


def span(number: int, nbytes: int = 40) -> SlabSpan:
    return SlabSpan(0, 1000 * number, nbytes)


def held(shares: HostShares) -> dict[str, int]:
    found = {name: shares.held(instance)[1] for instance, name in TENANTS.items() if shares.lacking(instance, 0) >= 0}
    shares.check()
    return found


def test_a_draft_counts_as_it_comes_until_it_is_freed() -> None:
    _, shares = made()
    shares.came(span(1), "a1", 0)
    assert (held(shares), shares.announced("a1")) == ({"a": 0, "b": 0}, 40)
    shares.came(span(1), "a1", 30)
    shares.came(span(2), "a2", 40)
    assert held(shares) == {"a": 70, "b": 0}
    assert [shares.lacking("a2", nbytes) for nbytes in (30, 31)] == [0, 1]
    assert [shares.lacking("b1", nbytes) for nbytes in (10, 31)] == [0, 21]
    shares.freed([span(1), span(7)])
    assert (held(shares), shares.announced("a1"), shares.announced("a2")) == ({"a": 40, "b": 0}, 0, 40)


def test_a_segment_counts_for_each_tenant_that_holds_it_until_a_file_has_it() -> None:
    segments, shares = made()
    shares.came(span(1), "a1", 40)
    segment = segments.new(40, "scope", span(1))
    segments.hold(segment, "a1")
    segments.hold(segment, "a2")
    segments.hold(segment, ("f", 1))
    assert (held(shares), shares.announced("a1")) == ({"a": 40, "b": 0}, 0), "once, and no draft any more"
    segments.hold(segment, "b1")
    assert held(shares) == {"a": 40, "b": 40}
    segments.release(segment, "a1")
    segments.release(segment, "a2")
    assert held(shares) == {"a": 0, "b": 40}
    segments.identify(segment, b"f")
    segments.mark_filed(segment)
    assert held(shares) == {"a": 0, "b": 0}
    segments.damage(b"f")  # the file is gone: what is in host memory is alone there
    assert held(shares) == {"a": 0, "b": 40}
    segments.release(segment, "b1")
    segments.release(segment, ("f", 1))
    assert held(shares) == {"a": 0, "b": 0}


def test_who_loads_most_of_the_tenant_that_loads_most_goes_first() -> None:
    _, shares = made()
    assert shares.largest_draft() == ""
    shares.came(span(1), "b1", 0)
    assert shares.largest_draft() == "", "it takes nothing"
    shares.came(span(1), "b1", 30)
    shares.came(span(2), "a1", 20)
    assert shares.largest_draft() == "b1"
    shares.came(span(3), "a2", 15)
    assert shares.largest_draft() == "a1"
    shares.freed([span(2)])
    assert shares.largest_draft() == "b1"


STEP = st.sampled_from(["came", "freed", "new", "hold", "release", "file"])


@given(st.lists(st.tuples(STEP, st.integers(0, 5), st.sampled_from(sorted(TENANTS)))))
def test_the_sums_are_exact(steps: list[tuple[str, int, str]]) -> None:
    segments, shares = made()
    live = {}
    for step, number, instance in steps:
        match step:
            case "came" if number not in live:
                shares.came(span(number), instance, 7)
            case "freed" if number not in live:
                shares.freed([span(number)])
            case "new" if number not in live:
                live[number] = segments.new(40, "scope", span(number))
                segments.hold(live[number], instance)
            case "hold" if number in live:
                segments.hold(live[number], instance)
            case "release" if number in live:
                segments.release(live[number], instance)
                if not live[number].holders:
                    del live[number]
            case "file" if number in live and live[number].fingerprint is None:
                segments.identify(live[number], b"%d" % number)
                segments.mark_filed(live[number])
        expected = {
            name: sum(
                40
                for segment in live.values()
                if not segments.is_filed(segment) and name in {tenant(holder) for holder in segment.holders}
            )
            for name in ("a", "b")
        }
        found = held(shares)
        drafts = {name: sum(nbytes for of, _, nbytes in shares._drafts.values() if of == name) for name in ("a", "b")}
        assert found == {name: expected[name] + drafts[name] for name in ("a", "b")}
