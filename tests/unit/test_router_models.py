"""The router's policy for language models: many requests at once, leases of the instance's own, what ends them."""

from typing import Any

import pytest
from router_rig import EXTRA_IDLE_MS, Rig, fails_with, failure, lease, loaded, one, said, spec

from dormouse.core.decisions.requests import events as e
from dormouse.core.decisions.requests import replicas
from dormouse.core.decisions.requests.runtimes import runtime_group
from dormouse.core.decisions.requests.state import MAX_OPEN, InstanceState
from dormouse.schemas import messages as m

LLM = m.LlmSettings(ttft_ms=300)


def model(**settings: Any) -> Rig:
    rig = Rig(spec(llm=LLM, stateless=True, **settings), max_queue=1000)
    rig.load("i1")
    return rig


def ask(rig: Rig, number: int, route: str = "chat") -> list[e.Action]:
    return rig.do(e.Arrived(number, "f", route))


def handed(actions: list[e.Action]) -> int:
    """The ticket."""
    handover = one(actions, e.Handover)
    assert handover.lease is None
    ticket: int = handover.ticket
    return ticket


def test_requests_go_to_the_instance_at_once_and_none_asks_for_a_gpu() -> None:
    rig = model()
    for number in range(1, 6):
        actions = ask(rig, number)
        assert handed(actions)
        assert one(actions, e.Handover).route == "chat"
        assert said(actions, m.Acquire) == []
    assert rig.state("i1") is InstanceState.IDLE


def test_more_than_an_instance_has_at_once_wait() -> None:
    rig = model(max_queue=10)
    tickets = [handed(ask(rig, number)) for number in range(1, MAX_OPEN + 1)]
    assert ask(rig, MAX_OPEN + 1) == []
    answer = m.Returned(request=tickets[7], body=b"{}", nbytes=2)
    actions = rig.say("i1", answer)
    assert one(actions, e.Answer).request == 8
    assert one(actions, e.Handover).request == MAX_OPEN + 1
    for number in range(MAX_OPEN + 2, MAX_OPEN + 12):
        ask(rig, number)
    fails_with(ask(rig, MAX_OPEN + 99), MAX_OPEN + 99, "queue_full", 429)


def test_its_instance_takes_a_lease_when_it_wants_one() -> None:
    rig = model()
    ask(rig, 1)
    acquire = one(rig.say("i1", m.NeedLease(version=1)), m.Acquire)
    assert (acquire.own, acquire.deadline_ms) == (True, 300)
    granted = rig.hear(m.Granted(request=acquire.request, lease=lease(4), wake_nbytes=9))
    assert one(granted, m.LeaseGranted).lease.serial == 4
    ended = rig.say("i1", m.LeaseEnded(serial=4, version=1))
    assert one(ended, m.Answered) == m.Answered(request=acquire.request, used=True)
    assert rig.policy.picture.tickets.keys() == {1}  # the request's


def test_with_a_lease_on_a_gpu_that_is_drained_it_gets_no_more_requests_until_that_has_ended() -> None:
    rig = model()
    ticket = handed(ask(rig, 1))
    acquire = one(rig.say("i1", m.NeedLease(version=1)), m.Acquire)
    rig.hear(m.GpusDrained(gpus=[0], left=1))
    assert handed(ask(rig, 2)), "it may get one elsewhere"
    rig.hear(m.Granted(request=acquire.request, lease=lease(4), wake_nbytes=9))
    assert ask(rig, 3) == []
    assert said(rig.say("i1", m.Returned(request=ticket, body=b"{}", nbytes=2)), e.Handover) == []
    assert handed(rig.say("i1", m.LeaseEnded(serial=4, version=1)))


@pytest.mark.parametrize("ends", [m.GpusDrained(gpus=[], left=2), m.LeaseLost(request=2)])
def test_its_requests_go_on_when_the_gpu_serves_again_or_is_lost(ends: m.ControllerToRouter) -> None:
    rig = model()
    handed(ask(rig, 1))
    acquire = one(rig.say("i1", m.NeedLease(version=1)), m.Acquire)
    rig.hear(m.Granted(request=acquire.request, lease=lease(4), wake_nbytes=9))
    rig.hear(m.GpusDrained(gpus=[0], left=1))
    assert (acquire.request, ask(rig, 2)) == (2, [])
    assert handed(rig.hear(ends))


def test_a_function_s_instance_may_not() -> None:
    rig = loaded()
    assert one(rig.say("i1", m.NeedLease(version=1)), m.LeaseRefused).code == "no_lease"


