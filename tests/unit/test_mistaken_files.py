"""Files that are not what their names say: pointers, web pages, halves, other formats. Each is called what it is."""

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from adapter_folders import plain, read_folder
from language_models import make_folder
from model_folders import examine
from safetensors.torch import load_file

from dormouse.client_shim.llm import gguf_file
from dormouse.client_shim.llm.firstbytes import mistaken, weights_mistaken
from dormouse.client_shim.llm.folder import BadFolder, read_json, spec_of
from dormouse.client_shim.llm.model import Words
from dormouse.client_shim.llm.pooling import pooling_of

POINTER: Final = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
PAGE: Final = b"\n<!DOCTYPE html>\n<html><head><title>Hugging Face</title></head></html>"
MISTAKES: Final[dict[str, tuple[Callable[[bytes], bytes], str]]] = {
    "pointer": (lambda whole: POINTER, "is a Git LFS pointer, not the file itself: run `git lfs pull` in the folder"),
    "page": (lambda whole: PAGE, "is a web page, not the file itself: download that"),
    "empty": (lambda whole: b"", "is empty: download it again"),
    "zeros": (lambda whole: bytes(len(whole)), "zeros, as what a download has not reached: download it again"),
    "packed": (gzip.compress, "is a gzip archive: its name says something else"),
    "another": (lambda whole: b"GGUF" + bytes(400), "is a GGUF file: its name says something else"),
    "error": (lambda whole: b"Entry not found", "begins with 'Entry not found'"),
}


def _model(folder: Path) -> None:
    spec = spec_of(read_json(str(folder), "config.json"), "auto", 0)
    examine(folder)
    Words(str(folder), spec)


def _pickled(folder: Path) -> None:
    import torch

    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def _spoilt(folder: Path, name: str, spoil: Callable[[bytes], bytes], judge: Callable[[Path], Any]) -> str:
    whole = (folder / name).read_bytes()
    judge(folder)
    (folder / name).write_bytes(spoil(whole))
    with pytest.raises(BadFolder) as raised:
        judge(folder)
    assert name in str(raised.value)
    return str(raised.value)


_OF_MODELS: Final = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("name", [*_OF_MODELS, "model.safetensors"])
def test_files_of_models(tmp_path: Path, name: str, mistake: str) -> None:
    make_folder(tmp_path)
    assert MISTAKES[mistake][1] in _spoilt(tmp_path, name, MISTAKES[mistake][0], _model)


@pytest.mark.parametrize("name", _OF_MODELS)
def test_json_that_ends_in_the_middle(tmp_path: Path, name: str) -> None:
    make_folder(tmp_path)
    said = _spoilt(tmp_path, name, lambda whole: whole[: len(whole) // 2], _model)
    assert "it ends in the middle; download it again" in said


@pytest.mark.parametrize("mistake", MISTAKES)
def test_pickles(tmp_path: Path, mistake: str) -> None:
    make_folder(tmp_path)
    _pickled(tmp_path)
    spoil, what = MISTAKES[mistake]
    assert what in _spoilt(tmp_path, "pytorch_model.bin", spoil, lambda folder: examine(folder, convert=True))


def test_a_pickle_that_ends_in_the_middle(tmp_path: Path) -> None:
    make_folder(tmp_path)
    _pickled(tmp_path)
    said = _spoilt(tmp_path, "pytorch_model.bin", lambda whole: whole[:-100], lambda f: examine(f, convert=True))
    assert "is truncated" in said


@pytest.mark.parametrize("mistake", sorted(MISTAKES.keys() - {"another"}))
def test_gguf(tmp_path: Path, mistake: str) -> None:
    pytest.importorskip("gguf", reason="needs gguf: make setup")
    from gguf_files import write_gguf

    write_gguf(tmp_path / "m.gguf")
    spoil, what = MISTAKES[mistake]
    assert what in _spoilt(tmp_path, "m.gguf", spoil, lambda folder: gguf_file.gguf_config(str(folder), "m.gguf"))


def test_one_part_of_several_of_gguf(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs gguf: make setup")
    from gguf_files import write_gguf

    write_gguf(tmp_path / "m.gguf", split__count=3)
    with pytest.raises(BadFolder, match="one of 3 parts of a model: join them with"):
        gguf_file.gguf_config(str(tmp_path), "m.gguf")


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_adapters(tmp_path: Path, name: str, mistake: str) -> None:
    plain(tmp_path)
    spoil, what = MISTAKES[mistake]
    assert what in _spoilt(tmp_path, name, spoil, lambda folder: read_folder(folder, num_hidden_layers=1))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_how_embeddings_are_pooled(tmp_path: Path, mistake: str) -> None:
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    kinds = '[{"type": "a.Transformer", "path": ""}, {"type": "a.Pooling", "path": "1_Pooling"}]'
    (tmp_path / "modules.json").write_text(kinds)
    spoil, what = MISTAKES[mistake]
    assert what in _spoilt(tmp_path, "modules.json", spoil, lambda folder: pooling_of(str(folder), False))


def test_texts_of_a_tokenizer_are_no_reason() -> None:
    assert mistaken(b"#version: 0.2\nQ Z\n", 18) == ""
    assert mistaken(b"{%- for m in messages %}<html>", 30) == ""
    assert mistaken(b"\x80\x02", 2, "pickle") == ""
    assert "is a pickle" in mistaken(b"\x80\x04", 2, "safetensors file")
    assert "is a safetensors file" in weights_mistaken(b"\x40" + bytes(7) + b'{"a": 1}', 16, "GGUF file")
