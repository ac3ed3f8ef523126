"""Instances that break the protocol on purpose: each meets its own end and nobody else notices.

The functions below reach into the shim of their own process, which is what hostile code can do. Every attack is seen to
reach its target: by the executor's own words for what it met, or by an answer that only the executor can have given.
"""

import re

import pytest

from benchmarks.nodes.testnode import TestNode

GOOD = """
    import torch
    def load(): return torch.arange(8.0).to("cuda")
    def handle(state, request): return (state * request["x"]).tolist()
"""

HOSTILE = """
    import msgpack, torch
    from dormouse.client_shim.torch_face.remote_tensor import world
    from dormouse.schemas import stream as w

    def load():
        return torch.arange(8.0).to("cuda")

    def handle(state, request):
        (state + 1).sum().item()  # the lease is in use
        stream = world.stream
        connection = stream._connection
        lease = connection.lease
        channel = stream.backend.executor(lease)

        def send(*fields):
            channel.send(msgpack.packb(list(fields)))

        def frame(commands, metas=(), keys=()):
            send(lease.serial, lease.secret, connection.number, [list(metas), list(keys)], commands)
            connection.number += 1

        def reply(kind):
            while True:
                for answer in w.replies(channel.recv(20)):
                    if answer[0] == kind:
                        return answer

        ATTACK
        return (state + 1).tolist()
"""

VIOLATIONS = {
    "garbage": ("channel.send(b'\\xc1garbage')", "a frame is an array of 5"),
    "oversized": ("channel.send(b'x' * (8 << 20))", "a message of 8388608 bytes; at most "),
    "inparts": ("channel._link._push(b'\\x01\\x01a\\x00\\x01b', 1)", "a message of several parts"),
    "empty": ("channel.send(b'')", "a frame is an array of 5"),
    "notaframe": ("channel.send(msgpack.packb({'a': 1}))", "a frame is an array of 5"),
    "header": ("send(lease.serial, lease.secret, 'x', [[], []], [])", "are unsigned integers"),
    "badcode": ("frame([2**62] * 50)", "4611686018427387904 is neither a command nor a key that was defined"),
    "badmeta": ("frame([], [60000, ['float32', None, [1], 0, 0]])", "None is no size"),
    "badkey": ("frame([], [], [60000, ['aten::relu', [], [], None, ['float32']]])", "is no default dtype"),
    "badoperand": ("frame([w.UPLOAD, 1, 2, None, 0, 0])", "None is not a count"),
    "badend": ("frame([w.END, [], 1])", "[] is not a count"),
    "arena": ("frame([w.UPLOAD, 77777, 64, 0, 2**40, 64])", "bytes beyond the end of the arena"),
    "undefined": ("frame([w.DOWNLOAD, 1, 99999, 61234, -1])", "geometry 61234 was not defined"),
    "wrongsecret": (
        "send(lease.serial, lease.secret ^ 1, connection.number, [[], []], [])",
        "which is not this instance's",
    ),
    "outoforder": ("send(lease.serial, lease.secret, 10**6, [[], []], [])", "frame 1000000 after frame "),
    "future": (
        "[send(lease.serial + 5, 1, 1, [[], []], []) for _ in range(200)]",
        "more than 16 frames ahead of a lease",
    ),
    "past": (
        "[send(lease.serial - 1, 1, 1, [[], []], []) for _ in range(200)]",
        "more than 64 frames of leases that are over",
    ),
    "flood": (
        "[frame([w.SYNC, n]) for n in range(10**5)]",
        "(more than 16 frames without acknowledgement|does not read its replies)",
    ),
}

REFUSED = "is not an operation that a function may run on a GPU"
WAY_ON = "use others in its place, or call it on the CPU, with x.cpu()"

ANSWERS: dict[str, tuple[str, object]] = {
    "stalelease": (
        "send(lease.serial - 1, lease.secret, 1, [[], []], []); return reply(w.REFUSED)[2]",
        "the lease is over",
    ),
    "foreignids": (
        "frame([w.DOWNLOAD, 999, 99999, 60000, -1], [60000, ['float32', [8], [1], 0, 0]]); return reply(w.FAILED)[1:4]",
        [
            999,
            "RuntimeError",
            "storage 99999 is not on this GPU: it was lost with a lease, or freed",
        ],
    ),
    "unknownop": (
        "frame([60000, w.SYNC, 999], [], [60000, ['aten::from_file', ['/etc/passwd'], [], [[], [], False], 'float32']])"
        "; return reply(w.FAILED)[1:4]",
        [999, "NotImplementedError", f"aten::from_file {REFUSED}: {WAY_ON}"],
    ),
}