def test_a_function_is_no_language_model() -> None:
    fails_with(loaded().do(e.Arrived(1, "f", "chat")), 1, "model_not_found", 404)


@pytest.mark.parametrize(
    ("code", "told", "status"),
    [
        ("context_length_exceeded", "context_length_exceeded", 400),
        ("unsupported_parameter", "unsupported_parameter", 400),
        ("out_of_memory", "out_of_memory", 507),
        ("anything <script>", "not_served", 503),
    ],
)
def test_what_the_instance_says_of_a_request_is_told_if_it_is_known(code: str, told: str, status: int) -> None:
    rig = model()
    ticket = handed(ask(rig, 1))
    actions = rig.say("i1", m.Raised(request=ticket, code=code, text="no", param="messages"))
    fails_with(actions, 1, told, status)
    assert one(actions, e.Fail).failure.param == "messages"


def test_a_client_that_leaves_is_told_to_the_instance_and_others_go_on() -> None:
    rig = model()
    tickets = [handed(ask(rig, number)) for number in (1, 2)]
    actions = rig.do(e.RequesterLeft(1))
    assert one(actions, m.Abandon) == m.Abandon(request=tickets[0])
    assert said(actions, e.Interrupt) == []
    assert rig.say("i1", m.Raised(request=tickets[0], code="cancelled", text="")) == []
    assert one(rig.say("i1", m.Returned(request=tickets[1], body=b"{}", nbytes=2)), e.Answer).request == 2


def test_parts_that_come_when_the_client_has_left_harm_nobody() -> None:
    rig = model()
    ticket = handed(ask(rig, 1))
    rig.do(e.RequesterLeft(1))
    assert rig.say("i1", m.AnswerPart(request=ticket, body=b"x", kind=m.SSE)) == []


def test_parts_of_a_step_come_in_one_message() -> None:
    rig = model()
    first, second = (handed(ask(rig, number)) for number in (1, 2))
    parts = [m.AnswerPart(request=ticket, body=body, kind=m.SSE) for ticket, body in ((first, b"a"), (second, b"b"))]
    actions = rig.say("i1", m.AnswerParts(parts=parts))
    assert [each.request for each in actions if isinstance(each, e.BeginStream)] == [1, 2]
    assert one(actions, e.Pass).parts == [(1, b"a"), (2, b"b")]
    more = [m.AnswerPart(request=ticket, body=b"c") for ticket in (second, first)]
    assert rig.say("i1", m.AnswerParts(parts=more)) == [e.Pass([(2, b"c"), (1, b"c")])]
    actions = rig.say("i1", m.AnswerParts(parts=[m.AnswerPart(request=999, body=b"x", kind=m.SSE)]))
    assert one(actions, e.Kill).why == "broke the protocol (AnswerParts while idle)"


def test_one_that_takes_too_long_fails_alone() -> None:
    rig = model(timeout_ms=1000)
    first = handed(ask(rig, 1))
    rig.after(0.9)
    second = handed(ask(rig, 2))
    actions = rig.after(0.2)
    fails_with(actions, 1, "timed_out", 504)
    assert one(actions, m.Abandon).request == first
    assert said(actions, e.Kill) == []
    assert one(rig.say("i1", m.Returned(request=second, body=b"{}", nbytes=2)), e.Answer).request == 2


def test_when_the_instance_dies_what_has_said_nothing_begins_anew() -> None:
    rig = model()
    speaking, silent = (handed(ask(rig, number)) for number in (1, 2))
    rig.say("i1", m.AnswerPart(request=speaking, body=b"x", kind=m.SSE))
    actions = rig.do(e.InstanceExited("i1", "was killed"))
    fails_with(actions, 1, "sandbox_died", 502)
    assert silent not in rig.policy.picture.tickets
    rig.load("i2")
    assert rig.policy.picture.requests[2].ticket != silent
    fails_with(rig.do(e.InstanceExited("i2", "was killed")), 2, "sandbox_died", 502)


def test_a_replaced_version_finishes_what_it_has() -> None:
    rig = model()
    ticket = handed(ask(rig, 1))
    new = m.FunctionSpec(name="f", version=0, entry="config.json", snapshot="t", llm=LLM)
    rig.do(e.DeployAsked(1, new))
    rig.load("i2")
    actions = rig.hear(m.Kept(name="f"))
    assert said(actions, m.Exit) == []
    assert one(ask(rig, 2), e.Handover).instance == "i2"
    actions = rig.say("i1", m.Returned(request=ticket, body=b"{}", nbytes=2))
    assert one(actions, m.Exit) == m.Exit()


