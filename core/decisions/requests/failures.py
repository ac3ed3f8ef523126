"""Failures that the router itself returns, worded once; values, no I/O. Clients test ``code``."""

from typing import Final

from dormouse.core.errortext import outward
from dormouse.core.quantities import duration, size, sizes
from dormouse.schemas.messages import AnswerHead, Failure, FunctionSpec

_RAISED_STATUS: Final = {
    "function_raised": 500,
    "out_of_memory": 507,
    "limit_exceeded": 507,
    "bad_response": 500,
    "bad_json": 400,
    "bad_body": 400,
    "content_type": 415,
    "invalid_request": 422,
    "executor_lost": 503,
    "cancelled": 503,
    "model_damaged": 503,
    "wake_failed": 503,
    "seat_lost": 503,
    "model_refused": 500,
    "invalid_value": 400,
    "unsupported_parameter": 400,
    "context_length_exceeded": 400,
}

REFUSED: Final = "function_refused"
"""The function has answered with an error that is meant for its client."""

PUBLIC_CHARS: Final = 8000
"""Most characters of such an error."""

CLIENTS: Final = frozenset(code for code, status in _RAISED_STATUS.items() if status < 500) | {REFUSED}
"""Mistakes of the client, which do not count against the function."""


def unknown_function(name: str) -> Failure:
    return Failure(
        code="unknown_function",
        status=404,
        text=f"there is no function {name!r}; `dormouse ls` says which there are",
    )


def not_to_be_called(caller: str, name: str, named: tuple[str, ...]) -> Failure:
    """``named``: the functions that it may call."""
    said = f"only {', '.join(named)}" if named else "no function"
    text = f"function {caller!r} may call {said}: deploy it with --call {name[:100]}, or `call` in its dormouse.toml"
    return Failure(code="call_refused", status=403, text=text)


def calls_in_a_circle(way: list[str]) -> Failure:
    """``way``: from the caller over the called function back to the caller."""
    text = (
        f"calls go one way, and {' calls '.join(map(repr, way))}, so each could wait for the other: take one of these "
        "out of what its function may call (--call)"
    )
    return Failure(code="call_circle", status=409, text=text)


def too_deep(most: int) -> Failure:
    text = f"this request is the last of {most} calls below one another, which are the most; call with fewer between"
    return Failure(code="call_too_deep", status=409, text=text)


def too_many_calls(most: int) -> Failure:
    text = f"{most} calls of this instance have no answer yet, which are the most; wait for some of them"
    return Failure(code="too_many_calls", status=429, text=text, retryable=True)


def caller_over() -> Failure:
    text = "the request that calls is over, or its client has left: nobody waits for what is called"
    return Failure(code="cancelled", status=503, text=text)


def call_left() -> Failure:
    text = "nobody waits for this call any more: it was given up, or the request that calls is over"
    return Failure(code="cancelled", status=503, text=text)


def call_answer_too_large(limit_nbytes: int) -> Failure:
    text = f"the answer to a call may have at most {size(limit_nbytes)}; let the function answer with less"
    return Failure(code="answer_too_large", status=413, text=text)


def starting() -> Failure:
    text = "the node is starting and has not read its catalogue yet; send it again in a second"
    return Failure(code="starting", status=503, text=text, retryable=True)


def sandboxes_restart() -> Failure:
    text = (
        "the process that starts instances has died, and this one with it; a new one is starting: send the request "
        "again if the function has no outside effects"
    )
    return Failure(code="starting", status=503, text=text, retryable=True)


def no_sandbox_yet(timeout_ms: int) -> Failure:
    text = (
        f"the node has not been able to start instances for {duration(timeout_ms)}, the function's time limit; nothing "
        "was run; send it again later"
    )
    return Failure(code="starting", status=503, text=text, retryable=True)


def stopping(begun: bool = False) -> Failure:
    """``begun``: its function had the request already."""
    when = "in the middle of this request" if begun else "or started anew"
    text = f"the node is being stopped {when}; send it again if the function has no outside effects"
    return Failure(code="starting", status=503, text=text, retryable=True)


def internal() -> Failure:
    text = "the node failed on this request, which is a mistake of its own: its router's log says how"
    return Failure(code="internal_error", status=500, text=text)


