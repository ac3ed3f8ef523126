"""D12: `dormouse doctor` says what was tried, line by line; where a limit does not hold, it says that."""

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import needs
import pytest

from dormouse.core.cli import doctor
from dormouse.core.config import NodeConfig, NodeSection, SandboxSection

AS_USER = ("setpriv", "--reuid=54321", "--regid=54321", "--clear-groups")
AS_NOBODY = ("unshare", "--user", "--map-user=54321", "--map-group=54321")


def tried(config: NodeConfig, launcher: tuple[str, ...] = ()) -> set[tuple[bool, str, str]]:
    encoded = msgspec.json.encode(config).decode()
    command = [*launcher, sys.executable, "-P", "-m", "dormouse.core.sandbox.trial", encoded]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return {(row["held"], row["name"], row["found"]) for row in json.loads(done.stdout)}


def test_d12_what_doctor_claims_was_tried(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root")
    found = {
        finding.name: finding for finding in doctor._confinement(NodeConfig(node=NodeSection(state=str(tmp_path))))
    }
    assert found["confinement"].found.startswith("own-uid+pid+mount+ipc+net+seccomp")
    assert found["sandbox uid"].found == "61000, the node's is 0"
    assert found["sandbox files"].found == (
        "open a file of the node: ENOENT, open /etc/shadow: ENOENT, write to /usr: EROFS"
    )
    assert found["sandbox network"].found == "connect to the node: ENETUNREACH"
    assert (
        found["sandbox processes"].found == "signal the node: ESRCH, read its environment: ENOENT, others in /proc: 0"
    )
    assert "POSSIBLE" not in found["sandbox calls"].found
    assert found["limit: scratch"].found == "more in $HOME: ENOSPC, more in $TMPDIR: ENOSPC"
    assert found["limit: processes"].found == "32 processes: EAGAIN"
    assert {finding.state for finding in found.values()} == {"ok"}


def test_d8_without_rights_and_control_groups_processes_are_limited(tmp_path: Path) -> None:
    """By a user namespace of each instance's own. The kernel does so for users other than root, under whatever name."""
    if os.getuid() != 0:
        pytest.skip("needs root")
    found = tried(NodeConfig(node=NodeSection(state=str(tmp_path)), sandbox=SandboxSection(cgroups="off")), AS_USER)
    assert (True, "limit: processes", "32 processes: EAGAIN") in found, found
    assert (True, "confinement", "same-uid+user+pid+mount+ipc+net+seccomp") in found, found
    assert {held for held, name, _ in found if name != "sandbox uid"} == {True}, found


@needs.ROOT
def test_d12_doctor_does_not_claim_what_does_not_hold(tmp_path: Path) -> None:
    config = NodeConfig(node=NodeSection(state=str(tmp_path)), sandbox=SandboxSection(cgroups="off"))
    found = tried(config, AS_NOBODY)
    assert {
        (True, "confinement", "same-uid+user+pid+mount+ipc+net+seccomp"),
        (False, "sandbox uid", "54321, the node's is 54321"),
        (False, "limit: processes", "32 processes: POSSIBLE"),
        (True, "limit: memory", "more memfd memory: EPERM"),
        (True, "limit: memory", "more own memory: MemoryError"),
    } <= found, found
