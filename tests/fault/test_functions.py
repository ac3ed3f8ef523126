"""What users' code does wrong: a clear error for its caller, nothing for anybody else."""

import http.client
import json
import socket
import threading

import needs
import pytest

from benchmarks.nodes.testnode import HttpAnswer, TestNode, running_node
from dormouse.core.logrecords import LogLine, having, lines_of

GOOD = """
    import torch

    def load():
        torch.manual_seed(0)
        return torch.nn.Linear(64, 64).to("cuda")

    def handle(model, request):
        x = torch.full((1, 64), float(request["x"]), device="cuda")
        return {"sum": model(x).sum().item()}
"""


@pytest.fixture(scope="module", autouse=True)
def good(node: TestNode) -> None:
    node.deployed("good", GOOD)


def still_good(node: TestNode) -> None:
    assert isinstance(node.result("good", {"x": 2})["sum"], float)


@pytest.mark.parametrize(
    ("name", "source", "words"),
    [
        ("syntax", "def load(:\n    pass\n", ["SyntaxError", "line 1"]),
        ("nohandle", "def load():\n    return 1\n", ["handle"]),
        ("notcallable", "load = 3\ndef handle(state, request):\n    return 1\n", ["load"]),
        (
            "raises",
            "def load():\n    return {}['missing']\ndef handle(s, r):\n    return 1\n",
            ["KeyError", "missing", "load"],
        ),
        ("imports", "import nonexistent_module\ndef load(): pass\ndef handle(s, r): pass\n", ["nonexistent_module"]),
        ("exits", "import sys\ndef load():\n    sys.exit(3)\ndef handle(s, r): pass\n", ["SystemExit"]),
        ("dies", "import os\ndef load():\n    os._exit(3)\ndef handle(s, r): pass\n", ["exit"]),
    ],
)
def test_a_function_that_cannot_load_is_refused_with_its_traceback(
    node: TestNode, name: str, source: str, words: list[str]
) -> None:
    answer = node.deploy(name, source)
    assert (answer.status, answer.code) == (422, "load_failed"), answer
    for word in words:
        assert word in answer.message, answer.message
    assert node.invoke(name, {}).status == 404
    still_good(node)


def test_a_failed_redeploy_keeps_the_old_version(node: TestNode) -> None:
    node.deployed("twice", "def load(): return 1\ndef handle(state, request): return state\n")
    answer = node.deploy("twice", "def load(): raise ValueError('no')\ndef handle(s, r): return 2\n")
    assert (answer.status, answer.code) == (422, "load_failed"), answer
    assert node.result("twice", {}) == 1
    node.deployed("twice", "def load(): return 3\ndef handle(state, request): return state\n")
    assert node.result("twice", {}) == 3


def test_an_exception_in_handle_comes_back_with_its_traceback(node: TestNode) -> None:
    node.deployed(
        "angry", "def load(): pass\ndef handle(state, request):\n    raise ValueError('bad ' + request['who'])\n"
    )
    answer = node.told("angry", {"who": "luck"})
    assert (answer.status, answer.code) == (500, "function_raised")
    assert "ValueError: bad luck" in answer.message
    assert "in handle" in answer.message
    assert "dormouse" not in answer.message.replace("dormouse-", ""), "frames of the runner are not the user's"
    still_good(node)


def test_an_asynchronous_error_names_the_operation_and_the_line(node: TestNode) -> None:
    source = """
        import torch
        def load():
            return torch.arange(10, device="cuda")
        def handle(state, request):
            index = torch.tensor([request["i"]]).to("cuda")
            picked = state[index]  # this line
            return picked.tolist()
    """
    node.deployed("index", source)
    assert node.result("index", {"i": 3}) == [3]
    answer = node.told("index", {"i": 99})
    assert (answer.status, answer.code) == (500, "function_raised")
    assert "IndexError: index 99 is out of bounds" in answer.message
    assert "in aten::index.Tensor on cuda:0, issued by" in answer.message
    assert 'index.py", line 7, in handle' in answer.message.split("issued by")[1], "and not the next, where it is read"
    assert node.result("index", {"i": 4}) == [4]
    still_good(node)


def test_a_model_larger_than_a_gpu_is_refused_with_the_numbers(node: TestNode) -> None:
    source = """
        import torch
        def load(): return torch.ones(300 << 18).to("cuda")
        def handle(state, request): return state.sum().item()
    """
    answer = node.deploy("huge", source)
    assert (answer.status, answer.code) == (507, "model_too_large"), answer
    assert "the model has 300 MiB and a GPU of this node 256 MiB;" in answer.message
    still_good(node)


