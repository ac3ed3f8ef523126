"""Which frames reach the device thread."""

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dormouse.gpuserver.gate import LATE_FRAMES, Deliver, Gate, Header, Malformed, Refuse, Violate, read_header, refusal
from dormouse.schemas import stream as wire

BIG = st.integers(0, 2**64 - 1)


def frame(serial: int, secret: int = 5, number: int = 1) -> bytes:
    return bytes(msgpack.packb([serial, secret, number, [[], []], []]))


def started(serial: int = 1, window: int = 4) -> Gate:
    gate = Gate(window)
    gate.attach("a")
    gate.attach("b")
    assert gate.start(serial, 5, "a") == []
    return gate


@given(BIG, BIG, BIG)
def test_headers_are_read_as_msgpack_writes_them(serial: int, secret: int, number: int) -> None:
    assert read_header(frame(serial, secret, number)) == Header(serial, secret, number)


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
    assert gate.holder == "b"


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
    assert [(type(action), action.instance) for action in actions] == [(Violate, "b")]
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
    assert msgpack.unpackb(refusal(1, "why")) == [wire.REFUSED, 1, "why"]


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


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["frame", "start", "end", "acknowledge"]),
        st.sampled_from("ab"),
        st.integers(0, 4),
        st.integers(1, 6),
    ),
    max_size=40,
)


@given(STEPS)
def test_only_the_holder_ever_gets_through_in_order_and_within_the_window(
    steps: list[tuple[str, str, int, int]],
) -> None:
    gate = Gate(3)
    gate.attach("a")
    gate.attach("b")
    numbers: list[int] = []  # delivered under the lease in progress
    outstanding = 0
    for kind, instance, serial, number in steps:
        actions = []
        if kind == "start" and gate.serial is None:
            numbers, outstanding = [], 0
            actions = gate.start(serial, 5, instance)
        elif kind == "end" and gate.serial is not None:
            gate.end(gate.serial)
        elif kind == "acknowledge" and gate.serial is not None and outstanding:
            gate.acknowledge(gate.serial, 1)
            outstanding -= 1
        elif kind == "frame":
            actions = gate.frame(instance, frame(serial, 5, number))
        for action in actions:
            if isinstance(action, Deliver):
                assert (action.instance, action.serial) == (gate.holder, gate.serial)
                numbers.append(read_header(action.data).number)
                outstanding += 1
        assert numbers == list(range(1, len(numbers) + 1))
        assert outstanding <= 3
