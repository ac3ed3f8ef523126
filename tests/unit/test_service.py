"""`dormouse install-service`: units as systemd reads them, and where they go."""

import os
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from dormouse.core.cli import service as cli_service
from dormouse.core.cli.main import cli
from dormouse.core.node import children, registry

STRANGE = '/srv/a b/100%/$HOME/"q"/node.toml'


def settings(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))


@pytest.mark.parametrize("root", [True, False])
def test_systemd_has_nothing_against_it(root: bool) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze, of systemd")
    text = cli_service.unit("default", ["/bin/true", "up", STRANGE], root=root)
    assert cli_service.examined(text, "dormouse.service", root=root) is None
    broken = text.replace("Type=notify", "Type=notify\nDelegate=perhaps").replace("/bin/true", "/not/there")
    assert "/not/there" in (cli_service.examined(broken, "dormouse.service", root=root) or "")


def test_words_of_a_command_are_taken_as_they_are() -> None:
    text = cli_service.unit("default", ["/bin/dormouse", STRANGE, "a\nUser=x"], root=True)
    assert settings(text)["ExecStart"] == r'/bin/dormouse "/srv/a b/100%%/$$HOME/\"q\"/node.toml" "a\nUser=x"'


def test_its_times_leave_the_supervisor_its_own() -> None:
    of_unit = settings(cli_service.unit("default", ["/bin/true"], root=True))
    assert int(of_unit["TimeoutStartSec"].removesuffix("min")) * 60 > children.START_S
    assert int(of_unit["TimeoutStopSec"]) > 2 * registry.STOP_S
    assert int(of_unit["WatchdogSec"]) > 10  # seconds; the supervisor tells each second


def test_a_users_service_asks_for_nothing_that_a_user_may_not_have() -> None:
    of_unit = settings(cli_service.unit("default", ["/bin/true"], root=False))
    assert not {"User", "LimitMEMLOCK", "TasksMax"} & of_unit.keys()
    assert of_unit["WantedBy"] == "default.target"


def test_it_is_printed_before_it_is_written_and_an_older_one_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "node.toml").write_text('[node]\nname = "chat"\n')
    command = ["install-service", str(tmp_path / "node.toml")]
    path = tmp_path / "systemd" / "user" / "dormouse-chat.service"
    shown = CliRunner().invoke(cli, command)
    assert shown.exit_code == 0
    assert shown.stdout.startswith(f"# {path}\n")
    assert not path.exists()
    written = CliRunner().invoke(cli, [*command, "--write"])
    assert written.exit_code == 0
    assert "systemctl --user enable --now dormouse-chat.service" in written.stderr
    assert shown.stdout == f"# {path}\n{path.read_text()}"
    path.write_text("by hand")
    CliRunner().invoke(cli, [*command, "--write"])
    assert path.with_suffix(".service.old").read_text() == "by hand"
    assert settings(path.read_text())["ExecStart"].endswith(f"up --foreground {tmp_path / 'node.toml'}")


def test_a_node_file_that_cannot_be_used_makes_no_unit(tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text("[gpu]\ncuont = 1\n")
    refused = CliRunner().invoke(cli, ["install-service", str(tmp_path / "node.toml"), "--write"])
    assert refused.exit_code != 0
    assert "cuont" in str(refused.exception)


def test_a_name_without_a_file_is_refused() -> None:
    refused = CliRunner().invoke(cli, ["--node", "chat", "install-service"])
    assert refused.exit_code == 2
    assert "[node] name = 'chat'" in refused.stderr


def test_it_starts_the_node_that_up_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service has no environment of a shell."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("DORMOUSE_RUN", "/from/the environment")
    command = settings(CliRunner().invoke(cli, ["install-service"]).stdout)["ExecStart"]
    assert command.endswith(' --run "/from/the environment" up --foreground')
    (tmp_path / "node.toml").write_text('[node]\nrun = "/own"\n')
    command = settings(CliRunner().invoke(cli, ["install-service", str(tmp_path / "node.toml")]).stdout)["ExecStart"]
    assert command.endswith(f"/dormouse up --foreground {tmp_path}/node.toml")
