"""When a runtime computes: its steps in a turn, how much of prompts is in each; the executor is the test."""

import copy
import time

import played_runtime
import pytest
from language_models import prompts, reference, wrong_tokens
from played_runtime import NEW, Played, played

from dormouse.core.decisions.rules.pace import FEW
from dormouse.core.decisions.rules.step_times import step_s
from dormouse.schemas import messages as m

__all__ = ["played"]


def test_a_turn_that_ends_at_once_has_one_step(played: Played) -> None:
    played.submit(1, prompts(1, 40)[0])
    for message in (m.TurnBegins(), m.TurnEnds()):
        played.executor.send(message)
    played.thread.start()
    assert played.until(m.Tokens) == ["TurnGivenBack", "Tokens"]  # the next one need not wait for what this one tells
    (step,) = played.steps
    assert [(each.serial, each.tokens, each.made) for each in step.shares] == [(1, 40, 1)]


def test_one_that_ends_in_its_step_is_given_back_before_that_is_told(played: Played) -> None:
    played.submit(1, prompts(1, 40)[0])
    played.executor.send(m.TurnBegins())
    played.thread.start()
    assert played.until(m.Tokens, in_step=[m.TurnEnds()]) == ["TurnGivenBack", "Tokens"]


def test_so_has_one_that_follows_another(played: Played) -> None:
    """All is heard after the first step."""
    played.submit(1, prompts(1, 40)[0])
    played.executor.send(m.TurnBegins())
    played.thread.start()
    heard = played.until(m.TurnGivenBack, in_step=[m.TurnEnds(), m.TurnBegins(), m.TurnEnds()])
    assert heard == ["Tokens", "Stepped", "TurnGivenBack"]


def test_without_room_for_kv_in_anothers_turn_a_sequence_waits_for_its_own(played: Played) -> None:
    """There others make room; only then is it told that there is none."""
    played.submit(1, prompts(1, 40)[0])
    played.grants = False
    for message in (m.TurnBegins(lent=True), m.TurnEnds()):
        played.executor.send(message)
    played.thread.start()
    assert played.until(m.TurnGivenBack) == ["TurnGivenBack"]
    assert played.last.wants
    played.executor.send(m.TurnBegins())
    assert played.until(m.Tokens) == ["Tokens"]
    assert played.finishes == {(1, 1): "no_room"}


def test_a_turn_without_anything_to_do_ends_at_once(played: Played) -> None:
    for message in (m.TurnBegins(), m.TurnEnds()):
        played.executor.send(message)
    played.thread.start()
    assert played.until(m.TurnGivenBack) == ["TurnGivenBack"]


def test_it_says_what_is_due_and_again_when_the_first_prompt_comes(played: Played) -> None:
    """A sequence that has its first token; then others' prompts, the second of which is no news."""
    first, second, third = prompts(3, 40, 40, 40)
    played.submit(1, first)
    for message in (m.TurnBegins(), m.TurnEnds()):
        played.executor.send(message)
    played.thread.start()
    due = played.said(m.TurnGivenBack).due
    assert due is not None
    assert (due.prompts, due.decoding) == ([], 1)
    played.submit(2, second)
    due = played.said(m.StepsWanted).due
    assert due is not None
    assert [(each.serial, each.tokens) for each in due.prompts] == [(1, 40)]
    assert due.decoding == 1
    played.submit(3, third)
    for message in (m.TurnBegins(), m.TurnEnds()):
        played.executor.send(message)
    assert "StepsWanted" not in played.until(m.TurnGivenBack)


def test_a_step_with_bad_logits_is_told_with_who_was_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time is theirs; its tokens count when they are computed again."""
    model = copy.deepcopy(reference("llama"))
    model.model.embed_tokens.weight.data[300] = float("nan")
    monkeypatch.setattr(played_runtime, "reference", lambda _: model)
    played = Played()
    try:
        played.submit(1, prompts(2, 40)[0])
        played.submit(2, [5, 300, 6])
        played.executor.send(m.TurnBegins())
        played.thread.start()
        told = played.said(m.Stepped)
        assert played.finishes == {(1, 2): "bad_logits"}
        assert told.busy_us > 0
        assert [(each.serial, each.tokens, each.prompt, each.made) for each in told.shares] == [(1, 43, 0, 0)]
        (share,) = played.said(m.Stepped).shares
        assert (share.tokens, share.prompt, share.made) == (40, 40, 1)
    finally:
        played.close()


def test_it_says_what_its_steps_take(played: Played) -> None:
    played.submit(1, prompts(1, 40)[0])
    played.executor.send(m.TurnBegins())
    played.thread.start()
    load = played.said(m.LoadChanged).load
    assert load.times is not None
    assert load.times.step_us + 40 * load.times.prompt_token_us > 0


def begun_without_weights(played: Played) -> None:
    """Its first step is due, and its base's weights are on their way."""
    played.executor.send(m.SeatEnds())
    played.thread.start()
    played.said(m.SeatLeft)
    played.give_base()
    played.seat(1, 1)
    played.submit(1, prompts(1, 40)[0])
    played.executor.send(m.TurnBegins())


