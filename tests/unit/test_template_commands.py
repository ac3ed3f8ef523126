"""TEMPLATE, FOLLOW, VALIDATED, LEAVE and CHECK, as an interpreter hears them: what is computed ahead changes nothing,
and an instance that misuses them is ended."""

from typing import Any

import pytest
import torch
from fast_paths import built
from interpreter_talk import F4, Talk, unary, values

from dormouse.gpuserver.commands.interpreter import ProtocolViolation
from dormouse.schemas import stream as wire

BASE = 10
RELU, NEGATE_IN_PLACE, ABS = 0, 1, 2
IN_PLACE = ["aten::neg_", [[wire.TENSOR, 0]], [], [[[wire.SAME, 0]], [], False], "float32"]
OLD = wire.OLD


def _own(number: int) -> int:
    """What the sequence makes itself, by its number."""
    return number - BASE - wire.RELATIVE


WORDS = [RELU, OLD, _own(11), ABS, _own(11), _own(12), wire.FREE, 1, _own(11), RELU, _own(12), _own(13)]
WRITES = [
    *(NEGATE_IN_PLACE, OLD),
    RELU,
    OLD,
    _own(11),
    NEGATE_IN_PLACE,
    OLD,
    ABS,
    _own(11),
    _own(12),
    NEGATE_IN_PLACE,
    OLD,
]
CHANGED = [ABS, OLD, _own(11), ABS, _own(11), _own(12), NEGATE_IN_PLACE, _own(11), ABS, _own(12), _own(13)]


FAST = pytest.mark.parametrize("talk", ["fast"], indirect=True)
"""Python computes nothing ahead."""


@pytest.fixture(params=["python", "fast"])
def talk(request: pytest.FixtureRequest) -> Talk:
    """With storage 1, and two templates."""
    talk = Talk(built) if request.param == "fast" else Talk()
    talk.put(1, [-1.0, 2.0, -3.0, 4.0])
    talk([], [0, F4], [RELU, unary("aten::relu"), NEGATE_IN_PLACE, IN_PLACE, ABS, unary("aten::abs")])
    talk([wire.TEMPLATE, 7, WORDS, wire.TEMPLATE, 8, CHANGED, wire.TEMPLATE, 6, WRITES])
    return talk


def _ahead(talk: Talk) -> list[int]:
    """Compute ahead all that may be; what is there then."""
    while talk.interpreter.ahead():
        pass
    return sorted(talk.interpreter.table.ahead)


def _is_fast(talk: Talk) -> bool:
    return talk.interpreter._fast is not None


def test_what_is_validated_has_run(talk: Talk) -> None:
    talk([wire.FOLLOW, 7, BASE, 0, [1]])
    assert _ahead(talk) == ([11, 12, 13] if _is_fast(talk) else [])
    assert 13 not in talk.interpreter.table.by_id
    assert talk.interpreter.operations_run == 0
    assert values(talk([wire.VALIDATED, len(WORDS), wire.DOWNLOAD, 5, 13, 0, -1])[0]) == [0.0, 2.0, 0.0, 4.0]
    talk([])
    talk.interpreter.ahead()
    assert talk.interpreter.operations_run == 3
    assert sorted(talk.interpreter.table.by_id) == [1, 12, 13], "what it frees is free"
    assert not talk.interpreter.table.ahead


def test_nothing_is_answered_that_was_not_asked_for(talk: Talk) -> None:
    talk([wire.FOLLOW, 7, BASE, 0, [1]])
    _ahead(talk)
    assert talk.get(12)[0] == wire.FAILED
    assert talk([wire.VALIDATED, 6, wire.DOWNLOAD, 5, 13, 0, -1])[0][0] == wire.FAILED
    assert values(talk.get(12)) == [0.0, 2.0, 0.0, 4.0]
    assert values(talk.get(11)) == [0.0, 2.0, 0.0, 4.0]


@pytest.mark.parametrize("operation", [True, False])
def test_what_is_written_meanwhile_is_what_is_read(talk: Talk, operation: bool) -> None:
    """By an operation, or by an upload, into what was read ahead."""
    talk([wire.FOLLOW, 7, BASE, 0, [1]])
    _ahead(talk)
    if operation:
        talk([NEGATE_IN_PLACE, 1])
    else:
        talk.put(1, [1.0, -2.0, 3.0, -4.0])
    assert not talk.interpreter.table.ahead
    _ahead(talk)
    talk([wire.VALIDATED, len(WORDS)])
    assert values(talk.get(13)) == [1.0, 0.0, 3.0, 0.0]


