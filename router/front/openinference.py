"""The router's part of the Open Inference Protocol: routes, models and their tensors, the header of a request. Pure.

The content of a request or an answer is for the function's instance to interpret (client_shim/instance/inference.py).
"""

import re
import time
from collections.abc import AsyncIterator
from typing import Any, Final, Literal

import msgspec

from dormouse.core.decisions.requests import failures, queueing, splits
from dormouse.core.decisions.requests.state import RouterState, ServedFunction
from dormouse.core.names import base_of
from dormouse.core.version import package_version
from dormouse.router.access import tenancy
from dormouse.router.access.access import Caller
from dormouse.router.access.doorkeeper import Pairs
from dormouse.router.front import openapi
from dormouse.router.front.exchange import JSON, Exchange, HttpError, refuse, too_large
from dormouse.router.front.stats import NO_ERRORS, FunctionStats
from dormouse.schemas import messages as m
from dormouse.schemas.open_inference import ALL, ENCODINGS, InferenceKind, InferredKind

PLATFORM: Final = "dormouse_python"

QUESTION_NBYTES: Final = 64 << 10
"""Of a question about models."""

_SERVER: Final = {
    "name": "dormouse",
    "version": package_version(),
    "extensions": ["binary_tensor_data", "model_repository", "model_configuration", "statistics"],
}
ALIVE: Final = {"/v2": _SERVER, "/v2/": _SERVER, "/v2/health/live": {"live": True}}
"""Answers that are always the same, by path."""

_MODEL: Final = re.compile(r"/v2/models/(.+?)(?:/versions/([^/]+))?(?:/(ready|config|stats|infer))?")
_LENGTH: Final = re.compile(rb"[0-9]{1,18}")


class RepositoryMove(msgspec.Struct):
    """``tier`` among the parameters: where to."""

    parameters: dict[str, Any] = {}


class RepositoryQuestion(msgspec.Struct):
    """``ready``: only those that are."""

    ready: bool = False


_MOVE: Final = msgspec.json.Decoder(RepositoryMove)
_QUESTION: Final = msgspec.json.Decoder(RepositoryQuestion)


# --- a request


def check(x: Exchange, spec: m.FunctionSpec) -> None:
    """Checks that need no body. Raises HttpError."""
    _version(x.scope["path"], spec)
    if spec.llm is not None or spec.embedding is not None:
        route = "/v1/embeddings" if spec.llm is None else "/v1/chat/completions"
        raise refuse(400, "no_tensors", f"{spec.name!r} is a language model: call it at {route}", close=True)
    kind_of(x, spec, 0)


def kind_of(x: Exchange, spec: m.FunctionSpec, most_nbytes: int) -> str:
    """The part of the request's header that the instance needs. Raises HttpError."""
    length = x.header(b"inference-header-content-length")
    if length is not None and not _LENGTH.fullmatch(length):
        text = f"Inference-Header-Content-Length is {length[:40].decode('latin-1')!r}; send how many bytes of JSON"
        raise refuse(400, "bad_body", f"{text} come before the tensors", close=True)
    encoding = (x.header(b"content-encoding") or b"").decode("latin-1").strip().lower()
    if encoding not in ("", "identity", *ENCODINGS):
        raise refuse(400, "bad_body", f"Content-Encoding is {encoding[:40]!r}; send gzip or deflate", close=True)
    accept = (x.header(b"accept-encoding") or b"").decode("latin-1").strip().lower()
    return str(
        InferenceKind(
            model=base_of(spec.name),
            version=spec.version,
            header=ALL if length is None else int(length),
            most=most_nbytes,
            encoding=encoding if encoding in ENCODINGS else "",
            # Clients that send "gzip, deflate" of themselves, unasked: tensors hardly become smaller.
            accept=accept if accept in ENCODINGS else "",
        )
    )


def headers(kind: str) -> tuple[Pairs, bytes]:
    """Of an answer, and its content type."""
    said = InferredKind.of(kind) or InferredKind(ALL)
    encoding = ((b"content-encoding", said.encoding.encode()),) if said.encoding else ()
    if said.header == ALL:
        return encoding, JSON
    return (*encoding, (b"inference-header-content-length", b"%d" % said.header)), b"application/octet-stream"


def addressed(p: RouterState, path: str) -> str:
    """The function that this path names, or the version of it, if that is served."""
    found = _MODEL.fullmatch(path)
    assert found is not None, "the gate has found the route"
    version = f"{found[1]}@{found[2]}"
    return version if found[2] is not None and splits.named(p, version) in p.functions else found[1]


def _version(path: str, spec: m.FunctionSpec) -> None:
    found = _MODEL.fullmatch(path)
    wanted = None if found is None else found[2]
    if wanted not in (None, str(spec.version)):
        text = f"version {wanted!r} of {base_of(spec.name)!r} is not served, but {spec.version}; leave the version out"
        raise refuse(404, "unknown_version", text, close=True)


# --- models


