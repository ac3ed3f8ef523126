"""API keys: what is made, what is kept of it, and what its file survives."""

import json
import stat
from pathlib import Path

import pytest

from dormouse.core import keys as keys_module
from dormouse.core.keys import MAX_REVOKED, Key, KeyFile
from dormouse.schemas.admin import Wish
from dormouse.schemas.errors import ConfigError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def made(keys: KeyFile, wish: Wish | None = None, now_s: float = 1000.0) -> tuple[Key, str]:
    return keys.create(wish or Wish(), "user tester", now_s)


def test_a_token_finds_its_key_and_nothing_else_does(path: Path) -> None:
    keys = KeyFile(path)
    key, token = made(keys)
    other, other_token = made(keys)
    assert keys.find(token.encode()) == key
    assert keys.find(other_token.encode()) == other
    swapped = f"dm_{key.id}_{other_token.rsplit('_')[2]}"
    last = "0" if token[-1] != "0" else "1"
    for wrong in (swapped, token[:-1], token[:-1] + last, token + "0", token.upper(), f"dm_{key.id}_", "", "dm_"):
        assert keys.find(wrong.encode()) is None, wrong


def test_the_secret_is_nowhere_and_the_file_is_its_owners(path: Path) -> None:
    keys = KeyFile(path)
    key, token = made(keys)
    secret = token.rsplit("_")[2]
    assert len(bytes.fromhex(secret)) * 8 == 160
    assert secret not in path.read_text()
    assert secret not in repr(key)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["keys.json"]


def test_a_restart_knows_the_keys_and_what_was_revoked(path: Path) -> None:
    keys = KeyFile(path)
    kept, token = made(keys, Wish(scopes=("deploy", "invoke"), functions=("a", "b-*"), tenant="t", rate_s=2, note="x"))
    gone, gone_token = made(keys)
    assert keys.revoke(gone.id, 2000.0) is not None
    again = KeyFile(path)
    assert again.all() == keys.all()
    assert again.find(token.encode()) == kept
    assert again.find(gone_token.encode()) is None
    assert kept.scopes == ("invoke", "deploy")
    assert (kept.tenant, kept.rate_s, kept.burst) == ("t", 2.0, 2)


def test_who_has_ever_made_a_key_wants_keys(path: Path) -> None:
    """Else revoking the last one would open the node to everybody."""
    keys = KeyFile(path)
    assert (keys.wanted, keys.usable) == (False, False)
    key, _ = made(keys)
    assert (keys.wanted, keys.usable) == (True, True)
    keys.revoke(key.id, 2000.0)
    assert (keys.wanted, keys.usable) == (True, False)
    assert (KeyFile(path).wanted, KeyFile(path).usable) == (True, False)


def test_revoking_again_changes_nothing(path: Path) -> None:
    keys = KeyFile(path)
    key, _ = made(keys)
    first = keys.revoke(key.id, 2000.0)
    assert keys.revoke(key.id, 3000.0) == first
    assert keys.revoke("nobody", 2000.0) is None


def test_revoked_keys_are_remembered_up_to_a_bound(path: Path) -> None:
    keys = KeyFile(path)
    key, _ = made(keys)
    rows = [json.loads(path.read_text())[0] | {"id": f"{n:012x}", "revoked_s": float(n)} for n in range(MAX_REVOKED)]
    path.write_text(json.dumps([*rows, json.loads(path.read_text())[0]]))
    keys = KeyFile(path)
    keys.revoke(key.id, 1e9)
    assert len(keys.all()) == MAX_REVOKED
    assert f"{0:012x}" not in {each.id for each in keys.all()}
    assert key.id in {each.id for each in keys.all()}


@pytest.mark.parametrize("text", ["", "{}", "[{}]", '[{"id": 1}]', "\x00", '[{"scopes": ["root"]}]'])
def test_a_damaged_file_opens_nothing(path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"restore it from a copy"):
        KeyFile(path)


@pytest.mark.parametrize(
    ("wish", "says"),
    [
        (Wish(scopes=()), "needs a scope"),
        (Wish(functions=()), "1 to 64 functions"),
        (Wish(functions=("a b",)), "no function's name"),
        (Wish(functions=("a",) * 65), "1 to 64 functions"),
        (Wish(tenant="../x"), "cannot be a tenant's name"),
        (Wish(rate_s=-1), "numbers from 0"),
        (Wish(rate_s=float("nan")), "numbers from 0"),
        (Wish(rate_s=1e9), "numbers from 0"),
        (Wish(burst=5), "a burst needs a rate"),
        (Wish(note="two\nlines"), "one line"),
        (Wish(note="x" * 201), "one line"),
    ],
)
def test_what_cannot_be_a_key(path: Path, wish: Wish, says: str) -> None:
    keys = KeyFile(path)
    with pytest.raises(ConfigError, match=says):
        made(keys, wish)
    assert not path.exists()


def test_there_are_only_so_many_that_are_not_revoked(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys_module, "MAX_KEYS", 2)
    keys = KeyFile(path)
    first, _ = made(keys)
    made(keys)
    with pytest.raises(ConfigError, match="there are 2 keys; revoke some"):
        made(keys)
    assert len(keys.all()) == 2
    keys.revoke(first.id, 2000.0)
    made(keys)


def test_whose_functions_a_key_is_for(path: Path) -> None:
    keys = KeyFile(path)
    assert made(keys, Wish(scopes=("invoke", "deploy")))[0].tenant == "default"
    assert made(keys, Wish(scopes=("admin",)))[0].tenant is None
    assert made(keys, Wish(scopes=("admin",), tenant="t"))[0].tenant == "t"


def test_a_key_that_cannot_be_kept_is_not_made(path: Path) -> None:
    keys = KeyFile(path)
    path.with_name("keys.json.new").mkdir()  # in the way, as a disk that takes nothing is
    with pytest.raises(OSError, match=r"keys\.json\.new"):
        made(keys)
    assert keys.all() == []
    assert not path.exists()
