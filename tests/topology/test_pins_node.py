"""A pinned model on a real node stays on its GPU while others come and go, also after a restart."""

import pytest

from benchmarks.nodes.testnode import TestNode, running_node
from dormouse.core.node.refusals import CallRefused
from dormouse.schemas.admin import Wish

FUNCTION = """
import torch
def load():
    return torch.full((1 << 20,), NUMBER).to("cuda")
def handle(weights, request):
    return weights.sum().item()
"""


def _place(node: TestNode, name: str) -> str:
    """Where its model was."""
    answer = node.invoke(name, 1)
    assert answer.status == 200, answer
    return answer.headers["server-timing"].rpartition("model;desc=")[2]


def _others(node: TestNode) -> None:
    for _ in range(3):
        for name in ("b", "c", "d", "e"):
            _place(node, name)


def _pinned(node: TestNode) -> bool:
    return bool(node.status()["functions"]["a"]["pinned"])


def test_a_pinned_model_stays() -> None:
    with running_node('[gpu]\ncount = 1\nmemory = "16MiB"\nactivations = "4MiB"\nthreads = 1\n') as node:
        for number, name in enumerate("abcde", 1):
            node.deployed(name, FUNCTION.replace("NUMBER", f"{number}."))
        _place(node, "a")
        _others(node)
        assert _place(node, "a") == "host", "it is asked for least"
        node.admin.pin("a", True)
        assert _pinned(node)
        _others(node)
        assert _place(node, "a") == "gpu"
        node.deployed("a", FUNCTION.replace("NUMBER", "9."))
        _place(node, "a")
        _others(node)
        assert _place(node, "a") == "gpu", "a new version is pinned, too"
        node.kill_all()
        node.start()
        assert _pinned(node)
        _others(node)  # whose first requests may run out of memory: then all idle models leave
        _place(node, "a")
        _others(node)
        assert _place(node, "a") == "gpu"
        node.admin.pin("a", False)
        _others(node)
        _others(node)
        assert (_pinned(node), _place(node, "a")) == (False, "host")
        with pytest.raises(CallRefused):
            node.admin.pin("nobody", True)


def test_who_deploys_pins_within_a_quota() -> None:
    config = '[gpu]\ncount = 1\nmemory = "16MiB"\nthreads = 1\n[tenants.bounded]\ngpu_memory = "8MiB"\n'
    with running_node(config, node='tenants = "many"') as node:
        codes = []
        for tenant in ("bounded", "free"):
            node.deployed(tenant, FUNCTION.replace("NUMBER", "1."), tenant=tenant)
            key = node.admin.create_key(Wish(tenant=tenant, scopes=("deploy",)))["key"]
            for method in ("PUT", "DELETE"):
                told = node.http(method, f"/admin/functions/{tenant}/pin", headers={"Authorization": f"Bearer {key}"})
                codes.append((told.status, told.code if told.status != 200 else ""))
        assert codes == [(200, ""), (200, ""), (403, "scope_missing"), (200, "")]