def test_a_model_that_its_pool_cannot_place_is_out_of_memory_with_the_numbers() -> None:
    """It is smaller than the GPU: only the attempt tells that its blocks are not."""
    source = """
        import torch
        def load(): return [torch.rand(33 << 18).to("cuda") for _ in range(3)]
        def handle(state, request):
            state[0][0] = 5
            return sum(x.sum().item() for x in state)
    """
    with running_node('[gpu]\ncount = 1\nmemory = "128MiB"\npool = "buddy"\n') as node:
        node.deployed("good", GOOD)
        node.deployed("blocks", source)
        for _ in range(2):
            answer = node.invoke("blocks", {})
            assert (answer.status, answer.code) == (507, "out_of_memory"), answer
            assert f"{3 * (33 << 20)} bytes in 3 blocks" in answer.message, answer.message
            still_good(node)


@needs.COMPILER
def test_activations_larger_than_what_is_left_are_an_out_of_memory_error(node: TestNode) -> None:
    source = """
        import torch
        def load(): return torch.ones(1 << 20).to("cuda")
        def handle(state, request):
            try:
                big = torch.ones(request["mib"] << 18, device="cuda") + 1
                return big.sum().item()
            except torch.OutOfMemoryError as error:
                return {"oom": str(error)} if request["catch"] else 1 / 0
    """
    node.deployed("oom", source)
    assert node.result("oom", {"mib": 10, "catch": False}) == 2 * (10 << 18)
    assert "memory" in node.result("oom", {"mib": 4096, "catch": True})["oom"]
    node.deployed("oom2", source.replace("except torch.OutOfMemoryError as error", "except ZeroDivisionError as error"))
    answer = node.invoke("oom2", {"mib": 4096, "catch": False})
    assert (answer.status, answer.code) == (507, "out_of_memory"), answer
    assert node.result("oom", {"mib": 10, "catch": False}) == 2 * (10 << 18)
    still_good(node)


HALVING = """
    import torch

    ROWS = 5 << 10  # of 1 KiB

    def computed(n): return torch.empty(n * ROWS, 256, device="cuda").fill_(1)
    def uploaded(n): return torch.ones(1, 256).expand(n * ROWS, 256).to("cuda")
    def result(n): return model.expand(n * ROWS, 256) + 1
    def many_computed(n): return [torch.ones(ROWS, 256, device="cuda") for _ in range(n)]
    def many_uploaded(n):
        host = torch.ones(ROWS, 256)
        return [host.to("cuda") for _ in range(n)]

    def load():
        global model
        model = torch.zeros(1, 256, device="cuda")

    def handle(_, request):
        n, tried, kept = 256, 0, None
        while kept is None:
            tried += 1
            try:
                kept = globals()[request](n)
            except torch.OutOfMemoryError:
                n //= 2
        last = kept[-1]
        return n, tried, last.sum().item()
"""


@needs.COMPILER
def test_a_program_that_halves_its_batch_finds_what_fits(node: TestNode) -> None:
    """The error comes at the call, or soon after the one of many small ones that did not fit: of 5 MiB each, 256 and
    128 and 64 are too many for a GPU of 256 MiB. Twice, as nothing of what did not fit is left.
    """
    for source, count in ((HALVING, 1), (HALVING.replace("def handle", "async def handle"), 2)):
        node.deployed("halving", source, concurrency=count)
        for way in ("computed", "uploaded", "result", "many_computed", "many_uploaded") * 2:
            total = 256.0 if not way.startswith("many") else 256.0 * (5 << 10)
            assert node.result("halving", way) == [32, 4, total], (way, count)
    still_good(node)


@needs.COMPILER
def test_n1_what_could_not_be_computed_is_the_error_and_not_its_form(node: TestNode) -> None:
    source = "import torch\ndef load(): pass\ndef handle(_, n): return torch.ones(n, device='cuda')\n"
    node.deployed("form", source)
    assert node.invoke("form", 1).code == "bad_response"
    answer = node.invoke("form", 1 << 38)
    assert (answer.status, answer.code) == (507, "out_of_memory"), answer
    still_good(node)


def test_what_is_not_json_is_refused_in_both_directions(node: TestNode) -> None:
    answer = node.http("POST", "/functions/good/invoke", raw=b"{not json")
    assert (answer.status, answer.code) == (400, "bad_json")
    node.deployed("odd", "def load(): pass\ndef handle(state, request): return {1, 2}\n")
    answer = node.invoke("odd", {})
    assert (answer.status, answer.code) == (500, "bad_response")
    assert "set" in answer.message
    tensor = "import torch\ndef load(): pass\ndef handle(state, request): return torch.ones(2, device='cuda')\n"
    node.deployed("tensor", tensor)
    answer = node.invoke("tensor", {})
    assert (answer.status, answer.code) == (500, "bad_response")
    assert "tolist" in answer.message
    still_good(node)


