"""Secrets that are being removed, and those of functions that are being deployed."""

import asyncio
import fcntl
import json
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from router_rig import spec

from dormouse.core.decisions.requests.state import OpenDeploy, RouterState
from dormouse.core.secretfile import SecretFile
from dormouse.router.access.access import Caller
from dormouse.router.admin.filechanges import FileChanges
from dormouse.router.admin.vault import Vault, variables_file
from dormouse.router.front.exchange import HttpError
from dormouse.schemas import admin as a
from dormouse.schemas.errors import ConfigError
from dormouse.schemas.messages import FunctionSpec

WAIT_S = 60
ROOT = Caller("root", 0, "unix", frozenset({"deploy", "admin"}))
REMOVAL = a.RemoveSecret(name="TOKEN", tenant="default")
USER = spec(secrets=("TOKEN",))


@pytest.fixture
def changes() -> Iterator[FileChanges]:
    found = FileChanges()
    yield found
    found.close()


@pytest.fixture
def file(tmp_path: Path) -> SecretFile:
    found = SecretFile(tmp_path / "secrets.json", tmp_path / "secrets.key")
    found.set("default", "TOKEN", "a value", "root", 0.0)
    return found


def _code(vault: Vault, wanted: FunctionSpec = USER) -> str:
    """Of the refusal of a deploy with it."""
    try:
        vault.has(wanted)
    except HttpError as error:
        return error.failure.code
    return ""


def test_a_secret_that_is_being_removed_is_given_to_nobody_though_its_caller_leaves(
    file: SecretFile, changes: FileChanges
) -> None:
    async def removes() -> None:
        vault, lets = Vault(file, RouterState(2, 100, "i"), changes), threading.Event()
        before = asyncio.ensure_future(changes.make("secrets", lets.wait, WAIT_S))
        await asyncio.sleep(0)
        first = asyncio.ensure_future(vault.call(ROOT, REMOVAL))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert _code(vault) == "unknown_secret"
        with pytest.raises(ConfigError, match="has no secret 'TOKEN'"):
            vault.values(USER)
        first.cancel()
        await asyncio.wait((first,))
        assert (first.cancelled(), _code(vault)) == (True, "unknown_secret")
        second = asyncio.ensure_future(vault.call(ROOT, REMOVAL))
        lets.set()
        assert await before
        with pytest.raises(HttpError, match="has no secret 'TOKEN'"):
            await second
        assert file.names("default") == set()
        await vault.call(ROOT, a.SetSecret(name="TOKEN", value="another", tenant="default"))
        assert _code(vault) == ""
        assert vault.values(USER) == {"TOKEN": "another"}

    asyncio.run(removes())


def test_the_file_of_an_instances_variables_is_sealed() -> None:
    fd = variables_file(spec(env=(("MODE", "fast"),)), {"TOKEN": "a value"})
    try:
        assert json.loads(os.pread(fd, 1000, 0)) == {"MODE": "fast", "TOKEN": "a value"}
        for change in (lambda: os.pwrite(fd, b"x", 0), lambda: os.ftruncate(fd, 0), lambda: os.ftruncate(fd, 1000)):
            with pytest.raises(PermissionError):
                change()
        with pytest.raises(PermissionError):
            mmap.mmap(fd, 0)
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 0)
        busy = "a busy kernel refuses that seal for a moment, and the instance would not start"
        assert not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE, busy
    finally:
        os.close(fd)
    assert variables_file(spec(), {}) == -1


def test_a_secret_of_a_function_that_is_being_deployed_is_used(file: SecretFile, changes: FileChanges) -> None:
    picture = RouterState(2, 100, "i")
    picture.changes["f"] = OpenDeploy(1, USER)
    vault = Vault(file, picture, changes)
    with pytest.raises(HttpError, match="'TOKEN' is used by f;") as refused:
        asyncio.run(vault.call(ROOT, REMOVAL))
    assert (refused.value.failure.code, file.names("default")) == ("secret_used", {"TOKEN"})
    del picture.changes["f"]
    assert asyncio.run(vault.call(ROOT, REMOVAL)) == {"removed": "TOKEN", "tenant": "default"}
