"""Instances that break the protocol on purpose: each meets its own end and nobody else notices.

The functions below reach into the shim of their own process, which is what hostile code can do.
"""

import pytest

from dormouse.core.testing import TestNode

pytestmark = pytest.mark.timeout(180)

GOOD = """
    import torch
    def load(): return torch.arange(8.0).to("cuda")
    def handle(state, request): return (state * request["x"]).tolist()
"""

HOSTILE = """
    import gc, msgpack, torch
    from dormouse.client_shim.stream import Stream
    from dormouse.schemas import stream as w

    def load():
        return torch.arange(8.0).to("cuda")

    def handle(state, request):
        (state + 1).sum().item()  # the lease is in use
        (stream,) = [thing for thing in gc.get_objects() if isinstance(thing, Stream)]
        send, lease = stream_parts(stream)
        ATTACK
        return (state + 1).tolist()

    def stream_parts(stream):
        lease = stream.lease
        return stream.backend.executor(lease).send, lease
"""

ATTACKS = {
    "garbage": "send(b'\\xc1garbage')",
    "empty": "send(b'')",
    "notaframe": "send(msgpack.packb({'a': 1}))",
    "bigints": "send(msgpack.packb([lease.serial, lease.secret, 10**9, [[], []], [2**62] * 50]))",
    "unknownop": (
        "send(msgpack.packb([lease.serial, lease.secret, 10**6, [[], [7, ['aten::from_file', ['/etc/passwd'], [], "
        "[[], [], False], 'float32']]], [7]]))"
    ),
    "foreignids": "send(msgpack.packb([lease.serial, lease.secret, 10**6, [[], []], [w.DOWNLOAD, 1, 99999, 0, -1]]))",
    "stalelease": "send(msgpack.packb([lease.serial - 1, lease.secret, 1, [[], []], []]))",
    "wrongsecret": "send(msgpack.packb([lease.serial, lease.secret ^ 1, 10**6, [[], []], []]))",
    "future": "[send(msgpack.packb([lease.serial + 5, 1, 1, [[], []], []])) for _ in range(200)]",
    "flood": "[send(msgpack.packb([lease.serial, lease.secret, 99 + n, [[], []], [w.SYNC, n]])) for n in range(10**5)]",
    "oversized": "send(b'x' * (8 << 20))",
}


@pytest.fixture(scope="module", autouse=True)
def good(node: TestNode) -> None:
    node.deployed("good", GOOD)


@pytest.mark.parametrize("attack", sorted(ATTACKS))
def test_an_attack_ends_in_that_instances_error(node: TestNode, attack: str) -> None:
    before = node.pids()
    node.deployed(f"h-{attack}", HOSTILE.replace("ATTACK", ATTACKS[attack]), timeout="5s")
    answer = node.invoke(f"h-{attack}", {})
    assert answer.status == 200 or answer.code, answer  # ignored, or an error with a name: never silence
    if answer.status == 200:
        assert answer.body == [float(k + 1) for k in range(8)], "a wrong answer"
    assert node.result("good", {"x": 3}) == [3.0 * k for k in range(8)]
    assert node.pids() == before, "a hostile instance took a process of the node down"
    assert node.remove(f"h-{attack}").status == 200


@pytest.mark.parametrize(
    "call",
    [
        "torch.segment_reduce(state, 'sum', lengths=torch.tensor([10**6]).to('cuda'), unsafe=True)",
        "torch.as_strided(state, (10**6,), (1,))",
        "torch.ops.aten.native_batch_norm(state.view(1, 8, 1), None, state[:1], state, state, False, 0.1, 1e-5)",
        "torch.ops.aten.max_pool2d_with_indices_backward(state.view(1, 1, 2, 4), state.view(1, 1, 2, 4), [1, 1], "
        "[1, 1], [0, 0], [1, 1], False, torch.full((1, 1, 2, 4), 10**9, device='cuda'))",
        "torch.sparse_csr_tensor(torch.tensor([0, 10**6]).cuda(), torch.tensor([5]).cuda(), state[:1], (1, 8))",
        "state.set_(torch.UntypedStorage(64))",
        "torch.ops.aten.from_file('/etc/passwd', False, 10, device='cuda')",
        "torch.ops.aten._unsafe_index(state, [torch.tensor([10**9]).cuda()])",
        "state.resize_(10**7)",
        "torch.gather(state, 0, torch.tensor([10**9]).cuda())",
        "torch.embedding(state.view(4, 2), torch.tensor([10**9]).cuda())",
    ],
)
def test_a_hostile_call_raises_or_is_harmless(node: TestNode, call: str) -> None:
    """Legal by schema; some of these crash or read out of bounds in PyTorch's own kernels."""
    source = f"""
    import torch
    def load(): return torch.arange(8.0).to("cuda")
    def handle(state, request):
        try:
            out = {call}
            return ["ok", str(out.cpu())[:100]]
        except Exception as error:
            return [type(error).__name__, str(error)]
    """
    before = node.pids()
    node.deployed("call", source)
    kind, text = node.result("call", {})
    assert node.pids() == before, (kind, text)
    assert kind == "ok" or text, (kind, text)
    if "as_strided" in call or "native_batch_norm" in call or "set_" in call or "from_file" in call:
        assert kind != "ok", text
    assert node.result("good", {"x": 3}) == [3.0 * k for k in range(8)]
