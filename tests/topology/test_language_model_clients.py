"""What clients of a language model may do to a real node: many at once, slow, gone, half gone, with odd numbers. Beside
each, others are answered right.
"""

import asyncio
import contextlib
import json
import os
import random
import select
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import openai
import pytest
from language_models import make_folder, tokenizer
from llm_node import CONFIG, GREEDY, ask, deploy, generated, model, prompt_tokens, sandboxed
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from benchmarks.nodes.testnode import TestNode, running_node

__all__ = ["model"]

BRIEF: Final = "[limits]\nbody_ms = 3000\nheader_ms = 3000\n"
WORD: Final = "dormouse" * 500
LONG: Final[Any] = {
    "max_tokens": 1000,
    "n": 4,
    "temperature": 1.0,
    "seed": 5,
    "logit_bias": {"259": 9.0},
    "stream": True,
    "model": "wordy",
}
"""A stream that no socket's buffers hold."""


def wordy_folder(folder: Path) -> PreTrainedModel:
    """One of this model's tokens is a long word."""
    found = make_folder(folder)
    words: Any = tokenizer()
    words.add_tokens([WORD])
    words.save_pretrained(str(folder))
    return found


@pytest.fixture(scope="module")
def node() -> Iterator[TestNode]:
    with running_node(CONFIG + BRIEF) as running:
        yield running


def url(node: TestNode) -> str:
    return f"http://127.0.0.1:{node.port}/v1"


@pytest.fixture
def client(node: TestNode) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url(node), api_key="none", max_retries=0) as found:
        yield found


def body_of(text: str = "one two three", **more: Any) -> bytes:
    messages = [{"role": "user", "content": text}]
    body = {"model": "chat", "messages": messages, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **more}
    return json.dumps(body).encode()


def post(body: bytes, headers: bytes = b"", path: bytes = b"/v1/chat/completions") -> bytes:
    length = b"Content-Length: %d\r\n" % len(body)
    return b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n%b%b\r\n%b" % (
        path,
        length,
        headers,
        body,
    )


def connect(node: TestNode, receive_nbytes: int = 0) -> socket.socket:
    sock = socket.socket()
    sock.settimeout(120)
    if receive_nbytes:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_nbytes)
    sock.connect(("127.0.0.1", node.port))
    return sock


def until_closed(sock: socket.socket) -> bytes:
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := sock.recv(1 << 20):
            parts.append(part)
    return b"".join(parts)


def dechunked(data: bytes) -> bytes:
    """The body of a chunked answer, which must be whole."""
    parts: list[bytes] = []
    at = 0
    while True:
        start = data.index(b"\r\n", at)
        nbytes = int(data[at:start], 16)
        if not nbytes:
            return b"".join(parts)
        parts.append(data[start + 2 : start + 2 + nbytes])
        at = start + 4 + nbytes


def texts_of(body: bytes) -> dict[int, str]:
    """What a stream has said, by choice."""
    said: dict[int, str] = {}
    for line in body.split(b"\n\n"):
        if line.startswith(b"data: {"):
            for choice in json.loads(line.removeprefix(b"data: "))["choices"]:
                said[choice["index"]] = said.get(choice["index"], "") + (choice["delta"].get("content") or "")
    return said


