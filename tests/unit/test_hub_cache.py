"""Which folder ``--llm`` names, and which of its files travel: caches as huggingface_hub makes them, without a node."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from dormouse.core import folder, modelfolder
from dormouse.core.folder import FunctionFolder, NoFunction

COMMIT: Final = "0123456789abcdef0123456789abcdef01234567"
OTHER: Final = "f" * 40


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def put(cache: Path, *names: str, name: str = "org/small", commit: str = COMMIT, branch: str = "main") -> Path:
    """A snapshot as a download leaves it: links to blobs."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    for each in names:
        blob = repository / "blobs" / each.replace("/", "-")
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_text(each)
        link = snapshot / each
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    reference = repository / "refs" / branch
    reference.parent.mkdir(parents=True, exist_ok=True)
    reference.write_text(commit)
    return snapshot


def travelling(found: FunctionFolder) -> list[str]:
    names = []
    for name, fd in folder.files(found):
        os.close(fd)
        names.append(name)
    return names


def refused(text: str, convert: bool = False) -> str:
    with pytest.raises(NoFunction) as raised:
        travelling(modelfolder.find(text, convert))
    return str(raised.value)


WHOLE: Final = ("config.json", "tokenizer.json", "model.safetensors")


def test_a_model_of_the_cache(cache: Path) -> None:
    snapshot = put(cache, *WHOLE)
    found = modelfolder.find("hf:org/small")
    assert (found.folder, found.entry) == (snapshot, "config.json")
    assert travelling(found) == sorted(WHOLE)


def test_revisions_are_branches_tags_and_commits(cache: Path) -> None:
    old = put(cache, *WHOLE)
    new = put(cache, *WHOLE, commit=OTHER, branch="refs/pr/1")
    assert modelfolder.find("hf:org/small").folder == old
    assert modelfolder.find("hf:org/small@refs/pr/1").folder == new
    assert modelfolder.find(f"hf:org/small@{OTHER}").folder == new
    assert "has no revision v2" in refused("hf:org/small@v2")
    assert "hf download org/small --revision v2" in refused("hf:org/small@v2")


def test_what_is_not_there_is_said_with_where_and_how(cache: Path) -> None:
    text = refused("hf:org/other")
    assert str(cache / "models--org--other") in text
    assert "hf download org/other" in text
    put(cache, "config.json", "tokenizer.json")
    assert "has no weights" in refused("hf:org/small")
    assert "hf download org/small" in refused("hf:org/small")


@pytest.mark.parametrize(
    "name", ["", "org/../x", "../x", "org/small/more", "org--x", "org/small@", "org/small@../../x"]
)
def test_what_names_no_model(cache: Path, name: str) -> None:
    put(cache, *WHOLE)
    (cache / "models--org--small" / "x").write_text(COMMIT)
    assert "names no model" in refused(f"hf:{name}")


def test_a_reference_that_leads_elsewhere_is_none(cache: Path, tmp_path: Path) -> None:
    put(cache, *WHOLE)
    (tmp_path / "elsewhere").mkdir()
    for name in WHOLE:
        (tmp_path / "elsewhere" / name).touch()
    (cache / "models--org--small" / "refs" / "main").write_text("../../../elsewhere")
    assert "has no revision main" in refused("hf:org/small")


def test_links_that_lead_out_of_the_cache_are_not_followed(cache: Path, tmp_path: Path) -> None:
    snapshot = put(cache, *WHOLE)
    (tmp_path / "secret.json").write_text("{}")
    (snapshot / "generation_config.json").symlink_to(tmp_path / "secret.json")
    assert "outside of" in refused("hf:org/small")


def test_shared_blobs_of_the_cache_are_its_own(cache: Path) -> None:
    """Newer versions keep a file once for all models: the blob is a link, too."""
    put(cache, *WHOLE)
    blob = cache / "models--org--small" / "blobs" / "model.safetensors"
    shared = cache / "blobs" / "ab" / "abcd"
    shared.parent.mkdir(parents=True)
    blob.rename(shared)
    blob.symlink_to(os.path.relpath(shared, blob.parent))
    assert "model.safetensors" in travelling(modelfolder.find("hf:org/small"))


def test_of_all_that_a_hub_has_only_the_model_travels(tmp_path: Path) -> None:
    for name in (
        *WHOLE,
        *("README.md", "pytorch_model.bin", "model.onnx", "tf_model.h5", "consolidated.safetensors", "code.py"),
        *("onnx/model.safetensors", "1_Pooling/config.json", "a/b/deep.json", ".gitattributes", "merges.txt"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = modelfolder.find(str(tmp_path))
    assert sorted(travelling(found)) == sorted((*WHOLE, "1_Pooling/config.json", "merges.txt"))
    assert folder.left_out(found) == []


def test_pickled_weights_travel_if_asked_for(tmp_path: Path) -> None:
    for name in ("config.json", "pytorch_model.bin"):
        (tmp_path / name).touch()
    assert "--convert" in refused(str(tmp_path))
    assert sorted(travelling(modelfolder.find(str(tmp_path), True))) == ["config.json", "pytorch_model.bin"]


def test_gguf_files(tmp_path: Path) -> None:
    for name in ("small.gguf", "README.md", "config.json"):
        (tmp_path / name).touch()
    for text in (str(tmp_path), str(tmp_path / "small.gguf")):
        found = modelfolder.find(text)
        assert (found.entry, travelling(found)) == ("small.gguf", ["small.gguf"])
    (tmp_path / "large.gguf").touch()
    assert "large.gguf, small.gguf" in refused(str(tmp_path))
    assert travelling(modelfolder.find(str(tmp_path / "small.gguf"))) == ["small.gguf"]


def test_what_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "f.py").touch()
    assert "is not there" in refused(str(tmp_path / "nowhere"))
    assert "neither a folder nor a .gguf file" in refused(str(tmp_path / "f.py"))
    (tmp_path / "x.safetensors").touch()
    assert "no config.json" in refused(str(tmp_path))


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"XDG_CACHE_HOME": "/x"},
        {"HF_HOME": "/h", "XDG_CACHE_HOME": "/x"},
        {"HF_HOME": "~/h"},
        {"HF_HUB_CACHE": "/c", "HF_HOME": "/h"},
        {"HUGGINGFACE_HUB_CACHE": "/old", "HF_HOME": "/h"},
        {"HF_HUB_CACHE": "$HOME/c"},
    ],
)
def test_the_cache_is_where_huggingface_hub_has_it(environ: dict[str, str]) -> None:
    code = "from huggingface_hub import constants; print(constants.HF_HUB_CACHE)"
    clean = {"HOME": "/home/somebody", "PATH": os.environ["PATH"], **environ}
    theirs = subprocess.check_output([sys.executable, "-c", code], env=clean, text=True).strip()
    ours = subprocess.check_output(
        [
            sys.executable,
            "-c",
            "import os; from dormouse.core.modelfolder import hub_cache; print(hub_cache(os.environ))",
        ],
        env=clean,
        text=True,
    ).strip()
    assert ours == theirs


def test_huggingface_hub_finds_the_same_folder(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import snapshot_download

    put(cache, *WHOLE)
    put(cache, *WHOLE, commit=OTHER, branch="v2")
    find: Callable[..., str] = snapshot_download
    for revision in (None, "v2", OTHER):
        theirs = find("org/small", revision=revision, cache_dir=str(cache), local_files_only=True)
        assert str(modelfolder.find("hf:org/small" + (f"@{revision}" if revision else "")).folder) == theirs
