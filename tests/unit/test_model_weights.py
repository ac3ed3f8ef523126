"""The files that a language model's weights are in: untrue headers, shards, pickles, GGUF."""

import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from language_models import make_folder
from model_folders import change_config, examine, little_memory, refused
from safetensors.torch import load_file, save_file

from dormouse.client_shim.llm import checkpoint, gguf_file, loading, weights
from dormouse.client_shim.llm.folder import BadFolder, spec_of
from dormouse.client_shim.llm.gguf_fields import settled
from dormouse.schemas.llm import DecoderSpec


@pytest.fixture
def small() -> Iterator[None]:
    with little_memory():
        yield


# --- safetensors

Header = dict[str, Any]


def _rewrite(folder: Path, change: Callable[[Header], object]) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


NORM: Final = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda h: h[NORM].update(data_offsets=[0, 256]), "begins at"),
        (lambda h: h[NORM].update(data_offsets=[1 << 60, (1 << 60) + 256]), "begins at"),
        (lambda h: h[NORM].update(data_offsets=[-256, 0]), "is no size"),
        (lambda h: h[NORM].update(data_offsets=[1e300, 1e301]), "is no size"),
        (lambda h: h[NORM].update(data_offsets=[0]), "no safetensors file"),
        (lambda h: h[NORM].update(shape=[1 << 61, 1 << 61]), "has 256 of"),
        (lambda h: h[NORM].update(shape=[-64]), "is no size"),
        (lambda h: h[NORM].update(shape="64"), "no safetensors file"),
        (lambda h: h[NORM].update(dtype="F128"), "no safetensors file"),
        (lambda h: h[NORM].update(dtype="I32"), "quantized weights are not served"),
        (lambda h: h[NORM].update(shape=[8, 8]), "is \\[8, 8\\], its model wants \\[64\\]"),
        (lambda h: h.update({"a": 1}), "no safetensors file"),
        (lambda h: h.update({"model.norm.bias": h.pop(NORM)}), "'model.norm.bias', which this model does not"),
        (lambda h: h.update({"model.rotary_emb.inv_freq": h.pop(NORM)}), "the weights lack model.norm.weight$"),
    ],
)
def test_headers_that_do_not_say_the_truth(tmp_path: Path, small: None, change: Any, what: str) -> None:
    make_folder(tmp_path)
    _rewrite(tmp_path, change)
    with pytest.raises(BadFolder, match=what):
        examine(tmp_path)


def test_a_header_that_has_a_name_twice(tmp_path: Path) -> None:
    make_folder(tmp_path)
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    text = data[8 : 8 + length].strip()
    twice = text[:-1] + b"," + json.dumps(NORM).encode() + b":" + json.dumps(json.loads(text)[NORM]).encode() + b"}"
    path.write_bytes(struct.pack("<Q", len(twice)) + twice + data[8 + length :])
    assert f"it has '{NORM}' twice" in refused(tmp_path)


