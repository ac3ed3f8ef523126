"""One node after the other, as the old supervisor decides it: the way, and every way in which it may fail."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dormouse.core.node import succession as e
from dormouse.core.node.succession import Stage, Succession

WAY: list[e.SuccessionEvent] = [
    e.SuccessionAsked(7.0),
    e.HeirImported(),
    e.RouterLeft(),
    e.Stopped(),
    e.HeirUp(),
    e.WayBackDropped(),
]
STAGES = [Stage.IDLE, Stage.IMPORTING, Stage.LEAVING, Stage.STOPPING, Stage.STARTING, Stage.DONE]


def at(stage: Stage) -> Succession:
    found = Succession()
    for event in WAY if stage is Stage.DONE else WAY[: STAGES.index(stage)]:
        found.handle(event)
    assert found.stage is stage
    return found


def test_the_way() -> None:
    succession = Succession()
    assert [succession.handle(event) for event in WAY] == [
        [e.StartHeir(), e.Within(e.IMPORT_S)],
        [e.HaveRouterLeave(7.0), e.Within(7.0 + e.ROUTER_S)],
        [e.StopChildren(), e.Within(e.STOP_S)],
        [e.GiveAll(), e.Within(e.START_S)],
        [e.DropWayBack()],
        [e.RetireSelf()],
    ]
    assert succession.handle(e.HeirEnded("whatever it meets then is its own")) == []
    assert succession.stage is Stage.DONE


@pytest.mark.parametrize("stage", STAGES[1:-1])
def test_a_successor_that_ends_leaves_the_node_to_the_old_one(stage: Stage) -> None:
    """What has been told to end by then is started anew."""
    succession = at(stage)
    assert succession.handle(e.HeirEnded("why")) == [e.ServeOn(stage is not Stage.IMPORTING, "why")]
    assert succession.stage is Stage.IDLE


@pytest.mark.parametrize("stage", [Stage.IMPORTING, Stage.STOPPING, Stage.STARTING])
def test_one_that_takes_too_long_is_killed_and_says_so(stage: Stage) -> None:
    succession = at(stage)
    assert succession.handle(e.Overdue()) == [e.KillHeir()]
    for late in WAY[1:]:
        assert succession.handle(late) == [], late
    (goes_on,) = succession.handle(e.HeirEnded("status -9"))
    assert goes_on == e.ServeOn(stage is not Stage.IMPORTING, f"it took too long ({stage.value})")


def test_a_successor_that_ends_while_there_is_a_way_back_is_not_left_the_node() -> None:
    succession = at(Stage.STARTING)
    assert succession.handle(e.HeirUp()) == [e.DropWayBack()]
    assert succession.handle(e.HeirEnded("status -9")) == [e.ServeOn(True, "status -9")]


def test_a_way_back_that_cannot_be_dropped_is_gone() -> None:
    succession = at(Stage.STARTING)
    succession.handle(e.HeirUp())
    assert succession.handle(e.WayBackStays("why")) == [e.KillHeir()]
    assert succession.handle(e.HeirUp()) == []
    assert succession.handle(e.HeirEnded("status -9")) == [e.ServeOn(True, "why")]


def test_requests_that_take_too_long_are_left_behind() -> None:
    succession = at(Stage.LEAVING)
    assert succession.handle(e.Overdue()) == [e.StopChildren(), e.Within(e.STOP_S)]
    assert succession.handle(e.RouterLeft()) == []


@pytest.mark.parametrize("stage", [Stage.IMPORTING, Stage.LEAVING])
def test_a_node_that_loses_a_process_meanwhile_stays(stage: Stage) -> None:
    succession = at(stage)
    assert succession.handle(e.ChildLost("store")) == [e.KillHeir()]
    assert succession.handle(e.RouterLeft()) == []
    (goes_on,) = succession.handle(e.HeirEnded("status -9"))
    assert isinstance(goes_on, e.ServeOn)
    assert goes_on.text == "store died meanwhile, and the node starts anew; try again"


EVENTS = st.sampled_from([*WAY, e.WayBackStays("x"), e.HeirEnded("x"), e.ChildLost("store"), e.Overdue()])


@given(st.lists(EVENTS, max_size=40))
def test_there_is_always_exactly_one_node(events: list[e.SuccessionEvent]) -> None:
    """It is given away once at most between two starts of a successor, after all was stopped, and comes back if that
    ends.
    """
    succession, given_away, heirs = Succession(), False, 0
    for event in events:
        for effect in succession.handle(event):
            match effect:
                case e.StartHeir():
                    assert heirs == 0
                    heirs += 1
                case e.GiveAll():
                    assert isinstance(event, e.Stopped)
                    assert (heirs, given_away) == (1, False)
                    given_away = True
                case e.DropWayBack():
                    assert given_away
                case e.ServeOn(anew=anew):
                    assert heirs == 1
                    assert anew or not given_away
                    heirs, given_away = 0, False
                case e.RetireSelf():
                    assert given_away
                    assert isinstance(event, e.WayBackDropped)
        assert (succession.stage is Stage.IDLE) == (heirs == 0)