def test_a_body_too_large_is_refused_before_it_is_read(node: TestNode) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", node.port, timeout=60)
    connection.putrequest("POST", "/functions/good/invoke")
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", str(1 << 34))
    connection.endheaders()
    response = connection.getresponse()  # nothing was sent: the answer cannot have waited for it
    assert response.status == 413
    assert json.loads(response.read())["error"]["code"] == "body_too_large"
    connection.close()


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ("Host: localhost\r\nContent-Type: application/json", ""),
        ("Host: evil.example\r\nContent-Type: application/json", "unknown_host"),
        ("Host: localhost\r\nContent-Type: application/json\r\nOrigin: https://evil.example", "foreign_origin"),
        ("Host: localhost\r\nContent-Type: application/json\r\nSec-Fetch-Site: cross-site", "foreign_origin"),
        ("Host: localhost\r\nContent-Type: text/plain", "content_type"),
        ("Host: localhost", "content_type"),
    ],
)
def test_d10_a_web_page_invokes_nothing(node: TestNode, headers: str, code: str) -> None:
    """What a browser sends for a page of somebody else, by each way that it has."""
    head = f"POST /functions/good/invoke HTTP/1.1\r\n{headers}\r\nConnection: close\r\nContent-Length: 8\r\n\r\n"
    with socket.create_connection(("127.0.0.1", node.port), 60) as sock:
        sock.sendall(head.encode() + b'{"x": 2}')
        answer = b"".join(iter(lambda: sock.recv(65536), b""))
    status, _, body = answer.partition(b"\r\n\r\n")
    assert int(status.split()[1]) == {"": 200, "unknown_host": 421, "foreign_origin": 403, "content_type": 415}[code]
    assert not code or json.loads(body)["error"]["code"] == code


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "functions"), ("DELETE", "functions/good"), ("GET", "functions/good/logs"), ("GET", "status")],
)
def test_d1_over_tcp_nobody_administrates(node: TestNode, method: str, path: str) -> None:
    answer = node.http(method, f"/admin/{path}")
    assert (answer.status, answer.code) == (401, "unauthorized")
    still_good(node)


def test_an_unknown_function_is_named(node: TestNode) -> None:
    answer = node.invoke("nobody", {})
    assert answer.status == 404
    assert "nobody" in answer.message


def test_a_large_body_and_a_large_answer_go_through_shared_memory(node: TestNode) -> None:
    node.deployed("echo", "def load(): pass\ndef handle(state, request): return request\n")
    request = {"text": "x" * (8 << 20)}
    assert node.result("echo", request) == request


def test_an_answer_too_large_is_an_error_that_says_so(node: TestNode) -> None:
    node.deployed("long", "def load(): pass\ndef handle(state, request): return 'x' * request\n")
    answer = node.invoke("long", 17 << 20)
    assert (answer.status, answer.code) == (500, "bad_response"), answer
    assert "returned 17.0 MiB of JSON; at most 16.0 MiB fit" in answer.message, answer
    assert node.result("long", 3) == "xxx"


def test_a_handler_that_never_returns_is_ended_and_replaced(node: TestNode) -> None:
    source = "def load(): return []\ndef handle(state, request):\n    while request['hang']: pass\n    return 'back'\n"
    node.deployed("hang", source, timeout="3s")
    answer = node.invoke("hang", {"hang": True})
    assert (answer.status, answer.code) == (504, "timed_out")
    # The next request's time limit counts its wait for the new instance, too.
    node.wait(lambda: node.status()["functions"]["hang"]["state"] == "idle", 60, "the instance to be replaced")
    assert node.result("hang", {"hang": False}) == "back"
    still_good(node)


def test_a_handler_that_hangs_with_a_lease_gives_it_back(node: TestNode) -> None:
    source = """
        import torch
        def load(): return torch.ones(10).to("cuda")
        def handle(state, request):
            y = state + 1
            while True: pass
    """
    node.deployed("holder", source, timeout="1s")
    before = node.pids()
    answers: list[HttpAnswer] = []
    threads = [threading.Thread(target=lambda: answers.append(node.invoke("holder", {}))) for _ in range(2)]
    for thread in threads:
        thread.start()
    still_good(node)
    for thread in threads:
        thread.join()
    assert [(answer.status, answer.code) for answer in answers] == [(504, "timed_out")] * 2, answers
    node.wait(lambda: not any(gpu["busy_with"] for gpu in node.status()["gpus"].values()), 60, "its GPU to be free")
    assert node.pids() == before, "it was given back, and not taken with the executor's life"
    still_good(node)


