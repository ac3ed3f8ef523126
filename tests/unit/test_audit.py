"""The audit log: what a line says, and that nobody who is refused can fill or empty it."""

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from dormouse.core import audit as audit_
from dormouse.core.audit import FILES, REFUSED_AT_ONCE, Audit
from dormouse.core.config import EnvironmentsSection, NodeConfig, NodeSection
from dormouse.core.keys import KeyFile
from dormouse.core.node import startaudit
from dormouse.core.paths import StatePaths
from dormouse.core.users import user_name
from dormouse.schemas.admin import Wish


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    Audit(path, lambda: 1.5).write("anna", "unix", "deploy", "chat", "ok", version=3)
    assert lines(path) == [
        {
            "at": "1970-01-01T00:00:01.500000Z",
            "who": "anna",
            "from": "unix",
            "act": "deploy",
            "name": "chat",
            "outcome": "ok",
            "version": 3,
        }
    ]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_name_cannot_forge_a_line_nor_fill_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    Audit(path).write("key 1", "1.2.3.4:5", "rm", 'x"}\n{"who": "root"' + "y" * 10**6, "unknown_function")
    (line,) = lines(path)
    assert line["name"].startswith('x"}\n{"who": "root"')
    assert path.stat().st_size < 1000


def test_who_is_refused_cannot_push_the_acts_out(tmp_path: Path) -> None:
    path, now_s = tmp_path / "audit.log", 1000.0
    audit = Audit(path, lambda: now_s)
    audit.write("anna", "unix", "deploy", "chat", "ok")
    for _ in range(10_000):
        audit.write("anybody", "1.2.3.4:5", "rm", "chat", "unauthorized")
    assert len(lines(path)) == 1 + REFUSED_AT_ONCE
    audit.write("anna", "unix", "rm", "chat", "ok")
    assert lines(path)[-1]["refused_and_left_out"] == 10_000 - REFUSED_AT_ONCE
    audit.write("anna", "unix", "rm", "chat", "ok")
    assert "refused_and_left_out" not in lines(path)[-1]
    now_s += 10.0
    audit.write("anybody", "1.2.3.4:5", "rm", "chat", "unauthorized")
    assert lines(path)[-1]["who"] == "anybody"


def test_a_clock_that_is_set_hides_no_refusals(tmp_path: Path) -> None:
    path, now_s = tmp_path / "audit.log", 10.0**9
    audit = Audit(path, lambda: now_s)
    audit.write("anybody", "1.2.3.4:5", "rm", "chat", "unauthorized")
    now_s -= 86_400.0
    audit.write("anybody", "1.2.3.4:5", "rm", "chat", "unauthorized")
    assert [line["at"][:10] for line in lines(path)] == ["2001-09-09", "2001-09-08"]


def test_files_are_bounded_and_turned_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_, "FILE_NBYTES", 1000)
    path = tmp_path / "audit.log"
    audit = Audit(path)
    for number in range(200):
        audit.write("anna", "unix", "deploy", f"f{number}", "ok")
    assert sorted(os.listdir(tmp_path)) == ["audit.log", *(f"audit.log.{n}" for n in range(1, FILES))]
    assert all(entry.stat().st_size <= 1000 for entry in tmp_path.iterdir())
    assert lines(path)[-1]["name"] == "f199"
    assert int(lines(tmp_path / "audit.log.1")[-1]["name"][1:]) == int(lines(path)[0]["name"][1:]) - 1


def test_a_disk_that_takes_nothing_holds_nothing_up(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    path.mkdir()
    audit = Audit(path)
    audit.write("anna", "unix", "deploy", "chat", "ok")
    assert audit.trouble == f"{path}: Is a directory"
    path.rmdir()
    audit.write("anna", "unix", "deploy", "chat", "ok")
    assert audit.trouble is None


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_what_root_writes_in_the_directory_of_another_user_is_that_users(tmp_path: Path) -> None:
    """Else that user's node could not write it any more."""
    for owner in (0, 4242):
        os.chown(tmp_path, owner, owner)
        for name in ("audit.log", "keys.json"):
            (tmp_path / name).unlink(missing_ok=True)
        Audit(tmp_path / "audit.log").write("root", "unix", "deploy", "chat", "ok")
        KeyFile(tmp_path / "keys.json").create(Wish(), "root", 1000.0)
        files = [(tmp_path / name).stat() for name in ("audit.log", "keys.json")]
        assert [(file.st_uid, file.st_gid, stat.S_IMODE(file.st_mode)) for file in files] == [(owner, owner, 0o600)] * 2


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    path, other = tmp_path / "audit.log", tmp_path / "other"
    path.symlink_to(other)
    Audit(path).write("anna", "unix", "deploy", "chat", "ok")
    assert not other.exists()


def test_a_start_says_which_settings_are_others_than_at_the_one_before(tmp_path: Path) -> None:
    state = StatePaths(tmp_path)
    state.make()
    index = "https://me:password@files.example/simple"
    first = NodeConfig(environments=EnvironmentsSection(index=index))
    opened = structs.replace(first, node=NodeSection(open_loopback=True, cors=("https://app.example",)))
    for config, act in ((first, "up"), (first, "up"), (opened, "up --replace"), (first, "up")):
        startaudit.started(state, config, act)
    rows = audit_.read(state.audit, 0.0)
    changed = {"node.cors": [[], ["https://app.example"]], "node.open_loopback": [False, True]}
    undone = {"node.cors": [["https://app.example"], []], "node.open_loopback": [True, False]}
    assert [(row["act"], row["settings"]) for row in rows] == [
        ("up", {}),
        ("up", {}),
        ("up --replace", changed),
        ("up", undone),
    ]
    assert all((row["who"], row["name"], row["outcome"]) == (user_name(), "default", "ok") for row in rows)
    assert "password" not in state.settings.read_text()
    assert audit_.read(state.audit, 4e9) == []
