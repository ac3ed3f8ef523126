"""Sections of templates that are captured and computed as a whole: wherever the program looks, all is as it says.

A thread plays the GPU: its replays compute the same commands anew, at the same places.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fast_paths import built
from interpreter_talk import F4, Talk, unary, values

from dormouse.gpuserver.commands import captures, templates
from dormouse.gpuserver.commands.captures import CaptureCounts
from dormouse.gpuserver.commands.interpreter import ProtocolViolation
from dormouse.gpuserver.commands.storages import StorageFailure, whole
from dormouse.gpuserver.device.protocol import Storages, storage_at
from dormouse.schemas import stream as wire

BASE = 10
RELU, NEGATE_IN_PLACE, ABS, ADD = 0, 1, 2, 3
IN_PLACE = ["aten::neg_", [[wire.TENSOR, 0]], [], [[[wire.SAME, 0]], [], False], "float32"]
SUM = ["aten::add.Tensor", [[wire.TENSOR, 0], [wire.TENSOR, 0]], [], [[[wire.FRESH, 0, 0]], [], False], "float32"]
GIVEN, WEIGHT, LATE = 1, 2, 5
FIRST = BASE + 1
COUNT = 12


def _own(number: int) -> int:
    return number - BASE - wire.RELATIVE


def _words(late: bool = False) -> list[Any]:
    """Storage 11 is the input plus the weight; each that follows is the one before, plus the weight; from the fourth on
    what is two before is freed. The sixth is negated where it lies.
    """
    words: list[Any] = [ADD, wire.OLD, WEIGHT, _own(FIRST)]
    for number in range(FIRST + 1, FIRST + COUNT):
        if number == FIRST + 6:
            words += [NEGATE_IN_PLACE, _own(number - 1)]
        words += [ADD, _own(number - 1), LATE if late and number == FIRST + 10 else WEIGHT, _own(number)]
        if number >= FIRST + 3:
            words += [wire.FREE, 1, _own(number - 2)]
    return words


WORDS = _words()
LAST = FIRST + COUNT - 1


def _expected(number: int, given: float, negated: bool = True) -> list[float]:
    """Of storage ``number``, while the weight is ones."""
    value = given
    for each in range(FIRST, number + 1):
        value += 1
        if each == FIRST + 5 and (each < number or negated):
            value = -value
    return [value] * 4


class _Gpu:
    """What is captured; ``fails``: what a capture raises."""

    def __init__(self) -> None:
        self.fails: Exception | None = None
        self.replays = 0

    def __call__(self, compute: Callable[[], Storages]) -> Callable[[], Storages]:
        if self.fails is not None:
            raise self.fails
        places = compute()

        def replay() -> Storages:
            self.replays += 1
            if self.fails is not None:
                raise self.fails
            for place, made in zip(places, compute(), strict=True):
                whole(place).copy_(whole(made))
            return places

        return replay


@pytest.fixture(params=["graph", "program"])
def gpu(request: pytest.FixtureRequest) -> _Gpu | None:
    return _Gpu() if request.param == "graph" else None


GRAPH = pytest.mark.parametrize("gpu", ["graph"], indirect=True)
PROGRAM = pytest.mark.parametrize("gpu", ["program"], indirect=True)


@pytest.fixture
def talk(gpu: _Gpu | None) -> Talk:
    """The weight is the model's, and the template has come once."""
    talk = Talk(built, gpu)
    _bind(talk, WEIGHT)
    talk([], [0, F4], [RELU, unary("aten::relu"), NEGATE_IN_PLACE, IN_PLACE, ABS, unary("aten::abs"), ADD, SUM])
    talk([wire.TEMPLATE, 7, WORDS, wire.TEMPLATE, 8, _words(late=True)])
    _given(talk, 1.0)
    _come_through(talk)
    assert values(talk.get(LAST)) == _expected(LAST, 1.0)
    _clear(talk)
    assert talk.interpreter.may_capture
    talk.interpreter.capture()
    assert not talk.interpreter.may_capture
    return talk