@pytest.mark.parametrize("brief_ms", [0, 3_600_000])
def test_steps_are_brief_for_as_long_as_was_said(played: Played, brief_ms: int) -> None:
    (prompt,) = prompts(2, 10 * FEW)
    played.submit(1, prompt)
    played.executor.send(m.TurnBegins(brief_ms=brief_ms))
    played.thread.start()
    steps = played.until(m.Tokens).count("Stepped") + 1
    assert steps == (10 if brief_ms else 1)
    while len(played.tokens) < NEW:
        played.until(m.Tokens)
    assert wrong_tokens(played.model, prompt + played.tokens, len(prompt)) == []


def test_a_step_that_the_end_of_its_seat_cuts_is_told_with_who_was_in_it(played: Played) -> None:
    """It waits for weights that are on their way. Its time is theirs, and that of its second try, too."""
    begun_without_weights(played)
    assert played.until(m.SeatLeft, in_step=[m.SeatEnds()]) == ["Stepped", "SeatLeft"]
    (told,) = played.steps
    assert told.busy_us > 0
    assert [(each.serial, each.tokens, each.prompt, each.made) for each in told.shares] == [(1, 40, 0, 0)]
    played.give_base()
    played.seat(1)
    played.executor.send(m.TurnBegins())
    (share,) = played.said(m.Stepped).shares
    assert (share.tokens, share.prompt, share.made) == (40, 40, 1)


def test_a_step_that_waits_for_weights_says_so_once_until_some_have_come(played: Played) -> None:
    """And goes on with them."""
    begun_without_weights(played)
    assert played.until(m.StepWaits) == ["StepWaits"]
    played.executor.send(m.SegmentsCame(segments=[7]))  # of another lease
    assert played.until(m.StepWaits) == ["StepWaits"]
    played.executor.send(m.SegmentsCame(segments=[1]))
    assert played.until(m.Stepped) == ["Tokens", "Stepped"]


def test_a_step_is_not_busy_while_others_may_compute(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights come after 100 s, of which it has kept the GPU for 20 ms."""
    clock, passed_s = time.perf_counter, [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + passed_s[0])
    begun_without_weights(played)
    played.said(m.StepWaits)
    passed_s[0] += 100.0
    played.executor.send(m.SegmentsCame(segments=[1]))
    assert 20_000 < played.said(m.Stepped).busy_us < 50_000_000


def test_nothing_is_learned_of_what_a_step_takes_that_waits_for_weights(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes as long as they do. Pieces of prompts would be too small for many steps after it."""
    played.executor.send(m.SeatEnds())
    played.thread.start()
    played.said(m.SeatLeft)
    progress, kv, engine = played.process._progress, played.process._kv, played.process._engine
    assert engine is not None
    pace, paced = engine.pace.learn, list[int]()  # prompt tokens; what it makes of the times may be 0

    def learn(prompt_tokens: int, took_ms: float) -> None:
        paced.append(prompt_tokens)
        pace(prompt_tokens, took_ms)

    monkeypatch.setattr(engine.pace, "learn", learn)
    played.give_base()
    played.seat(1, 1)
    played.submit(1, prompts(1, 40)[0])
    played.executor.send(m.TurnBegins())
    played.said(m.StepWaits)
    played.executor.send(m.SegmentsCame(segments=[1]))
    for _ in range(NEW):
        played.said(m.Stepped)
    assert (progress.times, kv.cost.expected_us(1000), paced) == (None, 0, [0] * (NEW - 1))
    played.submit(2, prompts(2, 40)[0])
    played.said(m.Stepped)
    assert progress.times is not None
    assert kv.cost.expected_us(1000) > 0
    assert paced[NEW - 1] == 40


def test_what_a_step_waits_for_room_is_no_part_of_what_steps_take(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, passed_s = time.perf_counter, [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + passed_s[0])
    link = played.process._kv._link
    wait = link.wait_for_memory

    def waits() -> m.KvGiven:
        passed_s[0] += 100.0
        return wait()

    monkeypatch.setattr(link, "wait_for_memory", waits)
    played.submit(1, prompts(1, 40)[0])
    played.executor.send(m.TurnBegins())
    played.thread.start()
    assert played.said(m.Stepped).busy_us > 100_000_000, "it had its turn for so long"
    times = played.process._progress.times
    assert times is not None
    assert 0 < step_s(times, 40, 0) < 50
    assert 0 < played.process._kv.cost.expected_us(40) < 10_000_000
