"""What NVML says of real GPUs' places, from a fake libnvidia-ml.so.1; and what becomes of it in the scheduler."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_cuda.build import NoCompiler
from fake_cuda.fixtures import fake_cuda_library
from fake_nvml.build import build, fake_uuid

from dormouse.core import gpus
from dormouse.core.cli import doctor
from dormouse.core.config import GpuSection, NodeConfig
from dormouse.core.decisions.scheduling.topology import NVLINK_BPS, Topology, discovered
from dormouse.gpuserver.device.cuda import nvml
from dormouse.schemas.messages import GpuPlace

__all__ = ["fake_cuda_library"]  # a fixture

UUIDS = [fake_uuid(ordinal) for ordinal in range(4)]

LOOK = """
import json, sys, msgspec
from dormouse.gpuserver.device.cuda import nvml
print(json.dumps([msgspec.to_builtins(nvml.look(uuid)) for uuid in sys.argv[1:]]))
"""


@pytest.fixture(scope="module")
def library() -> Path:
    try:
        return build(Path(tempfile.gettempdir()) / f"dormouse-fake-nvml-{os.getuid()}")
    except NoCompiler as error:
        pytest.skip(str(error))


def looked(library: Path | None, *uuids: str, **settings: str) -> list[GpuPlace]:
    """In a process of its own, as an executor does; without a library, none can be found."""
    folder = str(library.parent) if library is not None else "/nowhere"
    environment = {**os.environ, "LD_LIBRARY_PATH": folder, **{f"FAKE_NVML_{k}": v for k, v in settings.items()}}
    words = [sys.executable, "-P", "-c", LOOK, *uuids]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=90, check=True)
    return msgspec.convert(json.loads(done.stdout), list[GpuPlace])


def test_switches_and_links_in_nvmls_own_order(library: Path) -> None:
    """NVML counts GPU 3 first, and one that CUDA does not show."""
    first, second, fourth = looked(
        library,
        *(UUIDS[number] for number in (0, 1, 3)),
        UUIDS=f"{UUIDS[3]} GPU-hidden {UUIDS[0]} {UUIDS[1]}",
        SWITCHES="2 2 4 4",
        NVLINKS="03 23",
    )
    assert first == GpuPlace(uuid=UUIDS[0], switch_with=[UUIDS[1]], nvlink_with=[UUIDS[1]])
    assert second == GpuPlace(uuid=UUIDS[1], switch_with=[UUIDS[0]], nvlink_with=sorted([UUIDS[0], UUIDS[3]]))
    assert fourth == GpuPlace(uuid=UUIDS[3], switch_with=["GPU-hidden"], nvlink_with=[UUIDS[1]])


def test_a_host_bridge_between_them_is_no_shared_switch(library: Path) -> None:
    (place,) = looked(library, UUIDS[0], UUIDS=f"{UUIDS[0]} {UUIDS[1]}", SWITCHES="0 1")
    assert place == GpuPlace(uuid=UUIDS[0])


@pytest.mark.parametrize(
    "call",
    [
        "nvmlInit_v2",
        "nvmlDeviceGetCount_v2",
        "nvmlDeviceGetHandleByIndex_v2",
        "nvmlDeviceGetUUID",
        "nvmlDeviceGetTopologyCommonAncestor",
        "nvmlDeviceGetP2PStatus",
    ],
)
def test_a_refusal_is_told_with_its_call(library: Path, call: str) -> None:
    (place,) = looked(library, UUIDS[0], UUIDS=f"{UUIDS[0]} {UUIDS[1]}", FAIL=call)
    reason = f"NVML does not answer: {call} gives Insufficient Permissions (4)"
    assert place == GpuPlace(uuid=UUIDS[0], reason=reason)


def test_a_gpu_that_nvml_does_not_know(library: Path) -> None:
    (place,) = looked(library, "GPU-other", UUIDS=UUIDS[0])
    assert place.reason == "NVML does not know GPU-other, which may be a part of a GPU (MIG)"


def test_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "LIBRARY", "libnowhere.so.1")
    place = nvml.look("GPU-1")
    assert (place.uuid, place.switch_with) == ("GPU-1", [])
    assert place.reason.startswith("libnowhere.so.1 cannot be loaded (")


def test_a_library_without_these_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "LIBRARY", "libc.so.6")
    assert nvml.look("GPU-1").reason.startswith("NVML does not answer: ")


def test_uuids_are_written_as_nvml_does() -> None:
    assert nvml.named(bytes(range(16))) == "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"


# --- the scheduler's topology


def place(uuid: str, switch: str = "", nvlink: str = "", reason: str = "") -> GpuPlace:
    return GpuPlace(uuid=uuid, switch_with=list(switch), nvlink_with=list(nvlink), reason=reason)


PLACES = {0: place("a", "b", "b"), 1: place("b", "a", "ac"), 2: place("c", "x", "b"), 3: place("d", "", "")}


def test_what_was_found_is_taken_where_nothing_is_configured() -> None:
    found = discovered(Topology(), PLACES, keep_switches=False, keep_peers=False)
    assert (found.switches, found.uplinks, found.switch_bps) == ((0, 0, 2, 3), True, 0.0)
    bps = NVLINK_BPS
    assert found.peer_bps == ((0.0, bps, 0.0, 0.0), (bps, 0.0, bps, 0.0), (0.0, bps, 0.0, 0.0), (0.0,) * 4)
    assert found.neighbours(range(4))[0] == [1]


def test_what_is_configured_wins() -> None:
    configured = Topology(switches=(0, 1, 0, 1), switch_bps=5.0, peer_bps=((0.0, 7.0), (7.0, 0.0)))
    assert discovered(configured, PLACES, keep_switches=True, keep_peers=True) == configured
    found = discovered(configured, PLACES, keep_switches=True, keep_peers=False)
    assert (found.switches, found.uplinks, found.peer(0, 1)) == ((0, 1, 0, 1), False, NVLINK_BPS)
    found = discovered(configured, PLACES, keep_switches=False, keep_peers=True)
    assert (found.switches, found.peer(0, 1)) == ((0, 0, 2, 3), 7.0)


def test_nothing_found_changes_nothing() -> None:
    unknown = {0: place("a", reason="no library"), 2: place("c", reason="no library")}
    for places in ({}, unknown, {1: PLACES[1]}):
        assert discovered(Topology(), places, keep_switches=False, keep_peers=False) == Topology()


def test_executors_that_are_not_up_yet_leave_gaps() -> None:
    found = discovered(Topology(), {1: place("b", "d"), 3: place("d", "b")}, keep_switches=False, keep_peers=False)
    assert found.switches == (0, 1, 2, 1)


# --- doctor


def test_the_probe_tells_doctor_where_cudas_gpus_are(library: Path, fake_cuda_library: Path) -> None:
    """CUDA and NVML are both fakes; the second of CUDA's GPUs is NVML's first."""
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": f"{fake_cuda_library.parent}:{library.parent}",
        "FAKE_CUDA_DEVICES": "2",
        "FAKE_NVML_UUIDS": f"{UUIDS[1]} {UUIDS[0]}",
        "FAKE_NVML_SWITCHES": "5 5",
    }
    words = [sys.executable, "-P", "-m", gpus.CUDA_PROBE]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=True)
    places = msgspec.convert(json.loads(done.stdout)["places"], list[GpuPlace])
    assert [place.uuid for place in places] == UUIDS[:2]
    assert linked(places) == ("ok", "on one PCIe switch: all 2; with NVLink: none")


def linked(places: list[GpuPlace], **gpu: Any) -> tuple[str, str]:
    (finding,) = doctor._links(NodeConfig(gpu=GpuSection(**gpu)), places)
    return finding.state, finding.found


def test_doctor_names_switches_and_links() -> None:
    places = list(PLACES.values())
    assert linked(places) == ("ok", "on one PCIe switch: 0-1; with NVLink: 0-1, 1-2")
    assert linked(places, switch="1GB")[1] == "on one PCIe switch: as [gpu] switch says; with NVLink: 0-1, 1-2"
    assert linked(places[:2])[1] == "on one PCIe switch: all 2; with NVLink: all 2"
    assert linked([place("a"), place("b")]) == ("ok", "on one PCIe switch: none; with NVLink: none")


def test_doctor_says_why_it_is_not_known() -> None:
    places = [place("a", reason="no library"), place("b", reason="no library")]
    assert linked(places) == ("warn", "not known: no library")
    assert linked(places, peer="9GB") == ("warn", "with NVLink: as [gpu] peer says; not known: no library")
    assert linked(places, peer="9GB", switch="9GB")[0] == "ok"
    assert doctor._links(NodeConfig(), []) == []
