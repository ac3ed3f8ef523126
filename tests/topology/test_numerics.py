"""What a function sets for numerics holds for its operations on the GPU, in their order, and for nobody else's.

An operator of ours says what torch's settings are where it runs, in the executor.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from benchmarks.nodes.testnode import TestNode, running_node
from dormouse.schemas.numerics import SETTINGS

OPERATOR: Final = """
import json
import torch
from dormouse.schemas.numerics import SETTINGS

def settings():
    return {setting.name: setting.current(torch._C) for setting in SETTINGS}

def said(values):
    text = json.dumps(values).encode()
    return torch.frombuffer(bytearray(text.ljust(4096)), dtype=torch.uint8)

library = torch.library.Library("probe", "DEF")
library.define("settings(Tensor x) -> Tensor")
library.impl("settings", lambda x: said(settings()), "CPU")
library.impl("settings", lambda x: torch.empty(4096, dtype=torch.uint8, device="meta"), "Meta")
"""

FUNCTION: Final = (
    OPERATOR
    + """
def load():
    return {"x": torch.ones(4, device="cuda")}

def handle(state, steps):
    # one frame: nothing is read before the last step
    asked, expected = [], []
    for step in steps:
        exec(step)
        asked.append(torch.ops.probe.settings(state["x"]))
        expected.append(settings())
    return {"there": [json.loads(bytes(each.cpu().numpy())) for each in asked], "here": expected}
"""
)

STEPS: Final = (
    "torch.set_float32_matmul_precision('high')",
    "torch.backends.cuda.matmul.allow_tf32 = False",
    "torch.backends.cudnn.allow_tf32 = False",
    "torch.backends.cudnn.benchmark = True",
    "torch.backends.cudnn.deterministic = True",
    "torch.backends.cudnn.enabled = False",
    "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False",
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False",
    "torch.backends.cuda.matmul.allow_fp16_accumulation = True",
    "torch.backends.cuda.enable_flash_sdp(False)",
    "torch.backends.cuda.enable_mem_efficient_sdp(False)",
    "torch.backends.cuda.enable_cudnn_sdp(False)",
    "torch.backends.cuda.enable_math_sdp(False)",
    "torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)",
    "torch.use_deterministic_algorithms(True, warn_only=True)",
    "torch.utils.deterministic.fill_uninitialized_memory = False",
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    "torch.backends.cudnn.conv.fp32_precision = 'ieee'",
    "torch.backends.cudnn.rnn.fp32_precision = 'ieee'",
    "torch.backends.fp32_precision = 'tf32'",
)
DEFAULTS: Final = {setting.name: setting.default for setting in SETTINGS}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestNode]:
    directory = tmp_path_factory.mktemp("operators")
    (directory / "numerics_probe.py").write_text(OPERATOR)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(directory), prepend=os.pathsep)
        config = '[gpu]\ncount = 1\nmemory = "64MiB"\noperators = ["probe:numerics_probe"]\n'
        with running_node(config) as running:
            yield running


def asked(node: TestNode, name: str, *steps: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    answer = node.invoke(name, list(steps))
    assert answer.status == 200, answer.body
    return answer.body["there"], answer.body["here"]


def test_every_setting_is_the_functions_own_in_its_order(node: TestNode) -> None:
    node.deployed("precise", FUNCTION)
    node.deployed("plain", FUNCTION)
    there, here = asked(node, "plain", "")
    assert there == here == [DEFAULTS]
    there, here = asked(node, "precise", *STEPS)
    assert there == here
    for before, after, step in zip([DEFAULTS, *there], there, STEPS, strict=False):
        assert before != after, step  # each of them shows
    assert asked(node, "plain", "")[0] == [DEFAULTS]
    kept, _ = asked(node, "precise", "")  # a process keeps its settings from request to request
    assert kept == [there[-1]]


def test_a_setting_that_is_made_again_is_the_newest(node: TestNode) -> None:
    """In the next request too, before which the executor applies all of them anew."""
    node.deployed("again", FUNCTION)
    node.deployed("between", FUNCTION)
    first = "torch.set_float32_matmul_precision('high')"
    there, here = asked(node, "again", first, "torch.backends.cuda.matmul.fp32_precision = 'ieee'", first)
    assert there == here
    assert there[0]["fp32_precision cuda matmul"] != there[1]["fp32_precision cuda matmul"]
    assert asked(node, "between", "")[0] == [DEFAULTS]
    assert asked(node, "again", "")[0] == [there[-1]]


def test_a_request_that_fails_leaves_no_setting(node: TestNode) -> None:
    node.deployed("failing", FUNCTION)
    node.deployed("other", FUNCTION)
    answer = node.invoke("failing", ["torch.backends.cudnn.benchmark = True", "state['x'].sum().item()", "1 / 0"])
    assert answer.status == 500, answer.body
    assert "ZeroDivisionError" in str(answer.body)
    assert asked(node, "other", "")[0] == [DEFAULTS]
    assert asked(node, "failing", "")[0] == [DEFAULTS | {"cudnn_benchmark": [True]}]


def test_an_executor_that_comes_anew_is_told(node: TestNode) -> None:
    node.deployed("lasting", FUNCTION)
    changed = DEFAULTS | {"cudnn_deterministic": [True], "sdp_use_math": [False]}
    steps = ("torch.backends.cudnn.deterministic = True", "torch.backends.cuda.enable_math_sdp(False)")
    assert asked(node, "lasting", *steps)[0][-1] == changed
    before = node.kill("gpu0")
    node.wait(lambda: node.pids()["gpu0"] != before, 60, "another executor")
    there, here = asked(node, "lasting", "")
    assert there == here == [changed]


def test_settings_of_the_module_hold_from_the_first_request_on(node: TestNode, tmp_path: Path) -> None:
    node.deployed("early", "import torch\ntorch.backends.cuda.matmul.allow_tf32 = True\n" + FUNCTION)
    there, here = asked(node, "early", "")
    assert there == here
    assert there[0]["fp32_precision cuda matmul"] == ["tf32"]