def _bind(talk: Talk, number: int) -> torch.Tensor:
    weight = torch.ones(4)
    talk.interpreter.table.bind(number, 16, weight.untyped_storage)
    return weight


def _given(talk: Talk, value: float) -> None:
    talk([wire.FREE, 1, GIVEN])
    talk.put(GIVEN, [value] * 4)


def _clear(talk: Talk) -> None:
    talk([wire.LEAVE])
    own = [number for number in talk.interpreter.table.by_id if number >= BASE]
    talk([wire.FREE, len(own), *own])


def _ahead(talk: Talk) -> list[int]:
    while talk.interpreter.ahead():
        pass
    return sorted(talk.interpreter.table.ahead)


def _come_through(talk: Talk) -> None:
    """The program, with as much as may be computed ahead of it."""
    talk([wire.FOLLOW, 7, BASE, 0, [GIVEN]])
    _ahead(talk)
    talk([wire.VALIDATED, len(WORDS)])


def _followed(talk: Talk) -> templates.Followed:
    assert talk.interpreter._templates._followed is not None
    return talk.interpreter._templates._followed


def _counts(talk: Talk) -> tuple[int, int, int, int]:
    counts: CaptureCounts = talk.interpreter.capture_counts
    return counts.captured, counts.refused, counts.dropped, counts.replayed


def _place(of: int) -> int:
    """Behind the command that makes this storage."""
    return WORDS.index(_own(of)) + 1


def test_what_comes_again_is_computed_as_a_whole(talk: Talk, gpu: _Gpu | None) -> None:
    for value in (2.0, -3.0, 0.5):
        _given(talk, value)
        before = _counts(talk)[3]
        talk([wire.FOLLOW, 7, BASE, 0, [GIVEN]])
        assert _ahead(talk) == [FIRST, LAST - 1, LAST], "what is left of it"
        assert _counts(talk)[3] == before + 1
        assert gpu is None or gpu.replays == before + 1
        assert LAST not in talk.interpreter.table.by_id
        ran = talk.interpreter.operations_run
        talk([wire.VALIDATED, len(WORDS)])
        reply = talk.get(LAST)
        assert values(reply) == _expected(LAST, value)
        talk([])
        assert talk.interpreter.operations_run == ran + COUNT + 1
        assert sorted(talk.interpreter.table.by_id) == [GIVEN, WEIGHT, FIRST, LAST - 1, LAST]
        assert talk.interpreter._steps.ahead_nbytes == 0
        _clear(talk)
    assert _counts(talk) == (1, 0, 0, 3)


def test_results_are_nobody_elses(talk: Talk) -> None:
    """They outlive the next replay, and who writes them changes nothing for it."""
    for value, base in ((2.0, BASE), (3.0, 100)):
        _given(talk, value)
        talk([wire.FOLLOW, 7, base, 0, [GIVEN]])
        _ahead(talk)
        talk([wire.VALIDATED, len(WORDS), NEGATE_IN_PLACE, base + COUNT - 1])
        talk([wire.LEAVE])
    assert values(talk.get(LAST)) == _expected(LAST, 2.0)
    assert values(talk.get(100 + COUNT)) == _expected(LAST, 3.0)
    assert _counts(talk) == (1, 0, 0, 2)