def queue_full(what: str, limit: int, over_share: str = "") -> Failure:
    """``over_share``: the tenant that is, if it is."""
    text = f"{limit} requests are waiting for {what} already{_share(over_share)}; send it again later"
    return Failure(code="queue_full", status=429, text=text, retryable=True)


def waited_too_long(timeout_ms: int, over_share: str = "") -> Failure:
    text = (
        f"no GPU or instance was free within {duration(timeout_ms)}, the function's time limit{_share(over_share)}; "
        "nothing was run; retry later"
    )
    return Failure(code="timed_out", status=504, text=text, retryable=True)


def all_drained(timeout_ms: int) -> Failure:
    text = (
        f"all GPUs of this node are drained, and none served within {duration(timeout_ms)}, the function's time limit; "
        "nothing was run; retry later, or `dormouse gpu undrain N`"
    )
    return Failure(code="timed_out", status=504, text=text, retryable=True)


def _share(tenant: str) -> str:
    return f", because tenant {tenant!r} is over its share of the GPUs' time and others wait" if tenant else ""


def ran_too_long(timeout_ms: int) -> Failure:
    text = f"the function did not answer within its time limit of {duration(timeout_ms)}; its instance was replaced"
    return Failure(code="timed_out", status=504, text=text)


def gave_up(timeout_ms: int) -> Failure:
    text = f"the function did not answer within its time limit of {duration(timeout_ms)}; it was given up"
    return Failure(code="timed_out", status=504, text=text)


def no_token(timeout_ms: int) -> Failure:
    text = f"no token of the answer came within the model's time limit of {duration(timeout_ms)}; it was given up"
    return Failure(code="timed_out", status=504, text=text)


def sandbox_died(how: str) -> Failure:
    text = f"the function's instance {how} in the middle of the request; a new one is loading; see `dormouse logs`"
    return Failure(code="sandbox_died", status=502, text=text, retryable=True)


def limit_exceeded(limit: str) -> Failure:
    """``limit`` as `SandboxSection.limit` words it."""
    text = f"the function's instance met its {limit} and was ended; a new one is loading; see `dormouse logs`"
    return Failure(code="limit_exceeded", status=507, text=text)


def violation(text: str) -> Failure:
    return Failure(
        code="violation", status=502, text=f"the function's instance broke the protocol and was replaced: {text}"
    )


def executor_lost() -> Failure:
    text = "the GPU's process died in the middle of the request; send it again if the function has no outside effects"
    return Failure(code="executor_lost", status=503, text=text, retryable=True)


def check_failed(text: str) -> Failure:
    return Failure(code="check_failed", status=422, text=text)


def load_failed(text: str) -> Failure:
    return Failure(code="load_failed", status=422, text=text)


def model_too_large(nbytes: int, gpu_nbytes: int) -> Failure:
    has, gpu_has = sizes(nbytes, gpu_nbytes)
    text = (
        f"the model has {has} and a GPU of this node {gpu_has}; use a GPU with more memory "
        "([gpu] memory for emulated ones) or a smaller model"
    )
    return Failure(code="model_too_large", status=507, text=text)


def load_timed_out(timeout_ms: int, longest_ms: int | None = None) -> Failure:
    """``longest_ms``: it went on, but for so long."""
    if longest_ms is None:
        what = f"printed or brought nothing to the node for its time limit of {duration(timeout_ms)}"
    else:
        what = (
            f"did not end within {duration(longest_ms)}, the most that its time limit of {duration(timeout_ms)} and "
            "the node's limits.load_timeout_ms allow"
        )
    text = f"load() {what}; deploy with a longer --load-timeout, or see `dormouse logs` for what it waited for"
    return Failure(code="load_timeout", status=422, text=text)


def not_loaded(name: str, cause: Failure) -> Failure:
    text = f"function {name!r} cannot be loaded at the moment; deploy a version that loads. Cause: "
    short, whole = text + outward(cause.text), text + cause.text
    return Failure(code=cause.code, status=503, text=short, retryable=True, whole=whole if whole != short else "")


def loading(name: str) -> Failure:
    text = f"function {name!r} is being loaded; ask again in a second"
    return Failure(code="starting", status=503, text=text, retryable=True)


def quarantined(name: str, why: str) -> Failure:
    text = (
        f"function {name!r} is in quarantine: {why}. Deploy a version that does not, or let it try again with "
        f"`dormouse restart {name}`"
    )
    return Failure(code="quarantined", status=503, text=text)


