"""Where a node may listen, and the certificates that it takes."""

from pathlib import Path
from typing import Any

import pytest

from dormouse.core import exposure
from dormouse.core.config import NodeConfig, NodeSection
from dormouse.core.keys import KeyFile
from dormouse.core.nodefile import parse_config
from dormouse.core.paths import StatePaths
from dormouse.schemas.admin import Wish
from dormouse.schemas.errors import ConfigError, Unsafe

CERTIFICATE = Path(__file__).parents[1] / "certificate"
CERT, KEY, OTHER_KEY, LOCKED_KEY = (
    str(CERTIFICATE / name) for name in ("cert.pem", "key.pem", "other-key.pem", "locked-key.pem")
)
TLS = {"tls_cert": CERT, "tls_key": KEY}
PROXY = {"behind_proxy": True}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_nothing(host: str) -> None:
    assert exposure.refusal(NodeSection(host=host), has_key=False) is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "node.lan", "localhost.evil.example", ""])
def test_d10_another_address_needs_a_key_and_a_closed_channel(host: str) -> None:
    def said(has_key: bool, **node: Any) -> str:
        return exposure.refusal(NodeSection(host=host, **node), has_key) or ""

    assert "keys create" in said(False)
    assert "tls_cert" in said(False)
    assert "keys create" in said(False, **TLS)
    assert "tls_cert" not in said(False, **TLS)
    assert "keys create" not in said(True)
    assert "behind_proxy = true" in said(True)
    assert said(True, **TLS) == said(True, **PROXY) == ""
    assert "keys create" in said(False, **PROXY)


@pytest.mark.parametrize(
    ("tls", "says"),
    [
        ({"tls_cert": "/nowhere.pem", "tls_key": KEY}, "tls_cert /nowhere.pem: No such file"),
        ({"tls_cert": CERT, "tls_key": "/nowhere.pem"}, "tls_key /nowhere.pem: No such file"),
        ({"tls_cert": CERT, "tls_key": OTHER_KEY}, "KEY_VALUES_MISMATCH"),
        ({"tls_cert": KEY, "tls_key": KEY}, "cannot be used together"),
        ({"tls_cert": CERT, "tls_key": CERT}, "cannot be used together"),
        ({"tls_cert": CERT, "tls_key": LOCKED_KEY}, "without a password"),
    ],
)
def test_files_that_are_no_certificate(tls: dict[str, str], says: str) -> None:
    assert says in (exposure.refusal(NodeSection(**tls), has_key=True) or "")  # type: ignore[arg-type]


def test_what_counts_is_a_key_that_is_not_revoked(tmp_path: Path) -> None:
    config = NodeConfig(node=NodeSection(host="0.0.0.0", state=str(tmp_path), behind_proxy=True))
    with pytest.raises(Unsafe, match="keys create"):
        exposure.check(config)
    keys = KeyFile(StatePaths(tmp_path).keys)
    key, _ = keys.create(Wish(), "tester", 1.0)
    exposure.check(config)
    keys.revoke(key.id, 2.0)
    with pytest.raises(Unsafe, match="keys create"):
        exposure.check(config)


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"hosts": ["http://node.lan"]}, "hosts has 'http://node.lan'; write names or addresses"),
        ({"hosts": ["node.lan:8700"]}, "hosts has"),
        ({"hosts": ["*"]}, "hosts has"),
        ({"hosts": [""]}, "hosts has"),
        ({"cors": ["*"]}, "cors has"),
        ({"cors": ["app.example"]}, "cors has"),
        ({"cors": ["https://app.example/"]}, "cors has"),
        ({"cors": ["null"]}, "cors has"),
        ({"tls_cert": "cert.pem", "tls_key": "/key.pem"}, "tls_cert is 'cert.pem'; write an absolute path"),
        ({"tls_cert": "/cert.pem"}, "tls_key is missing"),
        ({"tls_key": "/key.pem"}, "tls_cert is missing"),
        ({"open_loopback": True, "behind_proxy": True}, "open_loopback is for a node that only this machine reaches"),
        ({"open_loopback": True, "host": "0.0.0.0"}, "open_loopback is for"),
    ],
)
def test_slips(section: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=r"node\.") as raised:
        parse_config({"node": section})
    assert f"node.{says}" in str(raised.value)


def test_what_may_be_written() -> None:
    node = parse_config(
        {
            "node": {
                "hosts": ["node.lan", "10.0.0.7", "fe80::1"],
                "cors": ["https://app.example", "http://localhost:3000", "http://[::1]:3000"],
                "open_loopback": True,
            }
        }
    ).node
    assert node.hosts == ("node.lan", "10.0.0.7", "fe80::1")