@pytest.mark.parametrize("made", [FIRST, FIRST + 4, FIRST + 5, FIRST + 8, LAST - 1])
@pytest.mark.parametrize("how", ["download", "leave", "end", "own", "operation", "free", "frames", "settle"])
def test_wherever_the_program_looks(talk: Talk, made: int, how: str) -> None:
    """Before the end of a section that was computed as a whole, of storages that it has written since, and freed."""
    _given(talk, 2.0)
    talk([wire.FOLLOW, 7, BASE, 0, [GIVEN]])
    _ahead(talk)
    expected = _expected(made, 2.0, negated=False)
    comes = [wire.VALIDATED, _place(made)]
    match how:
        case "download":
            assert values(talk([*comes, wire.DOWNLOAD, 5, made, 0, -1])[0]) == expected
            _ahead(talk)
            talk([wire.VALIDATED, len(WORDS)])
            assert values(talk.get(LAST)) == _expected(LAST, 2.0)
        case "leave":
            talk([*comes, wire.LEAVE])
            assert values(talk.get(made)) == expected
        case "operation":
            talk([*comes, ABS, made, 90, NEGATE_IN_PLACE, made])
            assert values(talk.get(90)) == [abs(value) for value in expected]
            assert values(talk.get(made)) == [-value for value in expected]
        case "free":
            talk([*comes, wire.FREE, 1, made])
            assert made not in talk.interpreter.table.by_id
            assert talk.get(made)[0] == wire.FAILED
        case "settle":
            talk(comes)
            talk.interpreter.settle()
            assert made in talk.interpreter.table.by_id, "nothing is left to be run in another's turn"
            assert values(talk.get(made)) == expected
        case "own":
            talk(comes)
            stored = dict(talk.interpreter.table.own())[made]
            assert torch.frombuffer(bytearray(bytes(stored.bytes())), dtype=torch.float32).tolist() == expected
        case "frames":
            talk(comes)
            _ahead(talk)
            assert made not in talk.interpreter.table.by_id, "it is one whole as long as nobody looks"
            talk([wire.VALIDATED, len(WORDS)])
            assert values(talk.get(LAST)) == _expected(LAST, 2.0)
        case _:
            talk([*comes, wire.END, 5, wire.END_WAIT])
            talk.interpreter.report()
            content = bytes(talk.interpreter.storage(made))
            assert torch.frombuffer(bytearray(content), dtype=torch.float32).tolist() == expected
    assert _counts(talk) == (1, 0, 0 if how == "frames" else 1, 1)


def test_a_section_ends_where_the_program_looks(talk: Talk) -> None:
    """From then on it is computed as two."""
    at = _place(FIRST + 8)
    for number in range(3):
        _given(talk, 2.0)
        talk([wire.FOLLOW, 7, BASE, 0, [GIVEN]])
        _ahead(talk)
        reply = talk([wire.VALIDATED, at, wire.DOWNLOAD, 5, FIRST + 8, 0, -1])[0]
        assert values(reply) == _expected(FIRST + 8, 2.0)
        _ahead(talk)
        talk([wire.VALIDATED, len(WORDS)])
        assert values(talk.get(LAST)) == _expected(LAST, 2.0)
        _clear(talk)
        if talk.interpreter.may_capture:
            talk.interpreter.capture()
        assert _counts(talk) == (2, 0, 1, number + 1)


@pytest.mark.parametrize("operation", [True, False])
def test_what_is_written_meanwhile_is_what_is_read(talk: Talk, operation: bool) -> None:
    _given(talk, 2.0)
    talk([wire.FOLLOW, 7, BASE, 0, [GIVEN]])
    _ahead(talk)
    if operation:
        talk([NEGATE_IN_PLACE, GIVEN])
    else:
        talk.put(GIVEN, [-2.0] * 4)
    assert not talk.interpreter.table.ahead
    _ahead(talk)
    talk([wire.VALIDATED, len(WORDS)])
    assert values(talk.get(LAST)) == _expected(LAST, -2.0)
    assert not talk.interpreter.table.ahead


@GRAPH
@pytest.mark.parametrize("how", ["elsewhere", "smaller", "the lease's own", "not there yet", "spoiled", "gone"])
def test_weights_that_are_elsewhere(talk: Talk, how: str) -> None:
    """A model has come to other places, is still on its way, or was lost."""
    table = talk.interpreter.table
    match how:
        case "elsewhere":
            held = _bind(talk, WEIGHT)
            held.fill_(5.0)
            table.by_id[WEIGHT].bytes()
        case "smaller":
            at = table.by_id[WEIGHT].address
            table.bind(WEIGHT, 8, lambda: storage_at(at, 8, torch.device("cpu")))
            table.by_id[WEIGHT].bytes()
        case "the lease's own":
            table.by_id[WEIGHT].persistent = False
        case "not there yet":
            _bind(talk, WEIGHT).fill_(5.0)
        case "spoiled":
            table.by_id[WEIGHT].error = StorageFailure("RuntimeError", "it was lost")
        case _:
            table.unbind([WEIGHT])
    _given(talk, 2.0)
    _come_through(talk)
    reply = talk.get(LAST)
    if how in ("spoiled", "gone", "smaller"):
        assert reply[0] == wire.FAILED
    elif how == "the lease's own":
        assert values(reply) == _expected(LAST, 2.0)
    else:
        value = (2.0 + 6 * 5.0) * -1 + 6 * 5.0
        assert values(reply) == [value] * 4
    given_up = how in ("elsewhere", "smaller", "the lease's own")
    assert _counts(talk) == (1, 0, 1 if given_up else 0, 0)
    assert talk.interpreter.may_capture == given_up