@pytest.mark.parametrize("granted", [False, True])
@pytest.mark.parametrize("answers", [False, True])
def test_a_replaced_version_wants_no_seat_any_more(granted: bool, answers: bool) -> None:
    """Neither the one that it has nor the one that it waits for, whether it is idle by then or has a request yet."""
    rig = model()
    ticket = handed(ask(rig, 1))
    seat = one(rig.say("i1", m.NeedLease(version=1)), m.Acquire).request
    if granted:
        rig.hear(m.Granted(request=seat, lease=lease(), wake_nbytes=0))
    returned = m.Returned(request=ticket, body=b"{}", nbytes=2)
    if not answers:
        assert said(rig.say("i1", returned), m.Release) == []
    rig.do(e.DeployAsked(1, m.FunctionSpec(name="f", version=0, entry="config.json", snapshot="t", llm=LLM)))
    rig.load("i2")
    actions = rig.hear(m.Kept(name="f"))
    if answers:
        assert said(actions, m.Exit) == []
        actions = rig.say("i1", returned)
    assert one(actions, m.Release) == m.Release(request=seat)
    assert one(actions, m.Exit) == m.Exit()
    assert rig.hear(m.Granted(request=seat, lease=lease(), wake_nbytes=0)) == [], "it has crossed with that"
    assert said(rig.do(e.InstanceExited("i1", "left")), m.Release) == []


def test_a_lease_that_is_lost_is_told() -> None:
    rig = model()
    ask(rig, 1)
    acquire = one(rig.say("i1", m.NeedLease(version=1)), m.Acquire)
    rig.hear(m.Granted(request=acquire.request, lease=lease(4), wake_nbytes=9))
    assert one(rig.hear(m.LeaseLost(request=acquire.request)), m.LeaseRefused).code == "executor_lost"
    assert one(rig.say("i1", m.NeedLease(version=1)), m.Acquire).own


def test_a_lease_that_is_refused_is_told() -> None:
    rig = model()
    acquire = one(rig.say("i1", m.NeedLease(version=1)), m.Acquire)
    refused = rig.hear(m.Refused(request=acquire.request, failure=failure("gpus_full")))
    assert one(refused, m.LeaseRefused).code == "gpus_full"


# --- several instances


HALF_S = LLM.ttft_ms / 2000


def at_work(gpus: int = 2, **settings: Any) -> tuple[Rig, list[int]]:
    """An instance with a lease, under which it has begun the first of four requests."""
    rig = Rig(spec(llm=LLM, stateless=True, **settings), max_queue=1000, gpus=gpus)
    rig.load("i1")
    tickets = [handed(ask(rig, number)) for number in range(1, 5)]
    grant(rig, "i1")
    rig.say("i1", m.AnswerBegun(request=tickets[0]))
    return rig, tickets


def grant(rig: Rig, instance: str) -> None:
    acquire = one(rig.say(instance, m.NeedLease(version=1)), m.Acquire)
    rig.hear(m.Granted(request=acquire.request, lease=lease(acquire.request), wake_nbytes=9))


def test_late_first_tokens_call_for_another_instance_that_takes_its_share() -> None:
    rig, tickets = at_work()
    assert said(rig.after(HALF_S * 0.9), e.Start) == []
    assert one(rig.after(HALF_S * 0.2), e.Start).instance == "i2"
    actions = rig.load("i2")
    assert [each.request for each in said(actions, m.Abandon)] == tickets[2:]  # the newest that have no token
    assert [(each.request, each.instance) for each in said(actions, e.Handover)] == [(3, "i2"), (4, "i2")]
    for ticket in tickets[2:]:
        rig.say("i1", m.Raised(request=ticket, code="cancelled", text=""))
    assert {handed(ask(rig, number)) for number in (5, 6)}
    assert [len(rig.policy.picture.instances[name].open) for name in ("i1", "i2")] == [3, 3]


def done(rig: Rig, ticket: int, tpot_ms: float) -> list[e.Action]:
    tokens = m.TokenCounts(prompt=9, made=9, reused=0, tpot_us=int(tpot_ms * 1000))
    return rig.say("i1", m.Returned(request=ticket, body=b"{}", nbytes=2, tokens=tokens))


def test_late_further_tokens_call_for_another_instance() -> None:
    rig, tickets = at_work()
    for ticket in tickets:
        rig.say("i1", m.AnswerBegun(request=ticket))
    assert said(done(rig, tickets[0], LLM.tpot_ms * 0.9), e.Start) == []
    assert one(done(rig, tickets[1], LLM.tpot_ms * 2.0), e.Start).instance == "i2"
    assert rig.policy.picture.functions["f"].tpot_ms is None  # two are not one


