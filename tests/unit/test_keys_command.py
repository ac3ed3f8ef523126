"""`dormouse keys` without a node: on its state directory, never beside one that runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from dormouse.core.cli import keyscommand
from dormouse.core.cli.keyscommand import Target
from dormouse.core.directories import lock, open_directory
from dormouse.core.keys import KeyFile
from dormouse.core.node.refusals import CallRefused, Unreachable
from dormouse.schemas.errors import ConfigError


@pytest.fixture
def target(tmp_path: Path) -> Target:
    file = tmp_path / "node.toml"
    file.write_text(f'[node]\nrun = "{tmp_path}/run"\nstate = "{tmp_path}/state"\n')
    return Target(None, None, str(file))


def options(**given: Any) -> dict[str, Any]:
    """As the command line gives them: what was not said is empty."""
    return {"scopes": (), "functions": (), "tenant": None, "rate_s": 0.0, "burst": 0, "note": ""} | given


def test_from_making_to_revoking(target: Target, tmp_path: Path) -> None:
    made = keyscommand.create(target, options(scopes=("deploy",), functions=("a-*",), note="x"))
    found = KeyFile(tmp_path / "state" / "keys.json").find(made["key"].encode())
    assert found is not None
    assert (found.scopes, found.functions, found.tenant) == (("deploy",), ("a-*",), "default")
    (row,) = keyscommand.ls(target)
    assert row == {name: value for name, value in made.items() if name != "key"}
    assert keyscommand.revoke(target, made["id"])["revoked"] is not None
    with pytest.raises(CallRefused, match="there is no key 'nobody'"):
        keyscommand.revoke(target, "nobody")
    audit = (tmp_path / "state" / "logs" / "audit.log").read_text().splitlines()
    said = [(line["act"], line["name"], line["outcome"], line["from"]) for line in map(json.loads, audit)]
    assert said == [
        ("keys create", made["id"], "ok", "the state directory"),
        ("keys revoke", made["id"], "ok", "the state directory"),
        ("keys revoke", "nobody", "unknown_key", "the state directory"),
    ]
    assert not (tmp_path / "run").exists()


def test_not_beside_a_node_that_runs(target: Target, tmp_path: Path) -> None:
    """It would not know of the key, and overwrite it."""
    fd = open_directory(tmp_path / "state", "state directory", 0o700)
    assert fd is not None
    lock(fd, tmp_path / "state", "state directory")
    with pytest.raises(ConfigError, match="in use by a running node"):
        keyscommand.create(target, options())
    assert not (tmp_path / "state" / "keys.json").exists()


def test_a_run_directory_says_nothing_of_the_keys_of_a_node_that_does_not_run(tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match=r"give --config NODE\.toml"):
        keyscommand.create(Target(str(tmp_path), None, None), options())
