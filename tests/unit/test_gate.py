"""Which frames reach the compute thread, and when."""

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dormouse.core.decisions.leases.gate import (
    LATE_FRAMES,
    Deliver,
    FrameGate,
    FrameHeader,
    FrameKept,
    Malformed,
    Refuse,
    Violate,
    read_header,
    refusal,
)
from dormouse.schemas import stream as wire

BIG = st.integers(0, 2**64 - 1)


def frame(serial: int, secret: int = 5, number: int = 1) -> bytes:
    return bytes(msgpack.packb([serial, secret, number, [[], []], []]))


def started(serial: int = 1, window: int = 4) -> FrameGate:
    gate = FrameGate(window)
    gate.attach("a")
    gate.attach("b")
    assert gate.start(serial, 5, "a") == []
    return gate


@given(BIG, BIG, BIG)
def test_headers_are_read_as_msgpack_writes_them(serial: int, secret: int, number: int) -> None:
    assert read_header(frame(serial, secret, number)) == FrameHeader(serial, secret, number)


@given(st.binary(max_size=40))
def test_any_bytes_are_a_header_or_malformed(data: bytes) -> None:
    try:
        header = read_header(data)
    except Malformed:
        return
    assert header.serial >= 0


@pytest.mark.parametrize("field", [-1, 1.5, "x", None, [1]])
def test_other_types_are_malformed(field: object) -> None:
    with pytest.raises(Malformed):
        read_header(msgpack.packb([1, field, 1, [], []]))


def test_frames_pass_in_order_within_the_window() -> None:
    gate = started()
    for number in range(1, 5):
        assert gate.frame("a", frame(1, 5, number)) == [Deliver("a", 1, frame(1, 5, number))]
    gate.acknowledge(1, 1)
    assert isinstance(gate.frame("a", frame(1, 5, 5))[0], Deliver)
    assert isinstance(gate.frame("a", frame(1, 5, 6))[0], Violate)
    assert gate.frame("a", frame(1, 5, 7)) == []


def test_parked_frames_go_on_when_their_lease_starts() -> None:
    gate = started()
    assert gate.frame("b", frame(2, 5, 1)) == []
    assert gate.frame("b", frame(2, 5, 2)) == []
    assert gate.end(1) == []
    assert gate.start(2, 5, "b") == [Deliver("b", 2, frame(2, 5, 1)), Deliver("b", 2, frame(2, 5, 2))]
    assert gate.frame("b", frame(2, 5, 3)) == [Deliver("b", 2, frame(2, 5, 3))]
    assert gate.frame("a", frame(1)) == [Refuse("a", 1, "the lease is over")]


def test_a_lease_revoked_before_it_started_refuses_what_was_parked_for_it() -> None:
    gate = started()
    assert gate.frame("b", frame(2)) == []
    assert gate.skip(2) == [Refuse("b", 2, "the lease is over")]
    assert isinstance(gate.frame("a", frame(1))[0], Deliver)


def test_a_frame_that_came_before_the_lease_of_another_is_a_violation_when_that_starts() -> None:
    gate = started()
    gate.attach("c")
    assert gate.frame("b", frame(2)) == []
    assert gate.frame("b", frame(3)) == []
    assert gate.frame("c", frame(3)) == []
    gate.end(1)
    actions = gate.start(2, 5, "a")
    assert actions == [Violate("b", "a frame under lease 2, which is not this instance's")]
    gate.end(2)
    assert gate.start(3, 5, "c") == [Deliver("c", 3, frame(3))]  # and of "b" nothing more is heard


def test_parking_is_bounded() -> None:
    gate = started()
    for number in range(1, 5):
        assert gate.frame("b", frame(9, 5, number)) == []
    assert isinstance(gate.frame("b", frame(9, 5, 5))[0], Violate)


def test_a_lease_that_ends_with_frames_on_the_way_tells_its_instance() -> None:
    gate = started()
    gate.frame("a", frame(1))
    assert gate.end(1) == [Refuse("a", 1, "the lease is over")]
    assert gate.frame("a", frame(1, 5, 2)) == [Refuse("a", 1, "the lease is over")]
    assert gate.end(1) == []
    assert msgpack.unpackb(refusal(1, "why")) == [wire.REFUSED, 1, "why", ""]
    assert msgpack.unpackb(refusal(1, "why", wire.SEAT_LOST)) == [wire.REFUSED, 1, "why", "seat_lost"]


def test_a_flood_of_late_frames_is_a_violation() -> None:
    gate = started(serial=7)
    for _ in range(LATE_FRAMES):
        assert isinstance(gate.frame("b", frame(3))[0], Refuse)
    assert isinstance(gate.frame("b", frame(3))[0], Violate)