def test_an_instance_killed_in_the_middle_of_a_request_is_replaced(node: TestNode) -> None:
    source = "import os\ndef load(): pass\ndef handle(s, r):\n    if r['die']: os.kill(os.getpid(), 9)\n    return 1\n"
    node.deployed("suicide", source)
    answer = node.invoke("suicide", {"die": True})
    assert (answer.status, answer.code) == (502, "sandbox_died")
    assert node.result("suicide", {"die": False}) == 1
    still_good(node)


def test_a_client_that_leaves_cancels_its_request(node: TestNode) -> None:
    source = """
        import time
        def load(): return {"cancelled": 0}
        def handle(state, request):
            if "ask" in request: return state["cancelled"]
            try:
                print("waiting", flush=True)
                time.sleep(150)
            except BaseException:
                state["cancelled"] += 1
                raise
    """
    node.deployed("patient", source)  # its time limit is a minute
    connection = http.client.HTTPConnection("127.0.0.1", node.port)
    connection.request("POST", "/functions/patient/invoke", b"{}", {"Content-Type": "application/json"})
    node.wait(lambda: "waiting" in node.log_of("patient"), 60, "handle to wait")
    connection.close()
    assert node.result("patient", {"ask": 1}) == 1


def test_user_output_is_the_functions_log(node: TestNode) -> None:
    node.deployed(
        "chatty", "import sys\ndef load(): print('loading')\ndef handle(s, r): print('hi', r, file=sys.stderr)\n"
    )
    assert node.result("chatty", 7) is None
    node.wait(lambda: "hi 7" in node.log_of("chatty"), 60, "the log")
    assert "loading" in node.log_of("chatty")


def test_a_removed_function_is_gone(node: TestNode) -> None:
    node.deployed("brief", "def load(): pass\ndef handle(s, r): return 1\n")
    assert node.remove("brief").status == 200
    assert node.invoke("brief", {}).status == 404
    assert node.remove("brief").status == 404


def test_a_function_reads_what_lies_beside_it(node: TestNode) -> None:
    source = """
        import neighbour
        def load(): return open("./beside.txt").read()
        def handle(state, request): return [state, neighbour.word]
    """
    node.deployed("reader", source, {"beside.txt": "hello", "neighbour.py": "word = 'there'\n"})
    assert node.result("reader", {}) == ["hello", "there"]


def test_a_log_says_of_which_request_each_line_is_and_why_an_instance_ended(node: TestNode) -> None:
    source = """
        import os, sys, time
        def load():
            print("loads")
        def handle(state, request):
            print("asked to", request)
            sys.stderr.write("and half a line")
            if request == "exit":
                os._exit(3)
            while request == "spin":
                pass
            return request
    """
    node.deployed("ends", source, timeout="1s")
    codes = {what: _called(node, "ends", what) for what in ("go", "exit", "spin")}
    assert codes == {"go": 200, "exit": 502, "spin": 504}
    node.deployed("ends", source, timeout="2s")

    def ends() -> list[LogLine]:
        return [line for line in _lines(node, "ends") if b" ended: " in line.text]

    node.wait(lambda: len(ends()) == 3, 60, "the first version's last instance to be gone")
    exited, killed, replaced = ends()
    assert b" ended: it exited with status 3, request mine-exit, 2" in exited.text
    assert b" ended: it was killed by its time limit, request mine-spin, 2" in killed.text
    assert b" ended: it was replaced: version 2 was deployed, 2" in replaced.text
    lines = _lines(node, "ends")
    for what in codes:
        printed = [line for line in lines if line.text.startswith(f"asked to {what}".encode())]
        assert [line.origin.request for line in printed] == [f"mine-{what}"]
        assert printed[0].origin.time.startswith("20")
    assert [line.origin.instance for line in lines if b"asked to exit" in line.text] == [exited.origin.instance]
    assert {line.origin.request for line in lines if line.text == b"loads\n"} == {""}
    found = b"".join(line.text for record in having(node.marked_log("ends"), "mine-go") for line in record)
    assert found == b"asked to go\nand half a line\n", "though it does not name its request"


def _lines(node: TestNode, name: str) -> list[LogLine]:
    return list(lines_of((node.marked_log(name),)))


def _called(node: TestNode, name: str, what: str) -> int:
    headers = {"X-Request-Id": f"mine-{what}"}
    return node.http("POST", f"/functions/{name}/invoke", what, headers=headers, timeout_s=60).status
