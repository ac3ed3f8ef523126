"""Where the time to a first token goes: what a runtime and an instance measure, and what the router makes of it."""

import time
from typing import Any

import msgspec
import orjson
import pytest
from language_models import prompts, reference, tokenizer
from router_rig import one
from runtime_engines import begin, engine
from unit.test_router_models import ask, handed, model

from dormouse.client_shim.llm import requests as r
from dormouse.client_shim.llm.answers import Choice, OpenAiAnswer
from dormouse.client_shim.llm.decoding import Decoding
from dormouse.client_shim.llm.open_requests import OpenChoice, OpenRequest
from dormouse.client_shim.llm.text import TextStream
from dormouse.client_shim.llm.timings import Timings, counts
from dormouse.core.decisions.requests import events as e
from dormouse.gpuserver.runtime import progress
from dormouse.gpuserver.runtime.progress import StepProgress
from dormouse.router.front.answers import server_timing
from dormouse.router.front.stats import TokenStats
from dormouse.schemas import messages as m
from dormouse.schemas.llm import DefaultSampling

US = 1_000_000


def open_request(came_s: float, prompt: int = 5) -> OpenRequest:
    answer = OpenAiAnswer(kind="completions", id="x", model="m")
    asked = r.parse("completions", b'{"prompt": "x"}')
    request = OpenRequest(3, asked, answer, [7] * prompt, 100, -1, DefaultSampling(), came_s=came_s)
    request.generations = [OpenChoice(n, request, Choice(n), 0, TextStream(Decoding(tokenizer()))) for n in range(2)]
    return request


def parts(begun: m.AnswerBegun) -> tuple[int, int, int, int]:
    return begun.queue_us, begun.runtime_us, begun.wake_us, begun.prefill_us


TOLD = m.FirstToken(number=1, queue_us=1 * US, wake_us=2 * US, prefill_us=3 * US)


def test_before_the_runtime_is_ready_it_is_what_is_waited_for() -> None:
    """It came at 10, had its lease at 14 and its first token at 24: 1, 2 and 3 seconds of the last 10 are known."""
    timings = Timings()
    timings.leased(14.0)
    assert parts(timings.first_token(open_request(10.0), TOLD, 24.0)) == (5 * US, 4 * US, 2 * US, 3 * US)


def test_when_it_is_ready_the_rest_is_waiting_for_a_step_to_end() -> None:
    timings = Timings()
    timings.leased(4.0)
    timings.heard(9.0)
    assert parts(timings.first_token(open_request(10.0), TOLD, 17.0)) == (2 * US, 0, 2 * US, 3 * US)


def test_a_runtime_of_the_next_lease_is_not_ready() -> None:
    timings = Timings()
    timings.leased(4.0)
    timings.heard(9.0)
    timings.leased(12.0)
    begun = timings.first_token(open_request(10.0), None, 20.0)
    assert parts(begun) == (2 * US, 8 * US, 0, 0)


def test_nothing_is_less_than_nothing() -> None:
    timings = Timings()
    assert min(parts(timings.first_token(open_request(10.0), TOLD, 10.5))) >= 0


def test_tokens_are_counted_and_the_time_of_each_further_one() -> None:
    request = open_request(10.0)
    request.first_s = 12.0
    request.generations[0].made, request.generations[1].made = [1] * 5, [1] * 3
    request.generations[1].reused = 4
    assert counts(request, 14.0) == m.TokenCounts(prompt=5, made=8, reused=4, tpot_us=US // 2)
    request.generations[0].made = request.generations[1].made = [1]
    assert counts(request, 14.0).tpot_us == 0


# --- the runtime


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now_s)


def test_a_runtime_tells_what_a_first_token_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of two steps: it waits 3 s, then each step takes 2, of which the first waits 1.5 for weights."""
    clock, told = Clock(monkeypatch), StepProgress()
    made = engine(reference("llama"), 64)
    first = begin(made, 0, prompts(1, 300)[0], 4)
    told.submitted(first)
    clock.now_s += 3
    step = made.step()
    clock.now_s += 2
    assert step == []
    assert told.stepped(103.0, 1.5, 0.0, made, step) == []
    step = made.step()
    assert step is not None
    clock.now_s += 2
    (token,) = told.stepped(105.0, 0.0, 0.0, made, step)
    wanted = m.FirstToken(number=0, queue_us=3 * US, wake_us=1500_000, prefill_us=2500_000)
    assert (token.told, token.reused) == (wanted, 0)
    step = made.step()
    assert step is not None
    assert told.stepped(107.0, 0.0, 0.0, made, step) == [], "it is told once"


def test_times_have_the_budget_of_the_engine() -> None:
    """GPUs' steps take more of prompts than those of hosts."""
    told, made = StepProgress(), engine(reference("llama"), 64, step_tokens=40)
    begin(made, 0, prompts(1, 100)[0], 4)
    step = made.step()
    assert step is not None
    told.stepped(time.perf_counter() - 1, 0.0, 0.0, made, step)
    assert told.times is not None
    assert told.times.step_tokens == 40


