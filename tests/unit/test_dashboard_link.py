"""`dormouse dashboard`: other users of the machine do not see the link on its way into the browser."""

import stat
from pathlib import Path

import pytest

from dormouse.core.cli.dev import open_link

LINK = "http://127.0.0.1:8700/#ticket=dt_0123456789"
BROWSER = """#!/bin/sh
tr '\\0' ' ' < /proc/$$/cmdline > {folder}/arguments
path="${{1#file://}}"
stat -c %a "$path" "$(dirname "$path")" > {folder}/modes
cp "$path" {folder}/page
"""


def test_the_link_is_in_no_argument_and_in_a_file_for_its_user_that_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    browser = tmp_path / "browser"
    browser.write_text(BROWSER.format(folder=tmp_path))
    browser.chmod(stat.S_IRWXU)
    monkeypatch.setenv("BROWSER", f"{browser} %s")
    open_link(LINK, 0.0)
    arguments = (tmp_path / "arguments").read_text()
    assert "dt_0123456789" not in arguments
    assert (tmp_path / "modes").read_text().split() == ["600", "700"]
    assert f'content="0;url={LINK}"' in (tmp_path / "page").read_text()
    path = Path(arguments.split()[-1].removeprefix("file://"))
    assert path.name == "dashboard.html"
    assert not path.parent.exists()