@pytest.mark.parametrize("why", ["no other GPU", "alone", "one token", "in time on the whole"])
def test_late_further_tokens_start_no_other_instance_that_would_not_help(why: str) -> None:
    rig, tickets = at_work(gpus=1 if why == "no other GPU" else 2)
    for ticket in tickets:
        rig.say("i1", m.AnswerBegun(request=ticket))
    if why == "alone":
        for ticket in tickets[1:]:
            done(rig, ticket, 1.0)
    elif why == "in time on the whole":
        done(rig, tickets[1], LLM.tpot_ms * 0.5)
    late_ms = {"one token": 0.0, "in time on the whole": LLM.tpot_ms * 2}.get(why, LLM.tpot_ms * 100)
    assert said(done(rig, tickets[0], late_ms), e.Start) == []


@pytest.mark.parametrize("requests", [0, 1])
def test_an_idle_model_s_seat_takes_no_gpu_from_others(requests: int) -> None:
    rig, tickets = at_work(gpus=3)
    for ticket in tickets[requests:]:
        rig.say("i1", m.Returned(request=ticket, body=b"{}", nbytes=2))
    assert replicas._room(rig.policy.picture, rig.policy.picture.instances["i1"].spec)
    rig.policy.picture.gpus = 1
    assert replicas._room(rig.policy.picture, rig.policy.picture.instances["i1"].spec) == (not requests)


def test_what_crosses_with_a_move_is_nobody_s() -> None:
    rig, tickets = at_work()
    rig.after(HALF_S)
    rig.load("i2")
    assert said(rig.say("i1", m.AnswerBegun(request=tickets[3])), e.Pass) == []
    assert said(rig.say("i1", m.Returned(request=tickets[3], body=b"{}", nbytes=2)), e.Answer) == []
    moved = rig.policy.picture.requests[4].ticket
    assert one(rig.say("i2", m.Returned(request=moved, body=b"{}", nbytes=2)), e.Answer).request == 4


@pytest.mark.parametrize("why", ["no other GPU", "one at most", "first tokens are there", "alone", "it still wakes"])
def test_no_other_instance_is_started_that_would_not_help(why: str) -> None:
    rig, tickets = at_work(gpus=1 if why == "no other GPU" else 2, max_instances=1 if why == "one at most" else 0)
    match why:
        case "first tokens are there":
            for ticket in tickets:
                rig.say("i1", m.AnswerBegun(request=ticket))
        case "alone":
            for ticket in tickets[:3]:
                rig.say("i1", m.Returned(request=ticket, body=b"{}", nbytes=2))
        case "it still wakes":
            rig.say("i1", m.LeaseEnded(serial=5, version=1))
            grant(rig, "i1")
    assert said(rig.after(HALF_S * 2), e.Start) == []


def test_an_extra_ends_when_it_has_had_nothing_to_do() -> None:
    rig, _ = at_work()
    rig.after(HALF_S)
    rig.load("i2")
    moved = [rig.policy.picture.requests[number].ticket for number in (3, 4)]
    rig.say("i2", m.Returned(request=moved[0], body=b"{}", nbytes=2))
    assert said(rig.after(EXTRA_IDLE_MS / 1000 + 1), m.Exit) == []  # one is open
    rig.say("i2", m.Returned(request=moved[1], body=b"{}", nbytes=2))
    assert said(rig.after(EXTRA_IDLE_MS / 1000 - 1), m.Exit) == []
    assert [action for action in rig.after(2.0) if isinstance(action, e.Send)] == [e.Send("i2", m.Exit())]


@pytest.mark.parametrize("dies", ["i1", "i2"])
def test_when_one_of_two_dies_the_other_takes_what_had_said_nothing(dies: str) -> None:
    rig, _ = at_work()
    rig.after(HALF_S)
    rig.load("i2")
    actions = rig.do(e.InstanceExited(dies, "was killed"))
    other = "i2" if dies == "i1" else "i1"
    assert {each.instance for each in said(actions, e.Handover)} == {other}
    assert said(actions, e.Fail) == []
    assert rig.policy.picture.functions["f"].instances[0] == other


def test_embeddings_are_for_models_that_make_them() -> None:
    fails_with(ask(model(), 1, "embeddings"), 1, "model_not_found", 404)
    rig = Rig(spec(embedding=m.EmbeddingSettings(), stateless=True))
    rig.load("i1")
    fails_with(ask(rig, 2, "chat"), 2, "model_not_found", 404)
    assert said(ask(rig, 3, "embeddings"), m.Acquire) != []  # as of an ordinary function