def signal_all(pids: set[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def rss_nbytes(pid: int) -> int:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) << 10


def seats(node: TestNode) -> list[str]:
    found: list[str] = node.status()["gpus"]["0"]["seats"]
    return found


def nothing_runs(node: TestNode) -> bool:
    loads = node.status()["functions"]["chat"]["runtimes"]
    return not any(load["running"] or load["waiting"] or load["kv_blocks_used"] for load in loads)


def made_tokens(node: TestNode, name: str) -> int:
    """By a function, ever. It only grows, so nothing is missed that was between two looks."""
    rows = {row["function"]: row for row in node.admin.usage(0.0, name)["functions"]}
    return int(rows[name]["made_tokens"])


def running(node: TestNode, name: str) -> int:
    """Sequences of a function."""
    return sum(int(load["running"]) for load in node.status()["functions"][name]["runtimes"])


def runtime_of(node: TestNode, name: str) -> int:
    """The process that computes for a function."""
    [load] = node.status()["functions"][name]["runtimes"]
    return int(load["pid"])


def quiet(node: TestNode) -> None:
    """Nobody is answered any more."""
    node.wait(lambda: node.status()["node"]["requests_open"] == 0, 60, "all requests to be over")


# --- clients that do not read


def test_a_client_that_stops_reading_pauses_its_stream(tmp_path: Path) -> None:
    """What waits for it is bounded everywhere, the GPU is left to others, and reading on gives the rest, as it would
    have been.
    """
    with running_node(CONFIG + "[limits]\nbody_ms = 100000\n") as slow:
        before = sandboxed(slow)
        found = wordy_folder(tmp_path)
        deploy(slow, "wordy", tmp_path)
        instance = max(sandboxed(slow) - before, key=rss_nbytes)
        request = post(body_of(**LONG), b"Connection: close\r\n")
        with connect(slow) as sock:
            sock.sendall(request)
            whole = dechunked(until_closed(sock).partition(b"\r\n\r\n")[2])
        assert len(whole) > 8 << 20
        router = slow.pids()["router"]
        memory = rss_nbytes(router), rss_nbytes(instance)
        with connect(slow, 4096) as sock:
            sock.sendall(request)
            data = sock.recv(1000)
            slow.wait(lambda: seats(slow) == [], 60, "the seat to be left, because the stream pauses")
            assert slow.status()["node"]["requests_open"] == 1
            assert rss_nbytes(router) - memory[0] < 2 << 20
            assert rss_nbytes(instance) - memory[1] < 2 << 20
            with openai.OpenAI(base_url=url(slow), api_key="none", max_retries=0) as client:
                assert ask(client, name="wordy") == generated(found, prompt_tokens(), 40)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
            data += until_closed(sock)
        body = dechunked(data.partition(b"\r\n\r\n")[2])
        assert texts_of(body) == texts_of(whole)
        assert len(set(texts_of(body).values())) == 4
        assert body.endswith(b"data: [DONE]\n\n")


def test_a_client_that_reads_nothing_is_cut_off(node: TestNode, tmp_path: Path) -> None:
    """After `limits.body_ms`."""
    wordy_folder(tmp_path)
    deploy(node, "wordy", tmp_path)
    with connect(node, 4096) as sock:
        sock.sendall(post(body_of(**LONG)))
        assert sock.recv(15) == b"HTTP/1.1 200 OK"
        quiet(node)
        assert b"[DONE]" not in until_closed(sock)
    node.remove("wordy")


def test_a_whole_answer_that_is_too_long_is_given_up_early(
    node: TestNode, model: PreTrainedModel, client: openai.OpenAI
) -> None:
    with pytest.raises(openai.InternalServerError, match="ask for it with stream") as raised:
        ask(client, new=1900, n=16, logprobs=True, top_logprobs=20)
    assert raised.value.code == "bad_response"
    assert ask(client) == generated(model, prompt_tokens(), 40)


def test_500_streams_at_once(node: TestNode, model: PreTrainedModel, client: openai.OpenAI, tmp_path: Path) -> None:
    """256 are at the instance, 40 in the queue; all others are told to come back. While the instance is stopped, none
    is through before all have come.
    """
    crowd = make_folder(tmp_path, seed=21)
    others = sandboxed(node)
    deploy(node, "crowd", tmp_path, max_queue=40, timeout="110s")  # the client's, who may be slow to come
    expected = [generated(crowd, prompt_tokens(_say(number)), 4) for number in range(10)]
    ask(client, name="crowd")
    quiet(node)
    router, instance = node.pids()["router"], sandboxed(node) - others
    before = len(os.listdir(f"/proc/{router}/fd")), rss_nbytes(router)

    async def talk(asker: openai.AsyncOpenAI, number: int, refused: list[openai.RateLimitError]) -> tuple[int, str]:
        try:
            stream: Any = await asker.chat.completions.create(
                model="crowd", messages=_say(number), max_tokens=4, stream=True, **GREEDY
            )
            return number, "".join([part.choices[0].delta.content or "" async for part in stream])
        except openai.RateLimitError as error:
            refused.append(error)
            if len(refused) == 500 - 296:
                signal_all(instance, signal.SIGCONT)
            raise

    async def crowded() -> tuple[dict[int, str], list[openai.RateLimitError]]:
        refused: list[openai.RateLimitError] = []
        # Five seconds to connect are the client's own limit, which 500 at once may need on a busy machine.
        async with openai.AsyncOpenAI(base_url=url(node), api_key="none", max_retries=0, timeout=110) as asker:
            found = await asyncio.gather(
                *(talk(asker, number, refused) for number in range(500)), return_exceptions=True
            )
        assert all(isinstance(each, tuple | openai.RateLimitError) for each in found), found
        return dict(each for each in found if isinstance(each, tuple)), refused

    signal_all(instance, signal.SIGSTOP)
    try:
        answers, refused = asyncio.run(asyncio.wait_for(crowded(), 120))
    finally:
        signal_all(instance, signal.SIGCONT)
    assert (len(answers), len(refused)) == (296, 204)
    assert answers == {number: expected[number % 10] for number in answers}
    assert {error.code for error in refused} == {"queue_full"}
    assert all(int(error.response.headers["retry-after"]) > 0 for error in refused)
    quiet(node)
    node.wait(lambda: len(os.listdir(f"/proc/{router}/fd")) <= before[0], 60, "the connections to be closed")
    assert rss_nbytes(router) - before[1] < 32 << 20
    assert ask(client, "number 7", 4, "crowd") == expected[7]
    node.remove("crowd")


def test_an_instance_that_reads_nothing_for_a_while_is_not_ended(
    node: TestNode, model: PreTrainedModel, client: openai.OpenAI, tmp_path: Path
) -> None:
    """The rest of the tokens is made while it stands still: more messages wait than a socket's buffers hold. The answer
    is no stream: a client that is behind for a moment would pause one.
    """
    make_folder(tmp_path, seed=22)
    others = sandboxed(node)
    deploy(node, "still", tmp_path, timeout="250s")
    instance = sandboxed(node) - others
    expected = ask(client, "on and on", 1200, "still")
    with connect(node) as sock:
        sock.sendall(post(body_of("on and on", model="still", max_tokens=1200, n=8), b"Connection: close\r\n"))
        node.wait(lambda: running(node, "still") == 8, 60, "all choices to run")  # all that is to be computed is said
        signal_all(instance, signal.SIGSTOP)
        try:
            node.wait(lambda: made_tokens(node, "still") == 9 * 1200, 120, "all tokens")
            assert not select.select([sock], [], [], 0)[0], "it has answered before it stood still"
        finally:
            signal_all(instance, signal.SIGCONT)
        answer = json.loads(until_closed(sock).partition(b"\r\n\r\n")[2])
    assert [choice["message"]["content"] for choice in answer["choices"]] == [expected] * 8
    assert node.log_of("still").count(" starts, ") == 1, "its instance was replaced"
    node.remove("still")


def _say(number: int) -> Any:
    return [{"role": "user", "content": f"number {number % 10}"}]


# --- clients that leave


def test_fifty_clients_that_leave_at_any_moment(node: TestNode, model: PreTrainedModel) -> None:
    """Before the answer begins, in its first part, later, or in the middle of their own request."""
    chance = random.Random(14)
    expected = generated(model, prompt_tokens(), 40)

    def leaves(number: int) -> None:
        request = post(body_of(f"I shall leave {number}", max_tokens=1000, stream=bool(number % 5)))
        with connect(node) as sock:
            sock.sendall(request[: chance.randrange(1, len(request))] if number % 10 == 9 else request)
            for _ in range(chance.randrange(4) if number % 5 else 0):
                sock.recv(4096)

    threads = [threading.Thread(target=leaves, args=(number,)) for number in range(50)]
    for thread in threads:
        thread.start()
    with openai.OpenAI(base_url=url(node), api_key="none", max_retries=0) as client:
        assert ask(client) == expected
        for thread in threads:
            thread.join()
        quiet(node)
        node.wait(lambda: nothing_runs(node), 60, "nothing to run, and all KV to be free")
        assert ask(client) == expected


def test_half_a_connection_counts_as_a_client_that_left(node: TestNode, model: PreTrainedModel) -> None:
    with connect(node) as sock:
        sock.sendall(post(body_of(max_tokens=1500, stream=True)))
        assert sock.recv(15) == b"HTTP/1.1 200 OK"
        sock.shutdown(socket.SHUT_WR)
        assert b"[DONE]" not in until_closed(sock)
    quiet(node)


# --- requests that are odd


def test_a_body_that_is_too_large_is_not_read(node: TestNode, model: PreTrainedModel, client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as raised:
        ask(client, "x" * (800 << 10))
    assert (raised.value.status_code, raised.value.code) == (413, "body_too_large")
    with connect(node) as sock:
        sock.sendall(post(b"").replace(b"Length: 0", b"Length: 9000000000"))
        assert until_closed(sock).startswith(b"HTTP/1.1 413 ")
    assert ask(client, new=4) == generated(model, prompt_tokens(), 4)


def test_a_body_that_comes_too_slowly_is_given_up(node: TestNode, model: PreTrainedModel) -> None:
    slow = [connect(node) for _ in range(20)]
    for sock in slow:
        sock.sendall(post(body_of())[:-1])
    for sock in slow:
        with sock:
            data = until_closed(sock)
        assert data.startswith(b"HTTP/1.1 408 ")
        assert json.loads(data.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"


def test_requests_in_a_row_are_answered_in_order(node: TestNode, model: PreTrainedModel) -> None:
    """A stream, then whole answers, all sent at once on one connection."""
    with connect(node) as sock:
        sock.sendall(
            post(body_of("first", stream=True))
            + post(body_of("second"))
            + post(b"{", b"")
            + post(body_of("third"), b"Connection: close\r\n")
        )
        data = until_closed(sock)
    heads = [part.split(b"\r\n", 1)[0] for part in data.split(b"HTTP/1.1 ")[1:]]
    assert heads == [b"200 OK", b"200 OK", b"400 Bad Request", b"200 OK"]
    for name in ("second", "third"):
        expected = generated(model, prompt_tokens([{"role": "user", "content": name}]), 8)
        assert json.dumps(expected, ensure_ascii=False).encode() in data
    assert data.index(b"[DONE]") < data.index(b'chat.completion"')


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {"²": 1.0}),
        ("logit_bias", {"9" * 30: 1.0}),
        ("logit_bias", {"5": 1e300}),
        ("logit_bias", {"900000": 1.0}),
        ("stop_token_ids", [900_000]),
        ("logit_bias", {str(number): 1.0 for number in range(20_000)}),
        ("stop_token_ids", [1 << 70]),
        ("stop_token_ids", [-(1 << 63)]),
        ("stop_token_ids", list(range(30_000))),
        ("stop", ["x"] * 17),
        ("stop", "x" * 100_000),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_completion_tokens", 0),
        ("max_completion_tokens", -5),
        ("n", 0),
        ("temperature", "hot"),
        ("top_logprobs", -1),
        ("seed", "s"),
    ],
)
def test_odd_numbers_are_refused_by_name(
    node: TestNode, model: PreTrainedModel, client: openai.OpenAI, field: str, value: Any
) -> None:
    messages: Any = [{"role": "user", "content": "odd"}]
    extra = {field: value} | ({"logprobs": True} if field == "top_logprobs" else {})
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model="chat", messages=messages, extra_body=extra)
    assert raised.value.param == field
    assert node.log_of("chat").count(" starts, ") == 1, "its instance was replaced"


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b'{"model": "chat"}', b'{"model": 1}', b"\xff\xfe", b"[" * 9999])
def test_bodies_that_are_no_request(node: TestNode, model: PreTrainedModel, body: bytes) -> None:
    answer = node.http("POST", "/v1/chat/completions", raw=body)
    assert (answer.status, answer.code) == (400, "invalid_value")
    assert answer.body["error"]["type"] == "invalid_request_error"


