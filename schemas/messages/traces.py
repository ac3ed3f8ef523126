"""Messages to and from the process that exports traces."""

from dormouse.schemas.messages.shared import Message, WokenFrom


class TracedRequest(Message, frozen=True, kw_only=True):
    """A request that is over. ``trace`` is its traceparent, whose part it is; ``above`` the client's part, all "0" if
    there is none; ``began_ns`` when it came, of the Unix clock. ``spent_s``: its parts one after the other, as
    Server-Timing names them; ``copy_s`` of the "run", until its model had come from ``source``. ``status`` is 0 if its
    client has departed.
    """

    trace: str
    above: str
    state: str
    id: str
    function: str
    tenant: str
    outcome: str
    status: int
    began_ns: int
    spent_s: dict[str, float]
    copy_s: float | None
    source: WokenFrom


class TracedRequests(Message, frozen=True, kw_only=True, tag=1):
    """Router to traces: export these."""

    requests: list[TracedRequest]


class SpansSent(Message, frozen=True, kw_only=True, tag=1):
    """Counts of spans since the process began. ``dropped``: too many waited. ``trouble``: why the last ones were not
    taken; "" if they were.
    """

    exported: int
    failed: int
    dropped: int
    trouble: str


RouterToTraces = TracedRequests
TracesToRouter = SpansSent
