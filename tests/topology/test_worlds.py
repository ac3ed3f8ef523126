"""Zygotes of several worlds at once: real interpreters, one of them a second environment, and real confined children.

These worlds have no torch. That of functions is in test_zygote.py, and beside others in test_worlds_node.py.
"""

import os
import signal
import sys
from pathlib import Path

import pytest
from worlds_rig import WAIT_S, first_world, make_second_python, rig, second_world

from dormouse.core.sandbox.world import World

COLD = True  # zygotes of other interpreters


@pytest.fixture(scope="module")
def second_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_second_python(tmp_path_factory.mktemp("second") / "env")


def test_two_worlds_at_once_each_with_its_own_interpreter_and_modules(tmp_path: Path, second_python: str) -> None:
    with rig(tmp_path, first_world(), second_world(second_python)) as made:
        zygotes = [made.zygote("first"), made.zygote("second")]
        one, other = (zygote.fork().ask() for zygote in zygotes)
        again = zygotes[0].fork().ask()  # while the other world's child lives
        assert (one["executable"], one["prefix"]) == (sys.executable, sys.prefix)
        assert other["executable"] == second_python
        assert other["prefix"] == os.path.dirname(os.path.dirname(second_python)) != sys.prefix
        assert one["preloaded"] == again["preloaded"] == ["world_of_first"]
        assert other["preloaded"] == ["world_of_second"]
        assert one["imported before the fork"]
        assert other["imported before the fork"]
        assert (one["prepared"], other["prepared"]) == (False, True)
        assert one["confined"] == other["confined"] == again["confined"]
        assert made.errors("zygote.first") == made.errors("zygote.second") == ""


def test_a_child_of_any_world_is_confined(tmp_path: Path, second_python: str) -> None:
    with rig(tmp_path, second_world(second_python)) as made:
        zygote = made.zygote("second")
        zygote.fork()  # a neighbour
        said = zygote.fork().ask()
        found, level = said["confined"], zygote.level
        assert found["level"] == level
        if "trusted functions only" in level:
            pytest.skip("needs a host that allows namespaces or uids of our own")
        assert found["own uid"]
        assert found["status"]["NoNewPrivs"] == "1"
        assert {int(found["status"][name], 16) for name in ("CapEff", "CapPrm")} == {0}
        assert found["status"]["Seccomp"] == ("2" if "seccomp" in level else "0")
        assert "AWS_SECRET" not in found["environment"]
        assert found["shadow"] in ("FileNotFoundError", "PermissionError")
        if "+mount" in level:
            assert said["source"] == str(tmp_path / "function" / "secret.txt")  # its entry file, read before
            assert found["secret"] == "FileNotFoundError"
            assert found["neighbours"] == "set()"
            assert found["processes"] == 2, "itself and its init"
            assert not {name for name in found["devices"] if name.startswith(("nvidia", "sd", "vd"))}


def test_a_zygote_that_dies_takes_no_other_worlds_children_along(tmp_path: Path, second_python: str) -> None:
    with rig(tmp_path, first_world(), second_world(second_python)) as made:
        first, second = made.zygote("first"), made.zygote("second")
        lost, kept = first.fork(), second.fork()
        before = kept.ask()
        first.stop(signal.SIGKILL)
        lost.ended()
        assert kept.ask() == before
        successor = made.zygote("first", epoch=2)
        assert successor.fork().ask()["preloaded"] == ["world_of_first"]
        assert kept.ask() == before
        assert second.fork().ask()["confined"] == before["confined"]


def test_a_zygote_that_ends_takes_no_other_worlds_control_groups_along(tmp_path: Path, second_python: str) -> None:
    with rig(tmp_path, first_world(), second_world(second_python)) as made:
        first, second = made.zygote("first"), made.zygote("second")
        if "cgroup" not in second.level:
            pytest.skip("needs the right to make control groups")
        first.stop()
        assert second.fork().ask()["confined"]["level"] == second.level


@pytest.mark.parametrize(
    ("text", "entry", "words"),
    [
        ("", "world_of_none:live", "(ModuleNotFoundError: No module named 'world_of_none'); install it there, or have"),
        ("import nothing_of_that_name", "world_of_this:live", "(ModuleNotFoundError: No module named 'nothing_of_"),
        ("raise OSError('no licence')", "world_of_this:live", "(OSError: no licence); install it there, or have"),
        ("", "world_of_this:live", "needs world_of_this:live; define this function in world_of_this"),
    ],
)
def test_a_world_that_lacks_what_it_needs_says_so(text: str, entry: str, words: str, tmp_path: Path) -> None:
    with rig(tmp_path, World(name="poor", python=sys.executable, modules=("json",), entry=entry)) as made:
        (tmp_path / "modules" / "world_of_this.py").write_text(text)
        assert made.start(sys.executable, "zygote.poor", 1, {}).wait(WAIT_S) == 1
        said = made.errors("zygote.poor").strip().splitlines()
        assert said[-1].startswith("dormouse: the world 'poor' needs world_of_")
        assert words in said[-1]
        assert len(said) == 1 or "OSError: no licence" in said[-2], said  # a traceback only where there is more to know