def test_a_setting_holds_for_what_comes_after_it(talk: Talk) -> None:
    talk([wire.FOLLOW, 7, BASE, 0, [1]])
    _ahead(talk)
    talk([wire.SET, "deterministic_algorithms", [True, False]])
    assert not talk.interpreter.table.ahead
    talk([wire.VALIDATED, len(WORDS), wire.SET, "deterministic_algorithms", [False, False]])
    assert values(talk.get(13)) == [0.0, 2.0, 0.0, 4.0]


@pytest.mark.parametrize("leave", [True, False])
def test_a_write_that_the_program_has_not_come_to_did_not_happen(talk: Talk, leave: bool) -> None:
    talk([wire.FOLLOW, 8, BASE, 0, [1]])
    assert _ahead(talk) == ([11, 12, 13] if _is_fast(talk) else [])
    replies = talk([wire.VALIDATED, 6, *([wire.LEAVE] if leave else []), wire.DOWNLOAD, 5, 11, 0, -1])
    assert values(replies[0]) == [1.0, 2.0, 3.0, 4.0]
    if not leave:
        _ahead(talk)
        talk([wire.VALIDATED, len(CHANGED)])
        assert values(talk.get(11)) == [-1.0, -2.0, -3.0, -4.0]
        assert values(talk.get(13)) == [1.0, 2.0, 3.0, 4.0]
    assert talk.interpreter.operations_run == (2 if leave else 4)


@pytest.mark.parametrize(("validated", "negated"), [(0, 0), (2, 1), (5, 1), (7, 2), (10, 2), (12, 3)])
@pytest.mark.parametrize("how", ["download", "leave", "end", "own", "operation"])
def test_what_was_there_before_is_as_the_program_says(talk: Talk, validated: int, negated: int, how: str) -> None:
    """Though it was written three times ahead of it."""
    talk([wire.FOLLOW, 6, BASE, 0, [1]])
    assert _ahead(talk) == ([11, 12] if _is_fast(talk) else [])
    expected = [1.0, -2.0, 3.0, -4.0] if negated % 2 else [-1.0, 2.0, -3.0, 4.0]
    comes = [wire.VALIDATED, validated] if validated else []
    match how:
        case "download":
            assert values(talk([*comes, wire.DOWNLOAD, 5, 1, 0, -1])[0]) == expected
            _ahead(talk)
            talk([wire.VALIDATED, len(WRITES)])
            assert values(talk.get(1)) == [1.0, -2.0, 3.0, -4.0]
            assert values(talk.get(12)) == [1.0, 0.0, 3.0, 0.0]
        case "leave":
            talk([*comes, wire.LEAVE])
            assert values(talk.get(1)) == expected
        case "operation":
            talk([*comes, ABS, 1, 30, NEGATE_IN_PLACE, 1])
            assert values(talk.get(30)) == [abs(value) for value in expected]
            assert values(talk.get(1)) == [-value for value in expected]
        case "own":
            talk(comes)
            stored = dict(talk.interpreter.table.own())[1]
            assert torch.frombuffer(bytearray(bytes(stored.bytes())), dtype=torch.float32).tolist() == expected
        case _:
            talk([*comes, wire.END, 5, wire.END_WAIT])
            talk.interpreter.report()
            content = bytes(talk.interpreter.storage(1))
            assert torch.frombuffer(bytearray(content), dtype=torch.float32).tolist() == expected
    assert not talk.interpreter._templates._undo or how == "download"


def test_an_error_is_that_of_the_command_that_is_asked_for(talk: Talk) -> None:
    talk([RELU, 1, 40])  # operations count within a frame
    talk([wire.FOLLOW, 7, BASE, 0, [9]])
    assert _ahead(talk) == []
    talk([wire.VALIDATED, len(WORDS)])
    kind, _, name, text, where, storage = talk.get(13)
    assert (kind, name, where, storage) == (wire.FAILED, "RuntimeError", [6, 0, "aten::relu"], 9)
    assert "storage 9 is not on this GPU" in text