def test_reuse_is_told_even_of_an_answer_of_one_token() -> None:
    told, made = StepProgress(), engine(reference("llama"), 64)
    prompt = prompts(2, 50)[0]
    for number in range(2):
        told.submitted(begin(made, number, prompt, 1))
        step = made.step()
        assert step is not None
        (token,) = told.stepped(time.perf_counter(), 0.0, 0.0, made, step)
        assert token.reused == 48 * number
    changed = told.load(made, [])
    assert changed is not None
    load = changed.load
    assert load.reused_nbytes == 48 * made.layout.block_nbytes // 16
    assert (load.running, load.waiting, load.used, load.blocks, load.idle) == (0, 0, 0, 64, 3)


def test_the_load_is_told_a_few_times_a_second_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, told = Clock(monkeypatch), StepProgress()
    made = engine(reference("llama"), 64)
    begin(made, 0, prompts(3, 20)[0], 30)
    made.step()
    assert told.load(made, []) is not None
    begin(made, 1, prompts(4, 20)[0], 30)
    made.step()
    assert told.load(made, []) is None, "too soon"
    clock.now_s += progress.TELL_S
    changed = told.load(made, [])
    assert changed is not None
    load = changed.load
    assert (load.running, load.used) == (2, 4)
    made.batch.preempt_all()
    clock.now_s += progress.TELL_S
    changed = told.load(made, [])
    assert changed is not None
    load = changed.load
    assert (load.running, load.waiting, load.preempted) == (0, 2, 2)
    for number in range(2):
        made.remove(number)
    assert told.load(made, [7]) is not None, "nothing is to be done: at once"
    assert told.load(made, [7]) is None, "nothing has changed"
    assert told.load(made, []) is not None, "lease 7 has nothing to do any more"


# --- the router


BEGUN: dict[str, Any] = {"queue_us": 10_000, "runtime_us": 20_000, "wake_us": 30_000, "prefill_us": 40_000}


def test_the_router_adds_its_own_queue() -> None:
    rig = model()
    ticket = handed(ask(rig, 1))
    rig.say("i1", m.AnswerBegun(request=ticket, **BEGUN))
    rig.now_s += 0.5
    tokens = m.TokenCounts(prompt=3, made=4, reused=0, tpot_us=1000)
    answer = one(rig.say("i1", m.Returned(request=ticket, body=b"{}", nbytes=2, tokens=tokens)), e.Answer)
    assert answer.tokens == tokens
    assert server_timing(answer.timing)[1] == (
        b"queue;dur=10.000, runtime;dur=20.000, wake;dur=30.000, prefill;dur=40.000, rest;dur=400.000"
    )


def test_answers_are_counted_against_both_deadlines() -> None:
    stats, wanted = TokenStats(), m.LlmSettings(ttft_ms=150, tpot_ms=10)
    begun = m.AnswerBegun(request=1, **BEGUN)
    for queue_s, tpot_us in ((0.04, 9_000), (0.06, 9_000), (0.04, 11_000), (0.0, 0)):
        tokens = m.TokenCounts(prompt=100, made=10, reused=16, tpot_us=tpot_us)
        stats.add(e.Timing(queue_s=queue_s, run_s=9.0, first=begun), tokens, wanted)
    stats.in_time.append(0.0)
    told = stats.summary(wanted, 40.0)
    assert (told["counted"], told["in_time"], told["complies"]) == (5, 0.4, True)
    assert stats.summary(wanted, 41.0)["complies"] is False
    assert told["ttft_ms"]["p99"] == pytest.approx(160.0)
    assert told["queue_ms"]["p99"] == pytest.approx(70.0)
    assert (told["prompt_tokens"], told["made_tokens"], told["reused_tokens"]) == (400, 40, 64)
    assert told["tpot_ms"]["p99"] == 11.0


def test_what_an_instance_says_of_its_answers_can_always_be_told() -> None:
    """Sums of numbers that no JSON and no msgpack has would end every status, and every scrape."""
    stats, wanted, most = TokenStats(), m.LlmSettings(), 2**64 - 1
    begun = m.AnswerBegun(request=1, queue_us=most, runtime_us=most, wake_us=-1, prefill_us=most)
    tokens = m.TokenCounts(prompt=most, made=most, reused=-most, tpot_us=most)
    for _ in range(3):
        stats.add(e.Timing(run_s=1.0, first=begun), tokens, wanted)
    assert (stats.prompt, stats.made, stats.reused) == (3 << 40, 3 << 40, 0)
    orjson.dumps(stats.summary(wanted, 98.0))
    counts = m.TokensCounted(
        first=stats.first.told(), further=stats.further.told(), prompt=stats.prompt, made=stats.made, reused=0
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(counts), type=m.TokensCounted) == counts


def test_a_model_that_has_answered_nothing_has_no_numbers() -> None:
    told = TokenStats().summary(m.LlmSettings(), 98.0)
    assert (told["counted"], told["in_time"], told["complies"]) == (0, None, None)
    assert told["ttft_ms"] == {"p50": None, "p99": None}