def test_halves_of_characters_are_refused(node: TestNode, model: PreTrainedModel) -> None:
    body = b'{"model": "chat", "messages": [{"role": "user", "content": "\\ud800"}]}'
    answer = node.http("POST", "/v1/chat/completions", raw=body)
    assert (answer.status, answer.code) == (400, "invalid_value")


def test_errors_of_invoke_are_those_of_every_function(node: TestNode, model: PreTrainedModel) -> None:
    for body, code in (({"messages": "no"}, "invalid_value"), ({"prompt": "a", "tools": [1]}, "unknown_parameter")):
        answer = node.invoke("chat", body)
        assert (answer.status, answer.code) == (400, code)
        assert answer.body["error"]["request_id"] == answer.headers["x-request-id"]
    stream = node.invoke("chat", {"prompt": "abc", "max_tokens": 3, "temperature": 0, "stream": True})
    assert (stream.status, stream.headers["content-type"]) == (200, "text/event-stream")
    assert stream.body.endswith("data: [DONE]\n\n")


# --- streams that end too early


def _broken(node: TestNode, breaks: Any, name: str = "chat") -> dict[str, Any]:
    """The error with which a stream ends after ``breaks()``."""
    with connect(node) as sock:
        sock.sendall(post(body_of("be broken", model=name, max_tokens=1900, stream=True), b"Connection: close\r\n"))
        data = sock.recv(4096)
        assert data.startswith(b"HTTP/1.1 200 OK")
        breaks()
        data += until_closed(sock)
    body = dechunked(data.partition(b"\r\n\r\n")[2])
    assert b"[DONE]" not in body
    *_, last, end = body.split(b"\n\n")
    assert end == b""
    assert last.startswith(b"event: error\ndata: ")
    error: dict[str, Any] = json.loads(last.partition(b"data: ")[2])["error"]
    return error


