"""Whose prompt joins a runtime's batch next, by what is wanted of each lease; the executor is the test."""

from language_models import prompts
from played_runtime import NEW, Played, played

from dormouse.schemas import messages as m

__all__ = ["played"]

HOUR_US = 3_600_000_000
LONG = 250
"""Tokens of a prompt: a step takes 256."""


def firsts(played: Played, count: int) -> list[int]:
    """Leases, as their first tokens come."""
    order: list[int] = []
    while len(order) < count:
        played.until(m.Tokens)
        order += [serial for serial, _ in played.made if serial not in order]
    return order


def submit(played: Played, *joins: m.JoinRule, waited_s: tuple[float, ...] = ()) -> None:
    """A prompt of each lease, the first one first, that all wait for the first step."""
    for serial, (rule, prompt) in enumerate(zip(joins, prompts(5, *[LONG] * len(joins)), strict=True), 1):
        if serial > 1:
            played.join(serial)
        message = m.Submit(
            number=1, tokens=prompt, more=False, prompt=LONG, limit=LONG + NEW, stops=[],
            waited_us=int(waited_s[serial - 1] * 1e6) if waited_s else 0,
        )  # fmt: skip
        played.tell(message, serial)
        played.seat(serial, joins=rule)
    played.executor.send(m.TurnBegins())
    played.thread.start()


def test_the_least_margin_is_first(played: Played) -> None:
    """What is wanted is told after the prompts are."""
    submit(played, *[m.JoinRule(ttft_us=hours * HOUR_US) for hours in (3, 1, 2)])
    assert firsts(played, 3) == [2, 3, 1]


def test_in_turn_it_is_who_came_first(played: Played) -> None:
    submit(played, *[m.JoinRule(ttft_us=hours * HOUR_US, in_turn=True) for hours in (3, 1, 2)])
    assert firsts(played, 3) == [1, 2, 3]


def test_what_it_has_waited_before_counts_but_not_beyond_what_is_wanted(played: Played) -> None:
    """The second has one hour left of two. The third says that it has waited for years, and so is late: last."""
    rules = [m.JoinRule(ttft_us=wanted_us) for wanted_us in (HOUR_US * 3 // 2, 2 * HOUR_US, HOUR_US)]
    submit(played, *rules, waited_s=(0.0, 3600.0, 1e8))
    assert firsts(played, 3) == [2, 1, 3]