def told(p: RouterState, caller: Caller, stats: dict[str, FunctionStats], path: str) -> dict[str, Any]:
    """Answers queries about models at this path. Raises HttpError."""
    if path == "/v2/models":
        return {"models": [name for name in _names(p, caller) if base_of(name) == name]}
    if path == "/v2/models/stats":
        return {"model_stats": [_stats(p.functions[name].spec, stats.get(name)) for name in _names(p, caller)]}
    found = _MODEL.fullmatch(path)
    assert found is not None, "the gate has found the route"
    name, what = splits.named(p, addressed(p, path)), found[3]
    if not tenancy.serves(caller, p, name):
        raise HttpError(queueing.absent(p, name))
    function = p.functions[name]
    spec = function.spec
    _version(path, spec)
    if what == "stats":
        return {"model_stats": [_stats(spec, stats.get(name))]}
    if (failure := _not_ready(p, function)) is not None:
        raise HttpError(failure)
    if what == "ready":
        return {"name": base_of(name), "ready": True}
    tensors = openapi.said_of(function).get("tensors", {"inputs": [], "outputs": []})
    if what == "config":
        return _config(spec, tensors)
    served = [str(version) for version in splits.shares(p, base_of(name))]
    return {"name": base_of(name), "versions": served, "platform": PLATFORM, **tensors}


def _names(p: RouterState, caller: Caller) -> list[str]:
    return [name for name in sorted(p.functions) if tenancy.serves(caller, p, name)]


def _not_ready(p: RouterState, function: ServedFunction) -> m.Failure | None:
    name = function.spec.name
    if function.quarantine:
        return failures.quarantined(name, function.quarantine)
    instance = p.instances.get(function.instance or "")
    if instance is not None and instance.state.serves:
        return None
    return failures.not_loaded(name, function.failure) if function.failure else failures.loading(name)


def index(p: RouterState, caller: Caller, question: bytes) -> list[dict[str, str]]:
    """All models. Raises HttpError."""
    try:
        asked = _QUESTION.decode(question) if question.strip() else RepositoryQuestion()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise refuse(400, "bad_body", f'the body is to be empty, or {{"ready": true}}: {error}') from None
    rows = []
    for name in _names(p, caller):
        function = p.functions[name]
        failure = _not_ready(p, function)
        if failure is None:
            state, reason = "READY", ""
        else:
            state = "LOADING" if failure.code == "starting" else "UNAVAILABLE"
            reason = failure.text
        if state == "READY" or not asked.ready:
            version = str(function.spec.version)
            rows.append({"name": base_of(name), "version": version, "state": state, "reason": reason})
    return rows


async def wished(x: Exchange) -> Literal["gpu", "host", "disk"]:
    """Where a model is to be. Raises HttpError."""
    loads = x.scope["path"].endswith("/load")
    said = b"".join([piece async for piece in _pieces(x)])
    try:
        parameters = _MOVE.decode(said).parameters if said.strip() else {}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise refuse(400, "bad_body", f'the body is to be empty, or {{"parameters": {{...}}}}: {error}') from None
    if found := [name for name in parameters if name == "config" or name.startswith("file:")]:
        raise refuse(400, "unsupported", f"{found[0][:100]!r} is not taken here: `dormouse deploy` changes a function")
    tier = parameters.get("tier", "gpu" if loads else "host")
    if loads and tier == "gpu":
        return "gpu"
    if not loads and tier in ("host", "disk"):
        return "host" if tier == "host" else "disk"
    takes = "'gpu'" if loads else "'host' or 'disk'"
    raise refuse(400, "invalid_value", f"tier is {str(tier)[:40]!r}; this takes {takes}")


async def _pieces(x: Exchange) -> AsyncIterator[bytes]:
    """Of a small body. Raises HttpError."""
    nbytes = 0
    while pieces := await x.read():
        nbytes += sum(map(len, pieces))
        if nbytes > QUESTION_NBYTES:
            raise too_large(QUESTION_NBYTES, "of such a question")
        yield b"".join(pieces)


def _config(spec: m.FunctionSpec, tensors: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """As Triton has configurations of models, as far as it means something here."""
    inputs, outputs = (
        [
            {"name": each["name"], "data_type": f"TYPE_{_type(each['datatype'])}", "dims": each["shape"]}
            for each in tensors[side]
        ]
        for side in ("inputs", "outputs")
    )
    return {
        "name": base_of(spec.name),
        "platform": PLATFORM,
        "backend": "dormouse",
        "max_batch_size": 0,  # a request's tensors have all of their dimensions
        "version_policy": {"latest": {"num_versions": 1}},
        "input": inputs,
        "output": outputs,
        "parameters": {"deadline_ms": {"string_value": str(spec.deadline_ms)}},
    }


def _type(datatype: str) -> str:
    return {"BYTES": "STRING", "": "INVALID"}.get(datatype, datatype)


def _stats(spec: m.FunctionSpec, stats: FunctionStats | None) -> dict[str, Any]:
    """As Triton counts: nanoseconds. Of a function that had the name before, nothing is reported."""
    if stats is None or stats.tenant != spec.tenant:
        stats = FunctionStats(spec.tenant)
    good = stats.outcomes["ok"]
    failed = sum(count for code, count in stats.outcomes.items() if code not in NO_ERRORS)
    spent = {stage: {"count": good, "ns": round(spent_s * 1e9)} for stage, spent_s in stats.spent_s.items()}
    queued = {"count": good, "ns": spent["queue"]["ns"] + spent["wait"]["ns"]}
    nothing = {"count": 0, "ns": 0}
    ago_s = time.monotonic() - stats.asked_s
    return {
        "name": base_of(spec.name),
        "version": str(spec.version),
        "last_inference": round((time.time() - ago_s) * 1000) if good else 0,
        "inference_count": good,
        "execution_count": good,
        "inference_stats": {
            "success": {"count": good, "ns": queued["ns"] + spent["run"]["ns"]},
            "fail": {"count": failed, "ns": 0},
            "queue": queued,
            "compute_input": nothing,
            "compute_infer": spent["run"],
            "compute_output": nothing,
            "cache_hit": nothing,
            "cache_miss": nothing,
        },
        "batch_stats": [],
    }