@pytest.mark.parametrize(
    ("instance", "data"), [("b", frame(1)), ("a", frame(1, 6)), ("a", frame(1, 5, 2)), ("a", b"junk")]
)
def test_what_no_client_of_ours_sends_is_a_violation(instance: str, data: bytes) -> None:
    assert [type(action) for action in started().frame(instance, data)] == [Violate]


def test_unknown_instances_are_not_heard() -> None:
    gate = started()
    gate.detach("b")
    assert gate.frame("b", frame(1)) == []


# --- leases without a turn


def test_frames_without_a_turn_are_kept_and_go_on_in_order() -> None:
    gate = started()
    assert gate.frame("a", frame(1)) == [Deliver("a", 1, frame(1))]
    gate.close(1)
    assert gate.frame("a", frame(1, 5, 2)) == [FrameKept(1)]
    assert gate.frame("a", frame(1, 5, 3)) == [FrameKept(1)]
    assert gate.open(1) == [Deliver("a", 1, frame(1, 5, 2)), Deliver("a", 1, frame(1, 5, 3))]
    assert gate.open(1) == []
    assert gate.frame("a", frame(1, 5, 4)) == [Deliver("a", 1, frame(1, 5, 4))]


def test_a_turn_that_is_given_back_and_had_again_loses_nothing() -> None:
    gate = started()
    for number in range(1, 5):
        gate.close(1)
        assert gate.frame("a", frame(1, 5, number)) == [FrameKept(1)]
        assert gate.open(1) == [Deliver("a", 1, frame(1, 5, number))]
    gate.acknowledge(1, 4)
    assert gate.end(1) == []


def test_what_is_kept_counts_in_the_window() -> None:
    gate = started()
    assert gate.frame("a", frame(1)) == [Deliver("a", 1, frame(1))]
    gate.close(1)
    for number in range(2, 5):
        assert gate.frame("a", frame(1, 5, number)) == [FrameKept(1)]
    gate.acknowledge(1, 1)  # the first one was on its way when the turn was taken
    assert gate.frame("a", frame(1, 5, 5)) == [FrameKept(1)]
    [action] = gate.frame("a", frame(1, 5, 6))
    assert action == Violate("a", "more than 4 frames without acknowledgement")


def test_what_goes_on_late_is_not_acknowledged_before() -> None:
    gate = started()
    gate.close(1)
    for number in range(1, 5):
        gate.frame("a", frame(1, 5, number))
    assert len(gate.open(1)) == 4
    assert isinstance(gate.frame("a", frame(1, 5, 5))[0], Violate)


def test_a_lease_that_ends_with_frames_kept_tells_its_instance() -> None:
    gate = started()
    gate.close(1)
    gate.frame("a", frame(1))
    gate.frame("a", frame(1, 5, 2))
    assert gate.end(1) == [Refuse("a", 1, "the lease is over")]
    assert gate.end(1) == []
    assert gate.frame("a", frame(1, 5, 3)) == [Refuse("a", 1, "the lease is over")]


def test_a_lease_that_ends_without_a_turn_and_without_frames_is_just_over() -> None:
    gate = started()
    gate.frame("a", frame(1))
    gate.close(1)
    gate.acknowledge(1, 1)
    assert gate.end(1) == []


def test_an_instance_that_is_gone_is_told_nothing_of_what_was_kept() -> None:
    gate = started()
    gate.close(1)
    gate.frame("a", frame(1))
    gate.detach("a")
    assert gate.frame("a", frame(1, 5, 2)) == []
    assert gate.end(1) == []


@pytest.mark.parametrize(
    ("instance", "data", "text"),
    [
        ("b", frame(1, 5, 2), "a frame under lease 1, which is not this instance's"),
        ("a", frame(1, 6, 2), "a frame under lease 1, which is not this instance's"),
        ("a", frame(1, 5, 3), "frame 3 after frame 1"),
        ("a", frame(1, 5, 1), "frame 1 after frame 1"),
        ("a", b"junk", "a frame is an array of 5"),
    ],
)
def test_what_no_client_of_ours_sends_is_a_violation_without_a_turn_too(instance: str, data: bytes, text: str) -> None:
    gate = started()
    gate.close(1)
    assert gate.frame("a", frame(1)) == [FrameKept(1)]
    assert gate.frame(instance, data) == [Violate(instance, text)]
    assert gate.frame(instance, frame(1, 5, 2)) == []


