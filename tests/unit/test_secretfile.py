"""The file of secrets: nothing of a value is in it, and only the node's key opens it."""

import json
from pathlib import Path

import msgspec
import pytest

from dormouse.core.secretfile import MAX_NBYTES, SecretFile
from dormouse.schemas.errors import ConfigError

VALUE = "hf_do-not-tell-é"


@pytest.fixture
def file(tmp_path: Path) -> SecretFile:
    found = SecretFile(tmp_path / "secrets.json", tmp_path / "secrets.key")
    found.set("shop", "TOKEN", VALUE, "root", 1764061200.0)
    return found


def _complaint(file: SecretFile, *names: str, tenant: str = "shop") -> str:
    with pytest.raises(ConfigError) as caught:
        file.values(tenant, names)
    return str(caught.value)


def test_a_value_is_sealed_and_comes_back(file: SecretFile, tmp_path: Path) -> None:
    assert file.values("shop", ["TOKEN"]) == {"TOKEN": VALUE}
    assert file.values("shop", []) == {}
    assert [each.shown() for each in file.all()] == [
        {"name": "TOKEN", "tenant": "shop", "set": "2025-11-25T09:00:00Z", "set_by": "root"}
    ]
    for path in tmp_path.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600
        assert VALUE.encode() not in path.read_bytes()
    assert VALUE not in repr(file.all())


def test_a_secret_is_its_tenants_alone(file: SecretFile) -> None:
    assert _complaint(file, "TOKEN", tenant="other").startswith("tenant 'other' has no secret 'TOKEN'")
    assert not file.remove("other", "TOKEN")
    assert file.remove("shop", "TOKEN")
    assert file.names("shop") == set()


def test_a_value_cannot_be_given_another_name(file: SecretFile, tmp_path: Path) -> None:
    """By who can write the file, but does not have the key."""
    path = tmp_path / "secrets.json"
    path.write_text(path.read_text().replace('"shop"', '"thief"'))
    assert "was not sealed with the key" in _complaint(file, "TOKEN", tenant="thief")


@pytest.mark.parametrize("key", [b"", b"short", b"x" * 32])
def test_another_key_opens_nothing(file: SecretFile, tmp_path: Path, key: bytes) -> None:
    (tmp_path / "secrets.key").write_bytes(key)
    assert str(tmp_path / "secrets.key") in _complaint(file, "TOKEN")


def test_a_lost_key_is_not_made_anew(file: SecretFile, tmp_path: Path) -> None:
    """Else the secrets of before could be opened by no key, and nobody would know why."""
    (tmp_path / "secrets.key").unlink()
    assert "restore it" in _complaint(file, "TOKEN")
    with pytest.raises(ConfigError, match="restore it"):
        file.set("shop", "OTHER", VALUE, "root", 0.0)


@pytest.mark.parametrize("text", ["", "[", "[{}]", '{"a": 1}'])
def test_a_damaged_file_is_named(file: SecretFile, tmp_path: Path, text: str) -> None:
    (tmp_path / "secrets.json").write_text(text)
    assert "set the secrets anew" in _complaint(file, "TOKEN")


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("1TOKEN", VALUE, "cannot be a secret's name"),
        ("A=B", VALUE, "cannot be a secret's name"),
        ("TOKEN", "abc", "4 to 32,768 bytes"),
        ("TOKEN", "ab\0cdef", "without NUL"),
        ("TOKEN", "x" * (MAX_NBYTES + 1), "this has 32,769"),
    ],
)
def test_what_cannot_be_a_secret_is_refused(file: SecretFile, name: str, value: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        file.set("shop", name, value, "root", 0.0)
    assert file.values("shop", ["TOKEN"]) == {"TOKEN": VALUE}


def test_a_tenant_has_only_so_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dormouse.core.secretfile.MAX_SECRETS", 2)
    file = SecretFile(tmp_path / "secrets.json", tmp_path / "secrets.key")
    for name in ("A", "B", "B"):
        file.set("shop", name, VALUE, "root", 0.0)
    with pytest.raises(ConfigError, match="has 2 secrets"):
        file.set("shop", "C", VALUE, "root", 0.0)
    file.set("other", "C", VALUE, "root", 0.0)
    assert len(json.loads((tmp_path / "secrets.json").read_text())) == 3


def test_a_tenants_secrets_together_have_a_bound(tmp_path: Path) -> None:
    file = SecretFile(tmp_path / "secrets.json", tmp_path / "secrets.key")
    for number in range(23):  # sealed, each has a third more
        file.set("shop", f"S{number}", "x" * MAX_NBYTES, "root", 0.0)
    with pytest.raises(ConfigError, match="may have 1,048,576; remove some"):
        file.set("shop", "ONE_MORE", "x" * MAX_NBYTES, "root", 0.0)
    file.set("shop", "S0", "as long as before, or less", "root", 0.0)
    file.set("other", "OTHERS", "x" * MAX_NBYTES, "root", 0.0)
    assert file.names("shop") == {f"S{number}" for number in range(23)}


def test_it_is_read_again_only_if_somebody_else_has_changed_it(
    file: SecretFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router's loop asks for names with each deploy, and for values with each instance."""
    path, other = tmp_path / "secrets.json", SecretFile(tmp_path / "secrets.json", tmp_path / "secrets.key")
    assert other.names("shop") == {"TOKEN"}
    with monkeypatch.context() as context:
        context.setattr(msgspec.json, "decode", lambda *_, **__: pytest.fail("it is read"))
        file.set("shop", "MORE", VALUE, "root", 0.0)
        assert file.names("shop") == {"TOKEN", "MORE"}
        assert file.values("shop", ["MORE"]) == {"MORE": VALUE}
        assert file.remove("shop", "TOKEN")
        assert [each.name for each in file.all()] == ["MORE"]
    assert other.names("shop") == {"MORE"}
    kept = path.read_bytes()
    path.unlink()
    assert (file.names("shop"), other.names("shop")) == (set(), set())
    path.write_bytes(kept)
    assert (file.names("shop"), other.names("shop")) == ({"MORE"}, {"MORE"})
