"""What a build of libraries says when pip has failed: with pip itself."""

from typing import Any

import pytest

from benchmarks.nodes.ports import reserved_port
from dormouse.core.sandbox.builder import BuildFailed, _locked, _Pip, wanting
from dormouse.schemas.messages import BuildOrder


def test_an_index_that_cannot_be_reached_is_no_fault_of_the_requirements() -> None:
    with reserved_port() as nobody:
        index = f"http://127.0.0.1:{nobody.getsockname()[1]}/simple"
        pip = _Pip(BuildOrder(index=index, variables={"PIP_RETRIES": "1"}))
        with pytest.raises(BuildFailed) as raised:
            pip.run("install", "--dry-run", "emoji==2.15.0")
    assert (raised.value.code, str(raised.value)) == (
        "index_unreachable",
        "the package index cannot be reached ([Errno 111] Connection refused); [environments] index in the node file "
        "names it",
    )


def _found(name: str, *needs: str, requested: bool = False) -> dict[str, Any]:
    metadata = {"name": name, "version": "1", "requires_dist": list(needs)}
    return {"metadata": metadata, "requested": requested, "download_info": {}}


REPORT = [
    _found("mine", "Trees>=2", requested=True),
    _found("other", "numpy", requested=True),
    _found("trees", 'XGBoost[sklearn]>1; python_version > "3"'),
    _found("xgboost", "numpy", "nvidia_nccl_cu12; platform_system == 'Linux'"),
    _found("nvidia-nccl-cu12"),
    _found("own", "nvidia-cublas-cu12", requested=True),
    _found("nvidia-cublas-cu12"),
    _found("triton", requested=True),
]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "nvidia-nccl-cu12",
            "mine wants trees, trees wants xgboost, xgboost wants nvidia-nccl-cu12: write xgboost-cpu instead",
        ),
        ("nvidia-cublas-cu12", "own wants nvidia-cublas-cu12: leave own out, or write a build of it without CUDA"),
        ("triton", "leave it out"),
    ],
)
def test_who_brings_a_part_of_cuda_is_named_with_what_to_write_instead(name: str, says: str) -> None:
    with pytest.raises(BuildFailed) as refused:
        _locked(_found(name), REPORT, {"torch": "2.13.0"})
    assert refused.value.code == "cuda_refused"
    assert f"the node's torch 2.13.0; {says}" in str(refused.value)


def test_what_requires_itself_is_looked_at_once() -> None:
    assert wanting("a", [_found("a", "b"), _found("b", "a")]) == ["b"]
