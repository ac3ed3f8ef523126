"""Requests for embeddings, and how folders say that vectors are made."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dormouse.client_shim.llm.embedding_requests import parse_embedding
from dormouse.client_shim.llm.folder import BadFolder
from dormouse.client_shim.llm.pooling import Pooling, pooling_of
from dormouse.client_shim.llm.requests import RefusedRequest


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a", [1]], ["a", [1]]),
    ],
)
def test_the_forms_that_input_has(given: Any, inputs: Any) -> None:
    assert parse_embedding({"input": given}).inputs() == inputs


@pytest.mark.parametrize("given", ["", [], [""], [[]], [1, "a"], [True], [[True]], [[1.5]], [None], [["a"]], [[[1]]]])
def test_what_is_no_input(given: Any) -> None:
    with pytest.raises(RefusedRequest) as raised:
        parse_embedding({"input": given}).inputs()
    assert (raised.value.param, raised.value.code) == ("input", "invalid_value")


@pytest.mark.parametrize("body", [None, [], "text", 7, {}, {"input": 7}, {"input": "a", "dimensions": "x"}])
def test_bodies_that_are_none(body: Any) -> None:
    with pytest.raises(RefusedRequest, match="cannot be read"):
        parse_embedding(body)


HIDDEN = torch.tensor([[[1.0, -2.0], [3.0, 4.0], [9.0, 9.0]], [[-1.0, -5.0], [-2.0, -4.0], [-3.0, -3.0]]])
MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("mean", [[2.0, 1.0], [-2.0, -4.0]]),
        ("first", [[1.0, -2.0], [-1.0, -5.0]]),
        ("last", [[3.0, 4.0], [-3.0, -3.0]]),
        ("max", [[3.0, 4.0], [-1.0, -3.0]]),
    ],
)
def test_vectors_are_of_what_is_no_padding(mode: str, expected: Any) -> None:
    found = Pooling(mode, False).vectors(HIDDEN, MASK)
    assert torch.equal(found, torch.tensor(expected))
    of_length_one = Pooling(mode, True).vectors(HIDDEN, MASK)
    assert torch.allclose(of_length_one, found / found.norm(dim=1, keepdim=True))


def _folder(folder: Path, kinds: dict[str, str], pooling: dict[str, Any]) -> str:
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for path, kind in kinds.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return str(folder)


WHOLE = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}


@pytest.mark.parametrize(
    ("pooling", "mode"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_cls_token": True}, "first"),
        ({"pooling_mode_max_tokens": True}, "max"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": "cls"}, "first"),
        ({"pooling_mode": "lasttoken"}, "last"),
    ],
)
def test_what_folders_say(tmp_path: Path, pooling: dict[str, Any], mode: str) -> None:
    assert pooling_of(_folder(tmp_path, WHOLE, pooling), False) == Pooling(mode, True)
    plain = {path: kind for path, kind in WHOLE.items() if kind != "Normalize"}
    assert pooling_of(_folder(tmp_path, plain, pooling), False) == Pooling(mode, False)


def test_a_folder_that_says_nothing(tmp_path: Path) -> None:
    assert pooling_of(str(tmp_path), True) == Pooling("last", True)
    assert pooling_of(str(tmp_path), False) == Pooling("mean", True)


def test_the_longest_text_and_the_prompt(tmp_path: Path) -> None:
    folder = _folder(tmp_path, WHOLE, {"pooling_mode_mean_tokens": True})
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 128}')
    said = {"prompts": {"query": "query: ", "": ""}, "default_prompt_name": "query"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(said))
    assert pooling_of(folder, False) == Pooling("mean", True, 128, "query: ")


@pytest.mark.parametrize(
    ("kinds", "pooling", "what"),
    [
        (WHOLE, {}, "no pooling_mode"),
        (WHOLE, {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, "is not computed here"),
        (WHOLE, {"pooling_mode_weightedmean_tokens": True}, "weightedmean_tokens is not computed here"),
        (WHOLE, {"pooling_mode": "sqrt"}, "is not computed here"),
        ({**WHOLE, "3_Dense": "Dense"}, {"pooling_mode": "mean"}, "a Dense at place 3"),
        ({"": "Transformer", "2_Normalize": "Normalize"}, {}, "a Normalize at place 1"),
        ({"": "Transformer"}, {}, "no Pooling"),
        ({"": "CLIPModel"}, {}, "a CLIPModel at place 0"),
        ({**WHOLE, "../x": "Pooling"}, {"pooling_mode": "mean"}, "no folder beside it"),
        ({"0_Transformer": "Transformer"}, {}, "has the model in 0_Transformer"),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path: Path, kinds: Any, pooling: Any, what: str) -> None:
    with pytest.raises(BadFolder, match=what):
        pooling_of(_folder(tmp_path, kinds, pooling), False)