@GRAPH
def test_settings_choose_kernels(talk: Talk, gpu: _Gpu) -> None:
    """They hold for a capture as long as they are what they were."""
    setting = [wire.SET, "cublas_allow_tf32", [True]]
    for number, settings in enumerate(([], setting, setting, [wire.SET, "cublas_allow_tf32", [False]])):
        _given(talk, 2.0)
        before = gpu.replays
        talk([*settings, wire.FOLLOW, 7, BASE, 0, [GIVEN]])
        _ahead(talk)
        assert gpu.replays - before == (number % 2 == 0)
        talk([wire.VALIDATED, len(WORDS)])
        assert values(talk.get(LAST)) == _expected(LAST, 2.0)
        _clear(talk)
        assert talk.interpreter.may_capture == (number % 2 == 1)
        if number % 2:
            talk.interpreter.capture()
    assert _counts(talk) == (3, 0, 2, 2)


@GRAPH
def test_settings_that_change_each_time_are_not_captured_for_ever(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captures, "MAX_VAIN", 3)
    for number in range(8):
        _given(talk, 2.0)
        talk([wire.SET, "cublas_allow_tf32", [number % 2 == 0], wire.FOLLOW, 7, BASE, 0, [GIVEN]])
        _ahead(talk)
        talk([wire.VALIDATED, len(WORDS)])
        assert values(talk.get(LAST)) == _expected(LAST, 2.0)
        _clear(talk)
        if talk.interpreter.may_capture:
            talk.interpreter.capture()
    assert _counts(talk) == (4, 0, 4, 0)


@GRAPH
@pytest.mark.parametrize("how", ["settings", "weights"])
def test_what_has_changed_since_it_came_is_not_captured(talk: Talk, how: str) -> None:
    talk.interpreter.drop_captured()
    _given(talk, 2.0)
    talk([wire.FOLLOW, 7, BASE, 0, [GIVEN], wire.VALIDATED, len(WORDS)])
    _clear(talk)
    if how == "settings":
        talk([wire.SET, "cublas_allow_tf32", [True]])
    else:
        _bind(talk, WEIGHT)
    assert talk.interpreter.may_capture
    talk.interpreter.capture()
    assert not talk.interpreter.may_capture
    assert _counts(talk) == (1, 0, 1, 0)


def test_a_check_within_a_section_compares_what_is_not_written_again(talk: Talk) -> None:
    words = [*WORDS, NEGATE_IN_PLACE, _own(FIRST)]
    talk([wire.TEMPLATE, 9, words])
    for number in range(2):
        _given(talk, 2.0)
        talk([wire.FOLLOW, 9, BASE, 0, [GIVEN]])
        _ahead(talk)
        commands = _followed(talk).commands
        middle = len(WORDS) if number else len(words)
        talk([wire.CHECK, middle, commands[:middle]])
        assert values(talk.get(FIRST)) == [3.0 if number else -3.0] * 4
        _clear(talk)
        if talk.interpreter.may_capture:
            talk.interpreter.capture()
    assert _counts(talk)[3] == 1