def test_files_that_are_truncated_or_none(tmp_path: Path) -> None:
    make_folder(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    for content, what in (
        (whole[:-100], "is truncated"),
        (whole + b"more", "is truncated"),
        (whole[:1000], "is truncated: it has 1,000 bytes, and its header alone "),
        (whole[:5], "is truncated: it has 5 bytes"),
        (b"", "is empty"),
        (struct.pack("<Q", 1 << 40) + b"{}", "no safetensors file"),
        (struct.pack("<Q", 2000) + b"[" * 2000, "no safetensors file"),
    ):
        path.write_bytes(content)
        assert what in refused(tmp_path)


def _shards(folder: Path) -> dict[str, str]:
    """The weights in two files; what the index says."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    said = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        said.update(dict.fromkeys(part, file))
    _index(folder, said)
    return said


def _index(folder: Path, weight_map: Any) -> None:
    (folder / checkpoint.INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_shards(tmp_path: Path) -> None:
    make_folder(tmp_path)
    whole = examine(tmp_path)
    said = _shards(tmp_path)
    assert examine(tmp_path) == whole
    first = "model-00001-of-00002.safetensors"
    (tmp_path / "link").symlink_to(tmp_path / first)
    for weight_map, what in (
        ({**said, NORM: "../outside.safetensors"}, "is no file of the folder"),
        ({**said, NORM: "/etc/passwd"}, "is no file of the folder"),
        ({**said, NORM: ".."}, "is no file of the folder"),
        ({**said, NORM: "other.safetensors"}, "the folder has no other.safetensors"),
        ({**said, NORM: "link"}, "and so has another file"),
        (dict.fromkeys(said, first), "does not name model-00002-of-00002.safetensors"),
        ([], "has no weight_map"),
        ({NORM: 1}, "has no weight_map"),
    ):
        _index(tmp_path, weight_map)
        assert what in refused(tmp_path)
    _index(tmp_path, said)
    os.truncate(tmp_path / first, (tmp_path / first).stat().st_size - 4)
    assert f"{first} is truncated" in refused(tmp_path)
    (tmp_path / first).unlink()
    assert f"the folder has no {first}" in refused(tmp_path)
    (tmp_path / checkpoint.INDEX).unlink()
    said_now = refused(tmp_path)
    assert "no model.safetensors, and no model.safetensors.index.json, which says what model-00002-of" in said_now


def test_what_older_files_have_beside_the_weights_is_left_out(tmp_path: Path) -> None:
    make_folder(tmp_path, "gpt2")
    path = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
    mask = torch.ones(1, 1, 256, 256, dtype=torch.uint8)
    save_file({**tensors, "h.0.attn.bias": mask, "h.0.attn.masked_bias": torch.tensor(-1e4)}, path)
    _, names = examine(tmp_path)
    assert sorted(names) == sorted(tensors)


def test_of_tied_weights_the_one_that_others_are_tied_to_counts(tmp_path: Path) -> None:
    make_folder(tmp_path, "gpt2")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "lm_head.weight": tensors["transformer.wte.weight"] + 1}, path)
    _, names = examine(tmp_path)
    assert names["transformer.wte.weight"] == "transformer.wte.weight"
    assert "lm_head.weight" not in names


# --- pickles


class _Evil:
    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._mark}",)


def _pickle(folder: Path, **more: Any) -> Path:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save({**tensors, **more}, folder / "pytorch_model.bin")
    return folder / "pytorch_model.bin"


def test_weights_are_in_the_order_in_which_a_model_needs_them(tmp_path: Path) -> None:
    """Not in that of the file, which is that of the alphabet: layer 10 before layer 2."""
    model = make_folder(tmp_path, num_hidden_layers=11)
    _, names = examine(tmp_path)
    assert list(names.values()) == [name for name, _ in model.named_parameters()]
    read = [name for name, _ in checkpoint.find_weights(str(tmp_path), False).read(names)]
    assert read == list(names) != sorted(names)


def test_pickled_weights_are_read_only_if_asked_for(tmp_path: Path) -> None:
    make_folder(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    _pickle(tmp_path)
    assert "deploy with --convert" in refused(tmp_path)
    _, names = examine(tmp_path, convert=True)
    assert names.keys() == expected.keys()
    found = dict(checkpoint.find_weights(str(tmp_path), True).read(names))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_pickled_weights_of_older_torch_and_in_shards(tmp_path: Path) -> None:
    make_folder(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    said = {}
    for file, part in (("a.bin", names[::2]), ("b.bin", names[1::2])):
        torch.save({name: tensors[name] for name in part}, tmp_path / file, _use_new_zipfile_serialization=False)
        said.update(dict.fromkeys(part, file))
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": said}))
    assert examine(tmp_path, convert=True)[1].keys() == tensors.keys()
    again = {names[0]: torch.zeros_like(tensors[names[0]])}  # the last one read had won
    torch.save({name: tensors[name] for name in names[1::2]} | again, tmp_path / "b.bin")
    assert f"b.bin has '{names[0]}', and so has another file" in refused(tmp_path, convert=True)


def test_pickles_with_more_than_tensors_are_refused_and_do_not_run(tmp_path: Path) -> None:
    make_folder(tmp_path)
    mark = tmp_path / "mark"
    path = _pickle(tmp_path, evil=_Evil(mark))
    assert "GLOBAL posix.system" in refused(tmp_path, convert=True)
    path.write_bytes(pickle.dumps(_Evil(mark)))
    assert "more than tensors" in refused(tmp_path, convert=True)
    assert not mark.exists(), "the pickle's code has run"


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"model": {"nested": torch.ones(1)}}, "'model', which is no tensor"),
        ({"sparse": torch.eye(3).to_sparse()}, "'sparse', which is no tensor"),
        ({"meta": torch.empty(3, device="meta")}, "'meta', which is no tensor"),
        ({"quantized": torch.ones(3, dtype=torch.int8)}, "which this model does not"),
        ({NORM: torch.ones(64, dtype=torch.int8)}, "quantized weights are not served"),
        ({"lm_head.weight": torch.ones(1).expand(1 << 30, 1 << 30)}, "its model wants"),
    ],
)
def test_pickles_of_odd_tensors(tmp_path: Path, small: None, more: Any, what: str) -> None:
    make_folder(tmp_path)
    _pickle(tmp_path, **more)
    assert what in refused(tmp_path, convert=True)


def test_pickles_that_are_none(tmp_path: Path) -> None:
    make_folder(tmp_path)
    path = _pickle(tmp_path)
    for content in (b"", b"PK\x03\x04garbage", path.read_bytes()[:1000], pickle.dumps([1, 2]), b"\x80\x02}q\x00."):
        path.write_bytes(content)
        assert "pytorch_model.bin" in refused(tmp_path, convert=True)


def test_pickles_that_are_compressed(tmp_path: Path, small: None) -> None:
    """A few megabytes could be many gigabytes."""
    make_folder(tmp_path)
    path = _pickle(tmp_path)
    with zipfile.ZipFile(path) as stored, zipfile.ZipFile(tmp_path / "bomb", "w", zipfile.ZIP_DEFLATED) as bomb:
        for name in stored.namelist():
            bomb.writestr(name, stored.read(name))
    (tmp_path / "bomb").rename(path)
    assert "is compressed" in refused(tmp_path, convert=True)


# --- GGUF


def _gguf(folder: Path, name: str = "m.gguf") -> tuple[DecoderSpec, dict[str, torch.Tensor]]:
    raw = gguf_file.gguf_config(str(folder), name)
    spec = spec_of(raw, "float32", 0)
    model = weights.skeleton(spec)
    found = gguf_file.GgufFile(str(folder), name, raw, model)
    names = weights.matched(spec.family, weights.wanted_by(model), found.tensors)
    return spec, dict(found.read(names))


def test_a_gguf_file_is_the_same_model(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs gguf: make setup")
    from gguf_files import write_gguf

    model = write_gguf(tmp_path / "m.gguf")
    spec, found = _gguf(tmp_path)
    make_folder(tmp_path)
    spec.check()
    theirs, _ = examine(tmp_path)
    assert (spec.layers, spec.heads, spec.kv_heads, spec.positions, spec.vocabulary) == (
        *(theirs.layers, theirs.heads, theirs.kv_heads, theirs.positions, theirs.vocabulary),
    )
    expected = model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_gguf_files_that_are_refused(tmp_path: Path, small: None) -> None:
    pytest.importorskip("gguf", reason="needs gguf: make setup")
    from gguf_files import write_gguf

    path = tmp_path / "m.gguf"
    write_gguf(path, llama__rope__scaling__factor=2.0)
    with pytest.raises(BadFolder, match="positions of its tokens are scaled"):
        _gguf(tmp_path)
    write_gguf(path)
    whole = path.read_bytes()

    def strings(count: int) -> bytes:
        return whole[:16] + struct.pack("<Q", 1) + struct.pack("<Q1sIIQ", 1, b"k", 9, 8, count)

    for content, what in (
        (b"", "is no GGUF file"),
        (b"nothing", "is a text, which begins with 'nothing'"),
        (b"\xffnothing", "does not begin as one"),
        (b"GGUF", "ends in the middle"),
        (whole[:1000], "ends in the middle"),
        (whole[: len(whole) - 1000], "cannot be read"),
        (whole.replace(b"llama", b"bloom"), "cannot be read|not served"),
        (whole[:4] + struct.pack("<I", 1) + whole[8:], "version 1"),
        (whole[:8] + struct.pack("<QQ", 1 << 60, 1) + whole[24:], "1,152,921,504,606,846,976 tensors"),
        (whole[:8] + struct.pack("<QQ", 1, 1 << 60) + whole[24:], "1,152,921,504,606,846,976 fields"),
        (strings(1 << 60), "elements in its arrays"),
        (strings(1 << 20) + bytes(1 << 20), "ends in the middle"),
    ):
        path.write_bytes(content)
        with pytest.raises(BadFolder, match=what):
            _gguf(tmp_path)


_LLAMA: Final = {
    "attention.head_count": "num_attention_heads",
    "rope.dimension_count": "head_dim",
    "rope.freq_base": "a",
}


def _settled(architecture: str, fields: dict[str, Any], **config: Any) -> dict[str, Any]:
    sizes = {"num_attention_heads": 4, "hidden_size": 64, "model_type": architecture}
    return settled(architecture, _LLAMA, fields, {**sizes, **config})


def test_what_a_gguf_file_says_beside_what_transformers_reads() -> None:
    assert _settled("llama", {})["head_dim"] == 16
    assert _settled("qwen3", {"attention.key_length": 24, "attention.value_length": 24})["head_dim"] == 24
    assert _settled("llama", {})["num_key_value_heads"] == 4
    assert _settled("llama", {}, num_key_value_heads=2)["num_key_value_heads"] == 2
    assert _settled("llama", {}, model_type="mistral")["sliding_window"] is None
    gemma = _settled("gemma2", {"attn_logit_softcapping": 7.0, "final_logit_softcapping": 9.0}, num_hidden_layers=26)
    assert [gemma[name] for name in ("attn_logit_softcapping", "final_logit_softcapping")] == [7.0, 9.0]
    assert gemma["query_pre_attn_scalar"] == 16
    large = {"attention.key_length": 128}
    assert _settled("gemma2", large, num_hidden_layers=42)["query_pre_attn_scalar"] == 128
    assert _settled("gemma2", large, num_hidden_layers=46)["query_pre_attn_scalar"] == 16
    gpt2 = settled("gpt2", {}, {}, {"n_head": 4, "n_embd": 64, "n_ctx": 99, "feed_forward_length": 80})
    assert (gpt2["n_positions"], gpt2["n_inner"]) == (99, 80)
    assert _settled("llama", {"vocab_size": 9, "logit_scale": 1.0, "expert_count": 0, "attention.causal": True})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_scale", 0.5),
        ("residual_scale", 0.25),
        ("embedding_scale", 12.0),
        ("attention.scale", 0.125),
        ("attention.clamp_kqv", 8.0),
        ("attention.max_alibi_bias", 8.0),
        ("attention.sliding_window", 4096),
        ("attention.causal", False),
        ("attn_logit_softcapping", 50.0),
        ("expert_count", 8),
        ("something.new", 3),
        ("rope.dimension_count", 8),
        ("attention.value_length", 8),
    ],
)
def test_fields_of_gguf_that_are_not_computed(tmp_path: Path, field: str, value: Any) -> None:
    pytest.importorskip("gguf", reason="needs gguf: make setup")
    from gguf_files import write_gguf

    more = {"llama__attention__key_length": 16, f"llama__{field.replace('.', '__')}": value}
    write_gguf(tmp_path / "m.gguf", **more)
    with pytest.raises(BadFolder, match=rf"m.gguf: llama\.{field} is {value}, "):
        _gguf(tmp_path)


def test_two_tensors_of_gguf_that_are_one() -> None:
    tensors = [SimpleNamespace(name=name) for name in ("output.weight", "token_embd.weight")]
    names = {"output.weight": "lm_head.weight", "token_embd.weight": "model.embed_tokens.weight"}
    assert list(gguf_file.by_parameter("m.gguf", names, tensors)) == ["lm_head.weight", "model.embed_tokens.weight"]
    with pytest.raises(BadFolder, match=r"has one twice: as 'output.weight' and as 'token_embd.weight'"):
        gguf_file.by_parameter("m.gguf", dict.fromkeys(names, "one"), tensors)


# --- what is stored twice


def _differ(folder: Path) -> bool:
    spec = spec_of(json.loads((folder / "config.json").read_text()), "auto", 0)
    wanted = weights.wanted_by(weights.skeleton(spec))
    found = checkpoint.find_weights(str(folder), False)
    return loading.heads_differ(str(folder), spec, False, wanted, found)


def test_a_stored_head_that_differs_from_the_embeddings_is_the_models_own(tmp_path: Path) -> None:
    make_folder(tmp_path, "gpt2")
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    embeddings = stored["transformer.wte.weight"]
    save_file({**stored, "lm_head.weight": embeddings.clone()}, path, {"format": "pt"})
    assert not _differ(tmp_path)
    save_file({**stored, "lm_head.weight": embeddings + 1}, path, {"format": "pt"})
    assert _differ(tmp_path)
    spec = weights.untied(spec_of(json.loads((tmp_path / "config.json").read_text()), "auto", 0))
    names = weights.matched(
        spec.family,
        weights.wanted_by(weights.skeleton(spec)),
        checkpoint.find_weights(str(tmp_path), False).tensors,
    )
    assert names["lm_head.weight"] == "lm_head.weight"
    save_file({**stored, "wte.weight": embeddings + 1}, path, {"format": "pt"})
    with pytest.raises(BadFolder, match=r"have transformer.wte.weight twice: as "):
        _differ(tmp_path)


def test_a_git_lfs_pointer_is_called_one(tmp_path: Path) -> None:
    make_folder(tmp_path, "gpt2")
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert "is a Git LFS pointer, not the file itself: run `git lfs pull`" in refused(tmp_path)


def test_an_older_name_of_the_kind_of_rope_beside_the_new_one(tmp_path: Path) -> None:
    make_folder(tmp_path, "llama")
    change_config(tmp_path, rope_scaling={"type": "linear", "factor": 2.0})
    assert examine(tmp_path)[0].config["rope_parameters"]["rope_type"] == "linear"  # type: ignore[index, call-overload]