def test_two_leases_in_progress_do_not_mix() -> None:
    gate = started()
    assert gate.start(2, 6, "b") == []
    assert gate.frame("b", frame(2, 6, 1)) == [Deliver("b", 2, frame(2, 6, 1))]
    assert gate.frame("a", frame(1, 5, 1)) == [Deliver("a", 1, frame(1, 5, 1))]
    gate.close(1)
    assert gate.frame("b", frame(2, 6, 2)) == [Deliver("b", 2, frame(2, 6, 2))]
    assert gate.frame("a", frame(1, 5, 2)) == [FrameKept(1)]
    gate.acknowledge(2, 2)
    assert gate.end(2) == []
    assert gate.frame("b", frame(2, 6, 3)) == [Refuse("b", 2, "the lease is over")]
    assert gate.open(1) == [Deliver("a", 1, frame(1, 5, 2))]
    gate.acknowledge(1, 2)
    assert gate.end(1) == []


def test_each_lease_in_progress_has_a_window_of_its_own() -> None:
    gate = started()
    gate.start(2, 5, "b")
    gate.close(2)
    for number in range(1, 5):
        assert gate.frame("a", frame(1, 5, number)) == [Deliver("a", 1, frame(1, 5, number))]
        assert gate.frame("b", frame(2, 5, number)) == [FrameKept(2)]
    gate.acknowledge(1, 1)
    assert gate.frame("a", frame(1, 5, 5)) == [Deliver("a", 1, frame(1, 5, 5))]
    assert isinstance(gate.frame("b", frame(2, 5, 5))[0], Violate)


@pytest.mark.parametrize(("instance", "serial"), [("a", 2), ("b", 1)])
def test_a_frame_under_anothers_lease_in_progress_is_a_violation(instance: str, serial: int) -> None:
    gate = started()
    gate.start(2, 5, "b")
    gate.close(2)
    assert gate.frame(instance, frame(serial)) == [
        Violate(instance, f"a frame under lease {serial}, which is not this instance's")
    ]


def test_late_is_what_is_not_in_progress() -> None:
    """And not what is older than the newest."""
    gate = started(serial=3)
    assert gate.start(7, 5, "b") == []
    assert gate.frame("a", frame(3)) == [Deliver("a", 3, frame(3))]
    assert gate.frame("b", frame(5)) == [Refuse("b", 5, "the lease is over")]
    assert gate.skip(9) == []
    assert gate.frame("a", frame(3, 5, 2)) == [Deliver("a", 3, frame(3, 5, 2))]
    assert gate.frame("b", frame(7)) == [Deliver("b", 7, frame(7))]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["frame", "frame", "start", "end", "acknowledge", "close", "open"]),
        st.sampled_from("ab"),
        st.integers(0, 4),
        st.integers(1, 6),
    ),
    max_size=60,
)


@given(STEPS)
def test_only_the_holder_ever_gets_through_in_order_and_within_the_window(
    steps: list[tuple[str, str, int, int]],
) -> None:
    gate = FrameGate(3)
    gate.attach("a")
    gate.attach("b")
    holders: dict[int, str] = {}  # by serial in progress
    closed: set[int] = set()
    numbers: dict[int, list[int]] = {}  # delivered under each
    kept: dict[int, int] = {}
    outstanding: dict[int, int] = {}  # delivered or kept, not acknowledged
    for kind, instance, serial, number in steps:
        actions = []
        going = serial in holders
        if kind == "start" and not going:
            holders[serial], numbers[serial], kept[serial], outstanding[serial] = instance, [], 0, 0
            actions = gate.start(serial, 5, instance)
        elif kind == "end" and going:
            told = gate.end(serial)
            assert told == ([Refuse(holders[serial], serial, "the lease is over")] if outstanding[serial] else [])
            del holders[serial]
            closed.discard(serial)
        elif kind == "acknowledge" and going and outstanding[serial] > kept[serial]:
            gate.acknowledge(serial, 1)
            outstanding[serial] -= 1
        elif kind == "close" and going:
            gate.close(serial)
            closed.add(serial)
        elif kind == "open" and going:
            actions = gate.open(serial)
            assert len(actions) == kept[serial]
            closed.discard(serial)
            outstanding[serial] -= kept[serial]
            kept[serial] = 0
        elif kind == "frame":
            actions = gate.frame(instance, frame(serial, 5, number))
        for action in actions:
            if isinstance(action, Deliver):
                assert holders[action.serial] == action.instance
                assert action.serial not in closed
                numbers[action.serial].append(read_header(action.data).number)
                outstanding[action.serial] += 1
            elif isinstance(action, FrameKept):
                assert action.serial in closed
                kept[action.serial] += 1
                outstanding[action.serial] += 1
        for each in holders:
            assert numbers[each] == list(range(1, len(numbers[each]) + 1))
            assert outstanding[each] <= 3
