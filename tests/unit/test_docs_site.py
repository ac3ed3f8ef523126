"""`make docs`: the site has every page, command, setting, code, metric and message, needs no network, and bears no
broken link.
"""

import os
import re
import shutil
import subprocess
import sys
from html import unescape
from pathlib import Path

import click
import msgspec
import pytest

from dormouse.core.cli.main import cli
from dormouse.core.config import NodeConfig
from dormouse.schemas import messages

ROOT = Path(__file__).parents[2]
TAKEN = (
    "docs",
    "controller",
    "core/decisions",
    "core/requirements.py",
    "core/sandbox/builder.py",
    "examples/adapters",
    "router",
    "schemas/messages",
    "scripts/docs",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As much of this one as the site is made of."""
    pytest.importorskip("mkdocs", reason="needs mkdocs: make docs")
    place = tmp_path_factory.mktemp("site")
    for name in TAKEN:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, place / name)
        else:
            shutil.copy(ROOT / name, place / name)
    return place


def made(checkout: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(checkout / "scripts" / "docs")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


@pytest.fixture(scope="module")
def site(checkout: Path) -> Path:
    done = made(checkout)
    assert done.returncode == 0, done.stderr
    return checkout / "build" / "docs" / "site"


def test_every_page_is_there(site: Path) -> None:
    pages = {str(page.relative_to(ROOT / "docs").with_suffix(".html")) for page in (ROOT / "docs").rglob("*.md")}
    assert len(pages) > 25
    assert pages <= {str(page.relative_to(site)) for page in site.rglob("*.html")}


def test_the_reference_has_all_that_the_code_has(site: Path) -> None:
    commands, settings, declared = (
        unescape((site / "reference" / f"{name}.html").read_text()) for name in ("commands", "node-file", "messages")
    )
    for name, command in cli.commands.items():
        if not isinstance(command, click.Group):
            assert f"Usage: dormouse {name} " in commands
    for section in msgspec.structs.fields(NodeConfig):
        if section.name not in ("start", "tenants"):
            for setting in msgspec.structs.fields(section.type):
                assert f"<code>{setting.name}</code>" in settings
    kinds = [each for each in vars(messages).values() if isinstance(each, type) and issubclass(each, msgspec.Struct)]
    assert len(kinds) > 100
    for kind in kinds:
        if kind.__module__.startswith("dormouse.schemas.messages."):
            assert f"<code>{kind.__name__}</code>" in declared
    assert "default: $XDG_STATE_HOME/dormouse/<name>" in settings  # a comment, with what HTML would take for a tag


def test_the_reference_has_the_codes_and_the_metrics_that_the_guides_name(site: Path) -> None:
    """Where a guide names one that the code does not have, or the code says it in a way that was not read."""
    errors, metrics = (unescape((site / "reference" / f"{name}.html").read_text()) for name in ("errors", "metrics"))
    guide = (ROOT / "docs" / "http.md").read_text().partition("| status | code |")[2].partition("\n\n")[0]
    codes = {code for line in guide.splitlines()[2:] for code in re.findall(r"`(\w+)`", line.split("|")[2])}
    assert len(codes) > 30
    assert [code for code in codes if f"<td><code>{code}</code></td>" not in errors] == []
    assert "<td>503</td>\n<td><code>draining</code></td>" in errors
    assert "<td>the package index cannot be reached (…); [environments] index in the node file names it</td>" in errors
    table = (ROOT / "docs" / "metrics.md").read_text().partition("| `dormouse_…` |")[2].partition("\n\n")[0]
    names = {name for line in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert len(names) > 40
    assert [name for name in names if f"<code>dormouse_{name}</code>" not in metrics] == []
    assert len(re.findall(r"<code>dormouse_\w+</code>", metrics)) == len(names), "each one is in the guide"


def test_it_asks_no_other_host(site: Path) -> None:
    loaded = [
        address
        for page in site.rglob("*.html")
        for tag in re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", page.read_text())
        for address in re.findall(r"(?:src|href)=[\"']?([^\"' >]+)", tag)
    ]
    assert len(loaded) > 100
    assert [address for address in loaded if "//" in address] == []


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize("link", ["[x](nowhere.md)", "[x](streams.md#nowhere)"])
def test_a_broken_link_is_refused(checkout: Path, link: str) -> None:
    page = checkout / "docs" / "http.md"
    before = page.read_text()
    page.write_text(f"{before}\n{link}\n")
    try:
        done = made(checkout)
    finally:
        page.write_text(before)
    assert done.returncode == 1
    assert "nowhere" in done.stderr
