"""The exported record of a request that is over: pure."""

from dormouse.core.decisions.requests import events as e
from dormouse.router.front.stats import parts
from dormouse.router.front.streams import Outcome
from dormouse.router.front.tracing import Trace
from dormouse.schemas import messages as m


def traced(
    trace: Trace, request_id: str, function: str, tenant: str, outcome: Outcome, code: str, ended_ns: int
) -> m.TracedRequest:
    """``ended_ns`` is of the Unix clock, which is asked once: it may be set while a request runs."""
    status = 200 if isinstance(outcome, e.Answer) else outcome.failure.status if isinstance(outcome, e.Fail) else 0
    timing = outcome.timing
    spent_s = parts(timing)
    return m.TracedRequest(
        trace=trace.parent,
        above=trace.above,
        state=trace.state,
        id=request_id,
        function=function,
        tenant=tenant,
        outcome=code,
        status=status,
        began_ns=ended_ns - round(sum(spent_s.values()) * 1e9),
        spent_s=spent_s,
        copy_s=timing.copy_s,
        source=timing.source,
    )