@FAST
def test_room_is_made_by_what_nobody_has_asked_for(talk: Talk) -> None:
    talk([wire.FOLLOW, 7, BASE, 0, [1]])
    _ahead(talk)
    talk.device.relief = 1
    assert talk.interpreter._relieve() is None
    assert talk.device.relieved == 0  # that may do
    assert not talk.interpreter.table.ahead
    assert talk.interpreter._relieve() is None
    assert talk.device.relieved == 1
    talk.interpreter._templates.guessing = True
    assert "nobody has asked for" in str(talk.interpreter._relieve())
    talk.interpreter._templates.guessing = False
    talk([wire.VALIDATED, len(WORDS)])
    assert values(talk.get(13)) == [0.0, 2.0, 0.0, 4.0]


@pytest.mark.parametrize("how", ["end", "abort", "close", "own"])
def test_nothing_of_it_outlives_the_lease(talk: Talk, how: str) -> None:
    talk([wire.FOLLOW, 7, BASE, 0, [1], wire.VALIDATED, 3])
    _ahead(talk)
    match how:
        case "end":
            talk([wire.END, 5, wire.END_WAIT])
            assert sorted(number for number, _ in talk.interpreter.report().created) == [1, 11]
        case "abort":
            talk.interpreter.abort()
        case "close":
            talk.interpreter.close()
        case _:
            assert sorted(number for number, _ in talk.interpreter.table.own()) == [1, 11]
    assert not talk.interpreter.table.ahead


def test_both_ends_compare(talk: Talk) -> None:
    said = [RELU, 1, 11, ABS, 11, 12, wire.FREE, 1, 11, RELU, 12, 13]
    for number in range(2):
        talk([wire.FOLLOW, 7, BASE, 0, [1]])
        _ahead(talk)
        talk([wire.CHECK, 9, said[:9], wire.CHECK, 12, said[9:]])  # what is behind the first was dropped with it
        assert values(talk.get(13)) == [0.0, 2.0, 0.0, 4.0]
        assert talk.interpreter._templates.compared == (number + 1) * (2 if _is_fast(talk) else 0)
        talk([wire.FREE, 2, 12, 13])
    talk([wire.FOLLOW, 7, BASE, 0, [1]])
    with pytest.raises(ProtocolViolation, match="not those of the template"):
        talk([wire.CHECK, 3, [ABS, 1, 11]])


@FAST
def test_a_difference_is_noticed(talk: Talk) -> None:
    talk([wire.FOLLOW, 7, BASE, 0, [1]])
    _ahead(talk)
    talk.interpreter.table.ahead[12].bytes()[0] ^= 1
    with pytest.raises(ProtocolViolation, match="storage 12 was computed ahead, and is something else"):
        talk([wire.CHECK, 6, [RELU, 1, 11, ABS, 11, 12]])


