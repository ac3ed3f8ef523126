"""Control groups: which folder is taken on which kind of machine, what is written, and what is read of a breach.

The limits themselves are met in tests/topology/test_sandboxed_node.py, with what this machine has.
"""

from pathlib import Path

import pytest

from dormouse.core.sandbox import cgroups
from dormouse.core.sandbox.cgroups import Groups, Limits

LIMITS = Limits(memory_nbytes=1 << 30, processes=64, cpus=1.5)
SYSTEMD = "30 23 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
DOCKER = """
40 39 0:30 /docker/abc /sys/fs/cgroup/memory ro,nosuid,nodev master:15 - cgroup cgroup rw,memory
41 39 0:31 /docker/abc /sys/fs/cgroup/cpu,cpuacct ro,nosuid,nodev master:16 - cgroup cgroup rw,cpu,cpuacct
42 39 0:32 / /sys/fs/cgroup/pids rw,nosuid - cgroup cgroup rw,pids
43 1 8:1 / / rw - ext4 /dev/sda1 rw
"""


def test_where_the_hierarchies_are() -> None:
    assert cgroups._mounts(SYSTEMD) == {"": (Path("/sys/fs/cgroup"), "/")}
    mounts = cgroups._mounts(DOCKER.strip())
    assert mounts["memory"] == (Path("/sys/fs/cgroup/memory"), "/docker/abc")
    assert mounts["cpu"] == mounts["cpuacct"] == (Path("/sys/fs/cgroup/cpu,cpuacct"), "/docker/abc")
    own = cgroups._own("3:memory:/docker/abc/x\n2:cpu,cpuacct:/docker/abc\n1:pids:/other\n0::/\n")
    assert own == {"memory": "/docker/abc/x", "cpu": "/docker/abc", "cpuacct": "/docker/abc", "pids": "/other", "": "/"}
    assert cgroups._directory(*mounts["memory"], own["memory"]) == Path("/sys/fs/cgroup/memory/x")
    assert cgroups._directory(*mounts["cpu"], own["cpu"]) == Path("/sys/fs/cgroup/cpu,cpuacct")
    assert cgroups._directory(*mounts["pids"], own["pids"]) == Path("/sys/fs/cgroup/pids/other")
    assert cgroups._directory(Path("/sys/fs/cgroup/memory"), "/docker/abc", "/docker/abcd") is None  # not shown


def test_where_the_node_was_started_is_known_after_it_has_made_room() -> None:
    """Else each zygote, another world's or the next, would make its groups one level below those of the one before."""
    service = Path("/sys/fs/cgroup/system.slice/dormouse.service")
    assert cgroups._started_in(service) == cgroups._started_in(service / "dormouse-node") == service
    assert cgroups._started_in(None) is None


def test_what_is_written_of_v2(tmp_path: Path) -> None:
    """On a folder of ordinary files: the machine of these tests has the controllers in v1."""
    folder = tmp_path / "dormouse-x"
    folder.mkdir()
    groups = Groups(folders=dict.fromkeys(cgroups.CONTROLLERS, folder), unified=True)
    group = groups.make("1-1", LIMITS)
    written = {path.name: path.read_text() for path in (folder / "1-1").iterdir()}
    assert written == {"memory.max": str(1 << 30), "pids.max": "64", "cpu.max": "150000 100000"}
    assert {"memory.swap.max?", "memory.oom.group?"} <= set(LIMITS.files(True))  # where the kernel shows them
    group.join()
    assert (folder / "1-1" / "cgroup.procs").read_text() == "0"
    assert group.exceeded() == ""
    (folder / "1-1" / "memory.events").write_text("low 0\nhigh 0\nmax 12\noom 1\noom_kill 1\noom_group_kill 0\n")
    assert group.exceeded() == "memory"


def test_what_is_written_of_v1(tmp_path: Path) -> None:
    folders = {controller: tmp_path / controller for controller in cgroups.CONTROLLERS}
    for folder in folders.values():
        folder.mkdir()
    group = Groups(folders=folders, unified=False).make("1-1", LIMITS)
    assert (tmp_path / "memory" / "1-1" / "memory.limit_in_bytes").read_text() == str(1 << 30)
    assert (tmp_path / "pids" / "1-1" / "pids.max").read_text() == "64"
    assert (tmp_path / "cpu" / "1-1" / "cpu.cfs_quota_us").read_text() == "150000"
    (tmp_path / "memory" / "1-1" / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert group.exceeded() == "memory"


def test_d8_groups_of_this_machine_hold_and_are_removed() -> None:
    groups = Groups.claim("a test of cgroups")
    if groups is None:
        pytest.skip("needs the right to make control groups")
    folders = set(groups.folders.values())
    group = groups.make("1-1", Limits(memory_nbytes=64 << 20, processes=4))
    assert all((folder / "1-1").is_dir() for folder in folders)
    again = Groups.claim("a test of cgroups")  # a node that was killed has left a group
    assert again == groups
    assert not any((folder / "1-1").exists() for folder in folders)
    group.remove()
    groups.remove()
    assert not any(folder.exists() for folder in folders)