def deploy_quarantined(text: str) -> Failure:
    return load_failed(f"load() ended the GPU's process more than once; the last time, {text}")


def not_removed(text: str) -> Failure:
    """``text``: the reason why the catalogue still has the function."""
    return Failure(code="not_removed", status=507, text=f"the function was not removed: {text}", retryable=True)


def raised(name: str, code: str, text: str, param: str = "") -> Failure:
    """An error that an instance of this function reported for its own request; an unknown code is not passed on."""
    if code not in _RAISED_STATUS:
        code = "function_raised"
    if code == "invalid_request":
        text += f"; GET /functions/{name}/schema says what it takes, and so does `dormouse invoke {name} --schema`"
    status, short = _RAISED_STATUS[code], outward(text)
    whole = text if text != short else ""
    return Failure(code=code, status=status, text=short, retryable=status == 503, param=param[:100], whole=whole)


def refused(text: str, head: AnswerHead) -> Failure:
    """The function's own error, for the client."""
    said = text[:PUBLIC_CHARS]
    return Failure(code=REFUSED, status=head.status, text=said, own=head.code, headers=head.headers)


_LLM_STATUS: Final = {
    "invalid_value": 400,
    "unsupported_parameter": 400,
    "unknown_parameter": 400,
    "context_length_exceeded": 400,
    "out_of_memory": 507,
    "model_refused": 500,
    "internal_error": 500,
    "bad_response": 500,
    "executor_lost": 503,
    "cancelled": 503,
}


def of_language_model(code: str, text: str, param: str) -> Failure:
    """An error that a language model's instance reported for a request; an unknown code is not passed on."""
    status = _LLM_STATUS.get(code, 503)
    known = code if code in _LLM_STATUS else "not_served"
    return Failure(code=known, status=status, text=text, retryable=status == 503, param=param[:100])


def wrong_route(spec: FunctionSpec) -> Failure:
    """For a function that does not serve the requested OpenAI route."""
    if spec.embedding is not None:
        text = f"{spec.name!r} makes embeddings: call it at /v1/embeddings"
    elif spec.llm is not None:
        text = f"{spec.name!r} makes text, not embeddings: deploy its model with --embedding under another name"
    else:
        text = f"{spec.name!r} is a function and no language model: call it at /functions/{spec.name}/invoke"
    return Failure(code="model_not_found", status=404, text=text, param="model")


def tenant_refused(tenant: str, other: str) -> Failure:
    text = (
        f"this node serves tenant {other!r}, and kernels of all its functions share the memory of its GPUs' processes: "
        f"deploy for {tenant!r} on another node, remove the functions of {other!r} first, or set "
        f'[node] tenants = "many" if the two trust each other'
    )
    return Failure(code="tenant_refused", status=403, text=text)


def model_exposed(why: str, isolation: str) -> Failure:
    """In words that name no other tenant."""
    whose = "another tenant" if isolation == "tenant" else "another function"
    text = f"this node has a language model of {whose} already, and cannot keep models apart: {why}"
    return Failure(code="tenant_refused", status=403, text=text)


def has_adapters(name: str, adapters: list[str], what: str) -> Failure:
    more = f" and {len(adapters) - 10} more" if len(adapters) > 10 else ""
    text = (
        f"{name!r} is the base of {', '.join(adapters[:10])}{more}, and cannot {what} before them; remove these first: "
        f"dormouse rm {' '.join(adapters[:10])}"
    )
    return Failure(code="has_adapters", status=409, text=text)


def base_changed(name: str) -> Failure:
    text = f"{name!r}, the adapter's base, was deployed anew or removed meanwhile; deploy again when that has ended"
    return Failure(code="base_changed", status=409, text=text)


def deploy_ended(name: str) -> Failure:
    text = f"function {name!r} was removed while this version was loading, so the deploy was ended; deploy it again"
    return Failure(code="deploy_ended", status=409, text=text)


def load_restarted(name: str) -> Failure:
    text = f"function {name!r} was restarted too often while this version was loading; deploy it again"
    return Failure(code="deploy_ended", status=409, text=text)


def busy_changing(name: str) -> Failure:
    text = (
        f"function {name!r} is being deployed or removed already; wait until that has ended "
        f"(`dormouse rm {name}` ends a deploy)"
    )
    return Failure(code="change_in_progress", status=409, text=text, retryable=True)
