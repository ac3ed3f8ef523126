"""Prices, times and sums of `dormouse cost`: what is written wrong is named."""

import math
from pathlib import Path
from typing import Any

import pytest

from dormouse.core.prices import GIB, Prices, bill, load_prices, parse_prices, parse_since
from dormouse.schemas.errors import ConfigError

ROW: dict[str, Any] = {
    "requests": 2, "prompt_tokens": 3_000_000, "made_tokens": 500_000, "gpu_s": 10.0, "weights_nbyte_s": 4.0 * GIB,
    "kv_nbyte_s": 2.0 * GIB, "activations_nbyte_s": 1.0 * GIB, "adapter_nbyte_s": 1.0 * GIB, "host_nbyte_s": 16.0 * GIB,
}  # fmt: skip
NOW_S = 1_764_000_000.0


def test_what_use_costs() -> None:
    prices = Prices(gpu_s=0.5, gpu_gib_s=0.25, host_gib_s=0.125, prompt_tokens_1m=2, completion_tokens_1m=8)
    rows = [{"tenant": tenant, "function": name} | ROW for tenant, name in (("a", "f"), ("a", "g"), ("b", "h"))]
    billed = bill(rows, prices)
    assert billed["functions"][0]["cost"] == {
        "gpu": 5.0,
        "gpu_memory": 2.0,
        "host_memory": 2.0,
        "tokens": 10.0,
        "total": 19.0,
    }
    assert [(each["tenant"], each["cost"]["total"], each["requests"]) for each in billed["tenants"]] == [
        ("a", 38.0, 4),
        ("b", 19.0, 2),
    ]
    assert billed["total"]["cost"]["total"] == 57.0
    assert billed["total"]["gpu_s"] == 30.0
    assert bill([], prices)["total"]["cost"]["total"] == 0.0


def test_missing_prices_are_nothing(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text('currency = "EUR"\ngpu_s = 1\n')
    prices = load_prices(path)
    assert prices == Prices(currency="EUR", gpu_s=1.0)
    assert bill([{"tenant": "a", "function": "f"} | ROW], prices)["total"]["cost"]["total"] == 10.0


def test_the_example_is_one() -> None:
    prices = load_prices(Path(__file__).parents[2] / "examples" / "prices.toml")
    assert all(getattr(prices, name) for name in Prices.__struct_fields__)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("p.toml", b"gpu_s = ", "not TOML: "),
        ("p.toml", b"\xff", "not UTF-8 text"),
        ("p.json", b"{", "not JSON: "),
        ("p.json", b"[1]", "not a table of prices; write some of currency, gpu_s, gpu_gib_s"),
        ("p.json", b"[" * 100_000, "not JSON: "),
        ("p.toml", b"gpu_h = 1", "gpu_h is no price; write some of currency, gpu_s"),
        ("p.toml", b"gpu_s = -1", "gpu_s is -1; write a number of at least 0"),
        ("p.toml", b"gpu_s = nan", "gpu_s is nan; write a number of at least 0"),
        ("p.toml", b"gpu_s = inf", "gpu_s is inf; write a number of at least 0"),
        ("p.toml", b"gpu_s = true", "gpu_s is True; write a number"),
        ("p.toml", b'gpu_s = "1"', "gpu_s is '1'; write a number"),
        ("p.toml", b"currency = 1", "currency is 1; write its name in quotes"),
        ("p.toml", b"[gpu_s]\na = 1", "gpu_s is {'a': 1}; write a number"),
    ],
)
def test_files_that_are_no_prices(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        load_prices(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert says in str(raised.value)


def test_no_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there\.toml: No such file or directory; give the path of a file of prices"):
        load_prices(tmp_path / "there.toml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load_prices(tmp_path)
    assert parse_prices({}, "x") == Prices()


@pytest.mark.parametrize(
    ("text", "ago_s"), [("2h", 7200), ("30m", 1800), ("7d", 7 * 86_400), ("0d", 0), ("90s", 90), ("1500ms", 1.5)]
)
def test_how_long_ago(text: str, ago_s: float) -> None:
    assert parse_since(text, NOW_S) == NOW_S - ago_s


def test_a_time() -> None:
    assert parse_since("2025-11-24T10:00:00+00:00", NOW_S) == 1_763_978_400.0
    assert math.isclose(parse_since("2025-11-24", NOW_S), 1_763_942_400.0, abs_tol=86_400)
    assert parse_since("0001-01-02T00:00:00+00:00", NOW_S) == 0.0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("soon", "--since is 'soon'; write how long ago, such as 30m, 2h or 7d, or a time such as 2026-11-25T10:00"),
        ("", "--since is ''; write how long ago"),
        ("-2h", "--since is '-2h'; write how long ago"),
        ("2x", "--since is '2x'; write how long ago"),
        ("nan", "--since is 'nan'; write how long ago"),
        ("99999999h", "--since: 99999999h is too long; write at most a year"),
        ("2099-01-01", "--since is '2099-01-01', which is in the future; write a time that has been"),
        ("2025-13-01", "--since is '2025-13-01'; write how long ago"),
    ],
)
def test_times_that_cannot_be(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_since(text, NOW_S)
    assert str(raised.value).startswith(says)