def test_a_mistake_of_who_asks_says_nothing_of_a_function() -> None:
    rig = Rig(spec(embedding=m.EmbeddingSettings(), stateless=True))
    rig.load("i1")
    for number in range(1, 12):
        answer = m.Raised(request=rig.run(number), code="invalid_value", text="no text", param="input")
        told = one(rig.say("i1", answer), e.Fail)
        assert (told.failure.status, told.failure.code, told.failure.param) == (400, "invalid_value", "input")
    assert rig.state("i1") is InstanceState.IDLE


def test_a_warning_of_who_has_loaded_it_reaches_who_deploys() -> None:
    rig = Rig()
    rig.do(e.DeployAsked(7, spec(llm=LLM)))
    rig.say("i1", m.Importing(confinement="none"))
    rig.say("i1", m.Loaded(version=1, nbytes=10, warning="no room\x1b[2J" + "x" * 2000))
    settled = one(rig.hear(m.Kept(name="f")), e.Settled)
    assert settled.warning == "no room[2J" + "x" * (1000 - 11)
    assert settled.failure is None


@pytest.mark.parametrize(
    ("tenant", "llm", "exposed", "refused"),
    [
        ("b", LLM, "set pages", True),
        ("b", LLM, "", False),
        ("b", None, "set pages", False),  # tenants that trust each other's functions
        ("a", LLM, "set pages", False),
    ],
)
@pytest.mark.parametrize("served", [True, False])
def test_models_of_two_tenants_are_refused_where_they_could_read_each_other(
    tenant: str, llm: m.LlmSettings | None, exposed: str, refused: bool, served: bool
) -> None:
    first = spec("mine", tenant="a", llm=LLM, stateless=True)
    rig = Rig(*([first] if served else []))
    rig.policy.picture.one_tenant = False
    rig.do(e.ForkingChanged(True, gpus=1, models_exposed=exposed))
    if not served:
        rig.do(e.DeployAsked(1, first))
    settled = said(rig.do(e.DeployAsked(2, spec("theirs", tenant=tenant, llm=llm))), e.Settled)
    assert [each.failure.code for each in settled] == ["tenant_refused"] * refused
    assert all("set pages" in each.failure.text and "mine" not in each.failure.text for each in settled)


ALONE = m.LlmSettings(isolation="function")


@pytest.mark.parametrize(
    ("name", "llm", "exposed", "refused"),
    [
        ("theirs", LLM, "set pages", False),
        ("theirs", ALONE, "set pages", True),
        ("theirs", ALONE, "", False),
        ("mine", ALONE, "set pages", False),  # it is the same function
    ],
)
@pytest.mark.parametrize("served", [LLM, ALONE])
def test_functions_in_isolation_are_trust_groups(
    name: str, llm: m.LlmSettings, exposed: str, refused: bool, served: m.LlmSettings
) -> None:
    rig = Rig(spec("mine", tenant="a", llm=served, stateless=True))
    rig.do(e.ForkingChanged(True, gpus=1, models_exposed=exposed))
    settled = said(rig.do(e.DeployAsked(2, spec(name, tenant="a", llm=llm))), e.Settled)
    refused = refused or (served is ALONE and name != "mine" and bool(exposed))
    assert [each.failure.code for each in settled] == ["tenant_refused"] * refused


def test_what_may_share_a_runtime() -> None:
    """Equal files, of one tenant, served in the same way: all else has another group, or none."""
    first = spec("a", llm=LLM, content="c")
    assert runtime_group(first) == runtime_group(spec("b", llm=LLM, content="c")) != ""
    slower = m.LlmSettings(ttft_ms=9000)
    assert runtime_group(first) == runtime_group(spec("b", llm=slower, content="c"))
    others = [
        spec("b", llm=LLM, content="d"),
        spec("b", llm=LLM, content="c", tenant="other"),
        spec("b", llm=m.LlmSettings(context=7), content="c"),
        spec("b", llm=m.LlmSettings(dtype="float32"), content="c"),
        spec("b", llm=m.LlmSettings(convert=True), content="c"),
    ]
    assert len({runtime_group(each) for each in (first, *others)}) == 6
    adapted = m.LlmSettings(ttft_ms=300, base="a", backbone="c")
    assert runtime_group(spec("b", llm=adapted, content="other files, too")) == runtime_group(first)
    none = [spec("b", llm=ALONE, content="c"), spec("b", content="c"), spec("b", llm=LLM)]
    assert [runtime_group(each) for each in none] == [""] * 3