def test_a_stream_whose_instance_dies_ends_with_an_error(node: TestNode, client: openai.OpenAI, tmp_path: Path) -> None:
    short = make_folder(tmp_path, seed=25)
    others = sandboxed(node)
    deploy(node, "short", tmp_path)
    instance = sandboxed(node) - others
    assert _broken(node, lambda: signal_all(instance, signal.SIGKILL), "short")["code"] == "sandbox_died"
    assert ask(client, new=4, name="short") == generated(short, prompt_tokens(), 4)
    node.remove("short")


def test_a_stream_that_stands_still_ends_with_an_error(
    node: TestNode, model: PreTrainedModel, client: openai.OpenAI, tmp_path: Path
) -> None:
    """Its runtime stops for longer than the time limit; others' requests, afterwards, are well."""
    ask(client, new=1)  # a node's first runtime takes longer than that to come
    slow = make_folder(tmp_path, seed=26)
    deploy(node, "slow", tmp_path, timeout="2s")
    ask(client, new=2, name="slow")
    pid = runtime_of(node, "slow")
    try:
        error = _broken(node, lambda: os.kill(pid, signal.SIGSTOP), "slow")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert error["code"] == "timed_out"
    assert "replaced" not in error["message"]
    assert ask(client, new=4, name="slow") == generated(slow, prompt_tokens(), 4)
    node.remove("slow")


