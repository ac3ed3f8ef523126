"""Who may be connected, and who gives way: the rules of places.py, one by one, and none of them ever broken."""

from hypothesis import given
from hypothesis import strategies as st

from dormouse.router.front.places import ENDING, HEAD_S, ConnectionPlaces, peer_of


def full(most: int = 8) -> ConnectionPlaces[str]:
    """Eight connections of as many peers, none of which has sent a whole head."""
    places: ConnectionPlaces[str] = ConnectionPlaces(most)
    for number in range(most):
        assert places.come(f"c{number}", f"peer{number}", float(number)) is None
    return places


def test_half_heads_shut_nobody_out() -> None:
    places = full()
    places.asks("c7", 7.1)
    places.rests("c7", 7.2)
    assert [places.come(f"n{number}", "p", 100.0) for number in range(2)] == ["c0", "c1"], "before one that is idle"
    assert len(places) == 8


def test_heads_that_have_just_begun_give_way_after_those_that_are_idle() -> None:
    places = full()
    places.asks("c7", 7.1)
    places.rests("c7", 7.2)
    places.owes("c0", 7.3)  # begins another
    for number in range(1, 7):
        places.asks(f"c{number}", 7.3)
    assert places.come("a", "p", 7.4) == "c7"
    assert places.come("b", "q", 7.5) == "c0", "nobody else is left who is not answered"
    places.asks("a", 7.6)
    places.asks("b", 7.6)
    assert places.come("c", "r", 7.7) == "c", "all others are answered"
    assert len(places) == 8


def test_who_has_shown_a_key_gives_way_last() -> None:
    places = full()
    for number in range(8):
        places.asks(f"c{number}", 8.0)
    assert places.asks_for("c0", "key", 8.1)
    places.rests("c0", 8.2)
    places.rests("c1", 8.3)
    assert places.come("a", "p", 8.4) == "c1"
    places.owes("c0", 8.5)  # its next head, however long that takes
    places.asks("a", 8.6)
    assert places.come("b", "p", 100.0) == "b"
    places.rests("c0", 101.0)
    assert places.come("b", "p", 102.0) == "c0"


def asks(places: ConnectionPlaces[str], who: str, owner: str) -> bool:
    places.asks(who, 8.0)
    return places.asks_for(who, owner, 8.0)


def test_a_place_is_kept_for_keys() -> None:
    places = full()
    assert [asks(places, f"c{number}", "") for number in range(8)] == [True] * 7 + [False]
    assert not places.asks_for("c7", "", 8.0), "it counts once"
    assert places.asks_for("c7", "key", 8.0)
    assert not places.asks_for("c7", "", 8.0)
    places.rests("c0", 8.0)
    assert places.asks_for("c7", "", 8.0)
    assert all(asks(places, f"c{number}", "key") for number in range(8)), "of one tenant's node all places are its"


def test_a_tenant_leaves_as_many_places_as_it_has() -> None:
    """Whatever keys it has, and whether it has asked before; who has none is one of them."""
    places: ConnectionPlaces[str] = ConnectionPlaces(8, shared=True)
    for number in range(8):
        assert places.come(f"c{number}", "peer", 0.0) is None
    assert [asks(places, f"c{number}", "a") for number in range(5)] == [True] * 4 + [False]
    places.gone("c4")
    assert [asks(places, f"c{number}", "b") for number in (5, 6, 7)] == [True, True, False]
    assert asks(places, "c7", ""), "c4's place is free"
    places.gone("c7")
    places.rests("c0", 9.0)
    places.asks("c0", 9.0)
    assert places.asks_for("c0", "a", 9.0) is False, "others have come since"


def test_a_key_lets_owe_no_more_than_a_tenant_s_part() -> None:
    places: ConnectionPlaces[str] = ConnectionPlaces(8, shared=True)
    for number in range(8):
        assert places.come(f"c{number}", "peer", 0.0) is None
        asks(places, f"c{number}", "a")
        places.rests(f"c{number}", 1.0)
    for number in range(8):
        places.owes(f"c{number}", 2.0)  # half a head on each
    leave = [places.come(f"n{number}", "other", 100.0) for number in range(4)]
    assert leave == ["c4", "c5", "c6", "c7"], "and the first four keep their places"
    assert [asks(places, f"n{number}", "b") for number in range(4)] == [True] * 2 + [False] * 2


def test_who_owes_in_a_quarter_of_the_places_takes_its_own() -> None:
    places: ConnectionPlaces[str] = ConnectionPlaces(8)
    for number, peer in enumerate("qpprstuv"):
        assert places.come(f"c{number}", peer, 0.1 * number) is None
    assert places.come("more", "p", 2.0) == "c1"
    assert places.come("other", "r", 2.0) == "c0"


def test_nobody_leaves_while_places_are_free() -> None:
    places: ConnectionPlaces[str] = ConnectionPlaces(8)
    for number in range(8):
        assert places.come(f"c{number}", "p", HEAD_S * number) is None


def test_answers_that_are_awaited_have_their_own_places() -> None:
    places = full()
    for number in range(8):
        assert places.ends(f"c{number}", 8.0) is None
    assert len(places) == 0
    for number in range(ENDING - 8):
        assert places.ends(f"e{number}", 9.0) is None
    assert places.ends("last", 9.0) == "c0"
    places.gone("c1")
    assert places.ends("later", 9.0) is None


EVENTS = st.lists(
    st.tuples(st.sampled_from(["come", "asks", "asks_for", "rests", "owes", "ends", "gone"]), st.integers(0, 9))
)


@given(EVENTS, st.booleans())
def test_there_are_never_more_than_there_are_places(events: list[tuple[str, int]], shared: bool) -> None:
    places: ConnectionPlaces[int] = ConnectionPlaces(3, shared)
    known: set[int] = set()
    asked: set[int] = set()  # with a key: the even ones one tenant's, the odd ones another's
    for now_s, (what, who) in enumerate(events):
        if what == "come" and who not in known:
            leaves = places.come(who, f"peer{who % 2}", now_s / 2)
            known.add(who)
            known.discard(leaves if leaves is not None else -1)
        elif what == "ends" and who in known:
            assert places.ends(who, now_s / 2) is None
            places.gone(who)
            known.discard(who)
        elif what == "gone":
            places.gone(who)
            known.discard(who)
        elif what == "asks_for":
            granted = places.asks_for(who, f"tenant{who % 2}", now_s / 2)
            asked.add(who)
            others = sum(places.is_busy(each) for each in known - {who})
            own = sum(places.is_busy(each) for each in (known & asked) - {who} if each % 2 == who % 2)
            assert granted is (not shared or who not in known or own < 3 - others)
        elif who in known and what != "come":
            getattr(places, what)(who, now_s / 2)
        asked &= known
        assert len(places) == len(known) <= 3


def test_what_one_host_has_to_itself() -> None:
    assert peer_of(("10.0.0.1", 5)) == peer_of(("::ffff:10.0.0.1", 6, 0, 0)) == "10.0.0.1"
    assert peer_of(("2001:db8::1", 5, 0, 0)) == peer_of(("2001:db8::ffff:1", 5, 0, 0)) == "2001:db8::/64"
    assert peer_of(("fe80::1%eth0", 5, 0, 3)) == "fe80::/64"
    assert peer_of("") == peer_of(None) == ""