def test_what_is_freed_within_a_section_is_bounded(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MAX_FREES", 2)
    _given(talk, 2.0)
    talk([wire.FOLLOW, 7, BASE, 0, [GIVEN]])
    _ahead(talk)
    for number in range(3):
        talk([wire.VALIDATED, _place(FIRST + 4), wire.FREE, 0])
        assert len(_followed(talk).frees) == (number + 1) % 3
        assert (FIRST + 4 in talk.interpreter.table.by_id) == (number == 2), "command by command from there on"
    talk([wire.VALIDATED, len(WORDS)])
    assert values(talk.get(LAST)) == _expected(LAST, 2.0)


def test_an_input_that_comes_between_divides(talk: Talk) -> None:
    """What needs it waits for nobody: the rest is computed before it is there."""
    for number in range(3):
        _given(talk, 2.0)
        talk([wire.FREE, 1, LATE, wire.FOLLOW, 8, BASE, 0, [GIVEN]])
        _ahead(talk)
        talk([wire.VALIDATED, _place(FIRST + 9)])
        talk.put(LATE, [7.0] * 4)
        _ahead(talk)
        talk([wire.VALIDATED, len(WORDS)])
        expected = [value + 6 for value in _expected(LAST, 2.0)]
        assert values(talk.get(LAST)) == expected
        _clear(talk)
        if talk.interpreter.may_capture:
            talk.interpreter.capture()
        assert _counts(talk)[3] == max(0, number - 1)


@pytest.mark.parametrize("nbytes", [8, 16])
def test_an_input_is_as_large_as_what_is_read_of_it(talk: Talk, nbytes: int) -> None:
    _given(talk, 2.0)
    talk([wire.FREE, 1, GIVEN])
    talk.put(GIVEN, [2.0] * (nbytes // 4))
    _come_through(talk)
    reply = talk.get(LAST)
    assert reply[0] == (wire.VALUE if nbytes == 16 else wire.FAILED)
    assert _counts(talk) == (1, 0, 0, 1 if nbytes == 16 else 0), "the capture is as good as before"


def test_a_result_that_is_there_already_ends_the_instance(talk: Talk) -> None:
    _given(talk, 2.0)
    talk([RELU, GIVEN, LAST, wire.FOLLOW, 7, BASE, 0, [GIVEN]])
    _ahead(talk)
    assert _counts(talk)[3] == 0
    with pytest.raises(ProtocolViolation, match=f"storage {LAST} is not a new number"):
        talk([wire.VALIDATED, len(WORDS)])


def test_a_result_that_has_come_meanwhile_ends_the_instance(talk: Talk) -> None:
    _given(talk, 2.0)
    talk([wire.FOLLOW, 7, BASE, 0, [GIVEN]])
    assert LAST in _ahead(talk)
    talk([RELU, GIVEN, LAST])
    with pytest.raises(ProtocolViolation):
        talk([wire.VALIDATED, len(WORDS), RELU, GIVEN, 90])


@GRAPH
@pytest.mark.parametrize("error", [RuntimeError("not permitted"), torch.OutOfMemoryError("no room")])
def test_a_capture_that_fails_changes_nothing(gpu: _Gpu, talk: Talk, error: Exception) -> None:
    gpu.fails = error
    assert talk.interpreter.drop_captured()
    for number in range(3):
        _given(talk, 2.0)
        _come_through(talk)
        assert values(talk.get(LAST)) == _expected(LAST, 2.0)
        _clear(talk)
        assert talk.interpreter.may_capture == (number == 0), "it is tried once"
        if number == 0:
            talk.interpreter.capture()
    assert _counts(talk) == (1, 1, 1, 2), "the library computes it"


@GRAPH
def test_a_replay_that_fails_changes_nothing(gpu: _Gpu, talk: Talk) -> None:
    gpu.fails = torch.OutOfMemoryError("no room")
    _given(talk, 2.0)
    _come_through(talk)
    assert values(talk.get(LAST)) == _expected(LAST, 2.0)
    assert _counts(talk) == (1, 0, 1, 0)


@GRAPH
def test_what_nobody_has_asked_for_is_bounded(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A section waits until there is room for its results; one with more than there ever is, is not captured."""
    monkeypatch.setattr(templates, "AHEAD_NBYTES", 31)
    _given(talk, 2.0)
    talk([wire.FOLLOW, 7, BASE, 0, [GIVEN]])
    assert _ahead(talk) == []
    talk([wire.VALIDATED, len(WORDS)])
    assert values(talk.get(LAST)) == _expected(LAST, 2.0)
    _clear(talk)
    monkeypatch.setattr(captures, "AHEAD_NBYTES", 31)
    talk.interpreter.drop_captured()
    talk([wire.FOLLOW, 7, BASE, 0, [GIVEN], wire.VALIDATED, len(WORDS)])
    talk.interpreter.capture()
    assert _counts(talk) == (1, 1, 1, 0)


def test_a_program_that_looks_everywhere_is_not_captured_for_ever(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captures, "MAX_BREAKS", 2)
    for made in (FIRST + 9, FIRST + 8, FIRST + 10, FIRST + 7):
        _given(talk, 2.0)
        talk([wire.FOLLOW, 7, BASE, 0, [GIVEN]])
        _ahead(talk)
        assert values(talk([wire.VALIDATED, _place(made), wire.DOWNLOAD, 5, made, 0, -1])[0]) == _expected(made, 2.0)
        talk([wire.VALIDATED, len(WORDS)])
        _clear(talk)
        if talk.interpreter.may_capture:
            talk.interpreter.capture()
    assert _counts(talk) == (2, 0, 2, 2)
    assert not talk.interpreter.may_capture


@pytest.mark.parametrize("how", ["forgotten", "closed"])
def test_nothing_of_it_outlives_what_it_was_made_of(talk: Talk, how: str) -> None:
    if how == "closed":
        talk.interpreter.close()
    else:
        talk([wire.FORGET_DEFS])
    assert _counts(talk) == (1, 0, 1, 0)
    assert not talk.interpreter._captures._known


@GRAPH
def test_few_of_an_instance_are_kept(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captures, "MAX_TEMPLATES", 2)
    for number in range(20, 24):
        talk([wire.TEMPLATE, number, WORDS])
        _given(talk, 2.0)
        talk([wire.FOLLOW, number, BASE, 0, [GIVEN], wire.VALIDATED, len(WORDS)])
        _clear(talk)
        talk.interpreter.capture()
    assert list(talk.interpreter._captures._known) == [22, 23]
    assert _counts(talk) == (5, 0, 3, 0)
    monkeypatch.setattr(captures, "HELD_NBYTES", 100)
    talk.interpreter.drop_captured()
    for number in (20, 21):
        _given(talk, 2.0)
        talk([wire.FOLLOW, number, BASE, 0, [GIVEN], wire.VALIDATED, len(WORDS)])
        _clear(talk)
        talk.interpreter.capture()
    assert list(talk.interpreter._captures._known) == [21], "64 bytes each"


# --- in slices


def _slices(talk: Talk, count: int) -> None:
    """Each of one operation."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(templates, "AHEAD_NS", 0)
        for _ in range(count):
            assert talk.interpreter.ahead()
    assert _followed(talk).computing is not None
    assert not talk.interpreter.table.ahead, "nothing of it is there before its end"


@pytest.fixture
def sliced(talk: Talk) -> Talk:
    """Three operations are computed."""
    _given(talk, 2.0)
    talk([wire.FOLLOW, 7, BASE, 0, [GIVEN]])
    _slices(talk, 3)
    return talk


@PROGRAM
def test_a_program_that_is_ahead_of_what_computes_it(sliced: Talk) -> None:
    """It says where it is, and is not waited for; at its end all is there."""
    for made, freed in ((FIRST + 1, []), (FIRST + 6, [FIRST]), (LAST - 1, [])):
        sliced([wire.VALIDATED, _place(made), wire.FREE, len(freed), *freed])
        _slices(sliced, 1)
    reply = sliced([wire.VALIDATED, len(WORDS), wire.DOWNLOAD, 5, LAST, 0, -1])[0]
    assert values(reply) == _expected(LAST, 2.0)
    sliced([])
    assert sorted(sliced.interpreter.table.by_id) == [GIVEN, WEIGHT, LAST - 1, LAST]
    assert _counts(sliced) == (1, 0, 0, 1)


@PROGRAM
def test_a_program_that_is_ahead_before_anything_is_computed(talk: Talk) -> None:
    """It is computed as a whole all the same."""
    _given(talk, 2.0)
    talk([wire.FOLLOW, 7, BASE, 0, [GIVEN], wire.VALIDATED, _place(FIRST + 4)])
    assert FIRST + 4 not in talk.interpreter.table.by_id
    _ahead(talk)
    talk([wire.VALIDATED, len(WORDS)])
    assert values(talk.get(LAST)) == _expected(LAST, 2.0)
    assert _counts(talk) == (1, 0, 0, 1)


@PROGRAM
@pytest.mark.parametrize("how", ["download", "leave", "end", "write", "upload", "settle", "close", "relief"])
def test_what_is_half_computed_is_nothing(sliced: Talk, how: str) -> None:
    """Whatever comes in the middle of it."""
    made = FIRST + 5
    comes = [wire.VALIDATED, _place(made)]
    expected, last = _expected(made, 2.0, negated=False), _expected(LAST, 2.0)
    match how:
        case "download":
            assert values(sliced([*comes, wire.DOWNLOAD, 5, made, 0, -1])[0]) == expected
        case "leave":
            sliced([*comes, wire.LEAVE])
            assert values(sliced.get(made)) == expected
        case "end":
            sliced([*comes, wire.END, 5, wire.END_WAIT])
            sliced.interpreter.report()
            content = bytes(sliced.interpreter.storage(made))
            assert torch.frombuffer(bytearray(content), dtype=torch.float32).tolist() == expected
        case "write":
            sliced([NEGATE_IN_PLACE, GIVEN])
            last = _expected(LAST, -2.0)
        case "upload":
            sliced.put(GIVEN, [-2.0] * 4)
            last = _expected(LAST, -2.0)
        case "settle":
            sliced.interpreter.settle()
        case "relief":
            sliced.interpreter._relieve()
        case _:
            sliced.interpreter.close()
    assert not sliced.interpreter._steps.computing
    if how in ("write", "upload", "settle", "relief", "download"):
        assert _followed(sliced).computing is None
        _ahead(sliced)
        sliced([wire.VALIDATED, len(WORDS)])
        assert values(sliced.get(LAST)) == last


@PROGRAM
def test_an_operation_that_fails_in_the_middle_is_met_where_it_is_asked_for(sliced: Talk) -> None:
    """The rest is computed one by one, and the section is given up."""
    section, computing = _followed(sliced).computing or (None, None)

    class _Fails:
        def go(self, _: int) -> bool:
            raise torch.OutOfMemoryError("no room")

    assert section is not None
    assert computing is not None
    _followed(sliced).computing = section, _Fails()  # type: ignore[assignment]
    _ahead(sliced)
    sliced([wire.VALIDATED, len(WORDS)])
    assert values(sliced.get(LAST)) == _expected(LAST, 2.0)
    assert _counts(sliced) == (1, 0, 1, 0)


@PROGRAM
@pytest.mark.parametrize("nbytes", [8, 0])
def test_an_input_that_is_too_short_is_met_where_it_is_asked_for(talk: Talk, nbytes: int) -> None:
    _given(talk, 2.0)
    talk([wire.FREE, 1, GIVEN])
    talk.put(GIVEN, [2.0] * (nbytes // 4))
    _come_through(talk)
    assert talk.get(LAST)[0] == wire.FAILED
    assert _counts(talk) == (1, 0, 0, 0)


@PROGRAM
def test_few_operations_are_computed_one_by_one(talk: Talk) -> None:
    for number, words in ((30, WORDS[: WORDS.index(_own(FIRST + 3))]), (31, WORDS[: WORDS.index(_own(FIRST + 4))])):
        starts = [place for place, word in enumerate(words) if word == ADD]
        talk([wire.TEMPLATE, number, words[: starts[-1]]])
        _given(talk, 2.0)
        talk([wire.FOLLOW, number, BASE, 0, [GIVEN], wire.VALIDATED, starts[-1]])
        _clear(talk)
        talk.interpreter.capture()
        assert not talk.interpreter.may_capture
    assert _counts(talk)[:2] == (2, 0)