def test_logits_that_are_no_numbers_end_their_own_answer_only(
    node: TestNode, client: openai.OpenAI, tmp_path: Path
) -> None:
    """The model has one letter that it cannot bear."""
    good = make_folder(tmp_path, seed=23)
    weights = load_file(tmp_path / "model.safetensors")
    words: Any = tokenizer()
    [letter] = words.encode("Z", add_special_tokens=False)
    weights["model.embed_tokens.weight"][letter] = float("nan")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    deploy(node, "touchy", tmp_path)
    expected = generated(good, prompt_tokens(), 150)
    stream = client.chat.completions.create(
        model="touchy", messages=[{"role": "user", "content": "one two three"}], max_tokens=150, stream=True, **GREEDY
    )
    said = next(stream).choices[0].delta.content or ""
    for _ in range(2):
        with pytest.raises(openai.InternalServerError, match="NaN or infinity") as raised:
            ask(client, "a Z in it", name="touchy")
        assert raised.value.code == "model_refused"
    said += "".join(part.choices[0].delta.content or "" for part in stream if part.choices)
    assert said == expected
    assert ask(client, new=5, name="touchy") == generated(good, prompt_tokens(), 5)
    node.remove("touchy")


# --- memory that does not suffice


def test_kv_that_can_never_fit_is_an_error_and_the_next_is_well(tmp_path: Path) -> None:
    """The pool has room for some hundred tokens, the context is 2,048."""
    wide = make_folder(tmp_path, seed=24, num_key_value_heads=4, head_dim=64)
    with running_node(CONFIG.replace("64MiB", "8MiB") + BRIEF) as small:
        deploy(small, "wide", tmp_path)
        with openai.OpenAI(base_url=url(small), api_key="none", max_retries=0) as client:
            for _ in range(2):
                with pytest.raises(openai.InternalServerError, match="memory of a GPU") as raised:
                    ask(client, "x" * 1800, name="wide")
                assert (raised.value.status_code, raised.value.code) == (507, "out_of_memory")
                assert ask(client, new=6, name="wide") == generated(wide, prompt_tokens(), 6)
            stream = client.chat.completions.create(
                model="wide",
                messages=[{"role": "user", "content": "x" * 100}],
                max_tokens=1800,
                stream=True,
                **GREEDY,
            )
            with pytest.raises(openai.APIError) as broken:
                for _ in stream:
                    pass
            assert broken.value.code == "out_of_memory"
            assert ask(client, new=6, name="wide") == generated(wide, prompt_tokens(), 6)