FOLLOWED = [wire.FOLLOW, 7, BASE, 0, [1]]
HOSTILE: dict[str, list[Any]] = {
    "nothing is followed": [wire.VALIDATED, 3],
    "unknown": [wire.FOLLOW, 9, BASE, 0, [1]],
    "of no number": [wire.FOLLOW, "7", BASE, 0, [1]],
    "a list": [wire.FOLLOW, [7], BASE, 0, [1]],
    "begins within a command": [wire.FOLLOW, 7, BASE, 1, [1]],
    "no base": [wire.FOLLOW, 7, None, 0, [1]],
    "a base below 0": [wire.FOLLOW, 7, -1, 0, [1]],
    "an old one is missing": [wire.FOLLOW, 7, BASE, 0, []],
    "an old one is not from before": [wire.FOLLOW, 7, BASE, 0, [11]],
    "an old one is no number": [wire.FOLLOW, 7, BASE, 0, [[1]]],
    "begins at no number": [wire.FOLLOW, 7, BASE, 0.0, [1]],
    "validated at no number": [*FOLLOWED, wire.VALIDATED, 3.0],
    "more than a frame": FOLLOWED * (wire.MAX_FOLLOWED_WORDS // len(WORDS) + 1),
    "validated within a command": [*FOLLOWED, wire.VALIDATED, 2],
    "validated beyond the end": [*FOLLOWED, wire.VALIDATED, len(WORDS) + 1],
    "validated backwards": [*FOLLOWED, wire.VALIDATED, 6, wire.VALIDATED, 3],
    "validated is no number": [*FOLLOWED, wire.VALIDATED, [3]],
    "left, and validated": [*FOLLOWED, wire.LEAVE, wire.VALIDATED, 3],
    "forgotten": [*FOLLOWED, wire.FORGET_DEFS, wire.VALIDATED, 3],
    "defined twice": [wire.TEMPLATE, 7, WORDS],
    "no list": [wire.TEMPLATE, 9, 5],
    "no key": [wire.TEMPLATE, 9, [77, 1, 2]],
    "another command": [wire.TEMPLATE, 9, [wire.SEED, 0, 1]],
    "a template within": [wire.TEMPLATE, 9, [wire.FOLLOW, 7, BASE, 0, [1]]],
    "ends within a command": [wire.TEMPLATE, 9, [RELU, 1]],
    "frees less than nothing": [wire.TEMPLATE, 9, [wire.FREE, -1]],
    "frees more than there are": [wire.TEMPLATE, 9, [wire.FREE, 1 << 60, 1]],
    "storages without numbers": [wire.TEMPLATE, 9, [RELU, "1", 2]],
    "a word that is a list": [wire.TEMPLATE, 9, [[RELU], 1, 2]],
    "too long": [wire.TEMPLATE, 9, [RELU, 1, 2] * (wire.MAX_TEMPLATE_WORDS // 3 + 1)],
    "checked against nothing": [wire.CHECK, 3, [RELU, 1, 11]],
    "a result that is there": [RELU, 1, 11, *FOLLOWED, wire.VALIDATED, 3],
}


@pytest.mark.parametrize("commands", HOSTILE.values(), ids=HOSTILE)
def test_misuse_ends_the_instance(talk: Talk, commands: list[Any]) -> None:
    with pytest.raises(ProtocolViolation):
        talk(commands)


def test_a_result_that_has_come_meanwhile_ends_the_instance(talk: Talk) -> None:
    """A number that was given to another storage while it was computed ahead."""
    talk(FOLLOWED)
    _ahead(talk)
    talk([RELU, 1, 12])
    with pytest.raises(ProtocolViolation):
        talk([wire.VALIDATED, len(WORDS), RELU, 1, 20])


@pytest.mark.parametrize("bound", ["MAX_TEMPLATES", "MAX_TEMPLATES_WORDS"])
def test_templates_are_bounded(talk: Talk, monkeypatch: pytest.MonkeyPatch, bound: str) -> None:
    most = {"MAX_TEMPLATES": 4, "MAX_TEMPLATES_WORDS": len(WORDS + CHANGED + WRITES) + 4}
    monkeypatch.setattr(wire, bound, most[bound])
    talk([wire.TEMPLATE, 9, [RELU, 1, 2]])
    with pytest.raises(ProtocolViolation, match="too long or too many"):
        talk([wire.TEMPLATE, 10, [RELU, 1, 2]])
    fresh = Talk()
    fresh([], [0, F4], [RELU, unary("aten::relu")])
    fresh([wire.TEMPLATE, 9, [RELU, 1, 2], wire.FORGET_DEFS])
    fresh([], [0, F4], [RELU, unary("aten::relu")])
    fresh([wire.TEMPLATE, 10, [RELU, 1, 2]])


@FAST
def test_what_is_ahead_is_counted(talk: Talk) -> None:
    steps = talk.interpreter._steps
    before = steps.ahead_nbytes
    talk([wire.FOLLOW, 7, BASE, 0, [1]])
    _ahead(talk)
    assert steps.ahead_nbytes - before == 3 * 16
    talk([wire.VALIDATED, len(WORDS), wire.SYNC, 4])
    talk.interpreter.ahead()
    assert steps.ahead_nbytes == 0


@FAST
def test_the_instance_hears_where_the_gpu_waits(talk: Talk) -> None:
    """At a command that writes what is not the lease's own."""
    talk([wire.TEMPLATE, 9, [RELU, OLD, _own(11), NEGATE_IN_PLACE, OLD, RELU, _own(11), _own(12)]])
    talk([wire.FOLLOW, 9, BASE, 0, [1]])
    talk.interpreter.table.by_id[1].persistent = True  # the model's, which others share
    assert _ahead(talk) == [11]
    assert talk([wire.VALIDATED, 5])[0] == [wire.STALLED, 9, 3]
    assert _ahead(talk) == [12]
    talk([wire.VALIDATED, 8])
    assert values(talk.get(1)) == [1.0, -2.0, 3.0, -4.0]
    assert values(talk.get(12)) == [0.0, 2.0, 0.0, 4.0]
    assert torch.tensor(values(talk.get(11))).sum() == 6