@pytest.fixture(scope="module", autouse=True)
def good(node: TestNode) -> None:
    node.deployed("good", GOOD)


def _unharmed(node: TestNode, before: dict[str, int]) -> None:
    assert node.result("good", {"x": 3}) == [3.0 * k for k in range(8)]
    assert node.pids() == before, "a hostile instance took a process of the node down"


@pytest.mark.parametrize("attack", sorted(VIOLATIONS))
def test_d5_an_attack_ends_its_instance_by_name(node: TestNode, attack: str) -> None:
    code, text = VIOLATIONS[attack]
    before = node.pids()
    node.deployed("hostile", HOSTILE.replace("ATTACK", code), timeout="20s")
    answer = node.invoke("hostile", {})
    assert (answer.status, answer.code) == (502, "violation"), answer
    assert re.search(text if text.startswith("(") else re.escape(text), answer.message), answer.message
    _unharmed(node, before)


@pytest.mark.parametrize("attack", sorted(ANSWERS))
def test_d5_an_attack_is_answered_and_changes_nothing(node: TestNode, attack: str) -> None:
    code, expected = ANSWERS[attack]
    before = node.pids()
    node.deployed("hostile", HOSTILE.replace("ATTACK", code), timeout="30s")
    answer = node.invoke("hostile", {})
    assert (answer.status, answer.body) == (200, expected), f"{answer} {node.logs()}"
    _unharmed(node, before)


OUT_OF_BOUNDS = {
    "segment_reduce": (
        "torch.segment_reduce(state, 'sum', lengths=torch.tensor([10**6]).to('cuda'), unsafe=True)",
        ("NotImplementedError", f"aten::segment_reduce {REFUSED}"),
    ),
    "as_strided": (
        "torch.as_strided(state, (10**6,), (1,))",
        ("RuntimeError", "a storage size of 4000000 are out of bounds for storage of size 32"),
    ),
    "native_batch_norm": (
        "torch.ops.aten.native_batch_norm(state.view(1, 8, 1), None, state[:1], state, state, False, 0.1, 1e-5)[0]",
        ("RuntimeError", "bias should contain 8 elements not 1"),
    ),
    "max_pool2d_backward": (
        "torch.ops.aten.max_pool2d_with_indices_backward(state.view(1, 1, 2, 4), state.view(1, 1, 2, 4), [1, 1], "
        "[1, 1], [0, 0], [1, 1], False, torch.full((1, 1, 2, 4), 10**9, device='cuda'))",
        ("NotImplementedError", f"aten::max_pool2d_with_indices_backward {REFUSED}"),
    ),
    "sparse_csr": (
        "torch.sparse_csr_tensor(torch.tensor([0, 10**6]).cuda(), torch.tensor([5]).cuda(), state[:1], (1, 8))",
        ("NotImplementedError", " tensors are not supported on cuda:0"),
    ),
    "set_": ("state.set_(torch.UntypedStorage(64))", ("RuntimeError", "on device cuda:0 to one on cpu")),
    "from_file": (
        "torch.ops.aten.from_file('/etc/passwd', False, 10, device='cuda')",
        ("NotImplementedError", f"aten::from_file {REFUSED}"),
    ),
    "_unsafe_index": (
        "torch.ops.aten._unsafe_index(state, [torch.tensor([10**9]).cuda()])",
        ("NotImplementedError", f"aten::_unsafe_index.Tensor {REFUSED}"),
    ),
    "resize_": ("state.resize_(10**7)[8:].count_nonzero()", ("ok", "tensor(0)")),  # what it grew by was nobody's
    "gather": (
        "torch.gather(state, 0, torch.tensor([10**9]).cuda())",
        ("RuntimeError", "index 1000000000 is out of bounds for dimension 0 with size 8"),
    ),
    "embedding": (
        "torch.embedding(state.view(4, 2), torch.tensor([10**9]).cuda())",
        ("IndexError", "index out of range in self"),
    ),
}


@pytest.mark.parametrize("call", sorted(OUT_OF_BOUNDS))
def test_d5_a_hostile_call_raises_and_reads_nothing(node: TestNode, call: str) -> None:
    """Legal by schema; some of these crash or read out of bounds in PyTorch's own kernels."""
    source = f"""
    import torch
    def load(): return torch.arange(8.0).to("cuda")
    def handle(state, request):
        try:
            out = {OUT_OF_BOUNDS[call][0]}
            return ["ok", str(out.cpu())[:100]]
        except Exception as error:
            return [type(error).__name__, str(error)]
    """
    before = node.pids()
    node.deployed("call", source)
    kind, text = node.result("call", {})
    expected, words = OUT_OF_BOUNDS[call][1]
    assert (kind, words in text) == (expected, True), (kind, text)
    _unharmed(node, before)