def test_a_chat_as_a_job_and_one_that_is_sent_again(node: TestNode, model: PreTrainedModel) -> None:
    def said(body: Any, **headers: str) -> Any:
        return node.http("POST", "/v1/chat/completions", raw=body, headers=headers)

    plain = said(body_of()).body["choices"][0]["message"]
    job = said(body_of(), Prefer="respond-async")
    assert (job.status, job.body["function"]) == (202, "chat")
    told = node.http("GET", job.headers["location"], headers={"Prefer": "wait=60"}).body
    assert told["state"] == "succeeded"
    answer = node.http("GET", told["result"])
    assert answer.body["choices"][0]["message"] == plain
    assert "prefill;dur=" in answer.headers["server-timing"]
    first, second = (said(body_of(), **{"Idempotency-Key": "chat-1"}) for _ in range(2))
    assert first.body == second.body, "ids and times too: it was made once"
    assert second.headers["idempotency-replayed"] == "true"
    streamed = said(body_of(stream=True), Prefer="respond-async")
    told = node.http("GET", streamed.headers["location"], headers={"Prefer": "wait=60"}).body
    whole = node.http("GET", told["result"])
    assert whole.headers["content-type"] == "text/event-stream"
    events = [line.removeprefix("data: ") for line in whole.body.splitlines() if line]
    assert events[-1] == "[DONE]"
    made = "".join(json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events[:-1])
    assert made == plain["content"]
    wrong = said(b'{"model": "nobody"}', Prefer="respond-async")
    assert (wrong.status, wrong.code) == (404, "model_not_found")
