"""docs/service.md, followed as far as a machine lets: `dormouse install-service`, and a node in a container."""

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from guides import ROOT, Reader, blocks, commands

INSTALL, WRITE, RELOAD, ENABLE, _, _, _, _, _, _, *CONTAINER = commands("docs/service.md")


def test_a_service_is_written_as_it_was_shown(tmp_path: Path) -> None:
    """By a `sudo` whose /etc/systemd/system is a folder of this test. What has systemd start it is not typed."""
    if os.getuid() != 0 or not os.path.isdir("/etc/systemd/system"):
        pytest.skip("needs root on a machine with systemd")
    units = tmp_path / "etc" / "systemd" / "system"
    units.mkdir(parents=True)
    reader = Reader(tmp_path, tmp_path / "shell")
    inside = f'mount --bind {units} /etc/systemd/system && exec "$@"'
    reader.has("sudo", f"exec unshare --mount sh -c '{inside}' sudo \"$@\"")
    (tmp_path / "node.toml").write_text('[gpu]\nmemory = "64MiB"\n')
    place, _, shown = reader.types(INSTALL).partition("\n")
    reader.types(WRITE)
    assert place == "# /etc/systemd/system/dormouse.service"
    assert (units / "dormouse.service").read_text() == shown
    assert not Path("/etc/systemd/system/dormouse.service").exists()
    assert f" up --foreground {tmp_path}/node.toml\n" in shown
    assert [RELOAD, ENABLE] == ["sudo systemctl daemon-reload", "sudo systemctl enable --now dormouse.service"]
    enable = f"systemctl --root={tmp_path} enable dormouse.service"
    if shutil.which("systemctl") is not None:
        reader.types(enable)
        assert (units / "multi-user.target.wants" / "dormouse.service").is_symlink()


@pytest.fixture
def container(tmp_path: Path) -> Iterator[Reader]:
    if "DORMOUSE_CONTAINER" not in os.environ:
        pytest.skip("needs podman: scripts/try-container")
    reader = Reader(tmp_path, tmp_path / "shell")
    yield reader
    for command in ("podman rm --force node", "podman volume rm --force dormouse"):
        reader.types(command)


@pytest.mark.container
@pytest.mark.timeout(3600)
def test_a_node_in_a_container(container: Reader, tmp_path: Path) -> None:
    build, run, status, copy, deploy, invoke, stop, remove = CONTAINER
    port = 8799
    (tmp_path / "node.toml").write_text(f"[node]\nport = {port}\n")
    (tmp_path / "hello.py").write_text(blocks("README.md", "python")[0])
    container.folder, container.timeout_s = ROOT, 3000.0
    container.types(build)
    container.folder = tmp_path

    def runs() -> None:
        container.types(run)
        end_s = time.monotonic() + 180
        while container.tries(status)[0] != 0 or "not ready" in container.types(status):
            assert time.monotonic() < end_s, container.types("podman logs node")
            time.sleep(1)

    runs()
    assert container.types("podman exec node id -u").strip() == "10001"
    assert f"at http://127.0.0.1:{port};" in container.types(status)
    container.types("podman healthcheck run node")
    container.types(copy)
    container.types(deploy)
    answer = json.loads(container.types(invoke))
    assert len(answer["y"]) == 2
    container.types(stop)
    assert container.types("podman inspect --format '{{.State.ExitCode}}' node").strip() == "0"
    container.types(remove)
    runs()  # with the same volume
    assert json.loads(container.types(invoke)) == answer
    container.types(f"{stop}; {remove}")
    for rights, confinement in (
        ("", "same-uid"),
        ("--user root --cap-add SYS_ADMIN", "own-uid"),
        ("--privileged --user root --cgroupns=private", "own-uid"),
    ):
        _, said, _ = container.tries(f"podman run --rm --network host {rights} dormouse doctor")
        (found,) = re.findall(r"^ok    confinement +(\S+)", said, re.MULTILINE)
        assert found.startswith(confinement), said
        assert found.endswith("+cgroup") == ("--privileged" in rights), said
