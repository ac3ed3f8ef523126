"""Functions whose operations come again: on a node that computes ahead of them, one that compares, and one that does
neither, each answers as native PyTorch does."""

import importlib
from typing import Any

import pytest
import torch
from fast_paths import built

from benchmarks.nodes.testnode import running_node
from dormouse.core.native import RECORDER

SOURCE = """
import torch, transformers
from dormouse.client_shim.commands.handles import cpp

def models():
    torch.manual_seed(0)
    bert = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    gpt2 = transformers.GPT2Config(
        vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=0)
    resnet = transformers.ResNetConfig(embedding_size=4, hidden_sizes=[8] * 4)
    found = {"bert": transformers.BertModel(bert), "gpt2": transformers.GPT2LMHeadModel(gpt2),
             "resnet": transformers.ResNetModel(resnet)}
    return {name: model.eval() for name, model in found.items()}

@torch.no_grad()
def answers(models, seed, device):
    torch.manual_seed(seed)
    ids, image = torch.randint(1, 50, (1, 8)).to(device), torch.randn(1, 3, 32, 32).to(device)
    tokens = models["gpt2"].generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None)
    return [tokens.tolist(), models["bert"](ids)[0].flatten()[:9].tolist(),
            models["resnet"](image)[0].flatten()[:9].tolist()]

def load():
    return {name: model.to("cuda") for name, model in models().items()}

def handle(state, seed):
    before = cpp.module.counts()
    found = answers(state, seed, "cuda")
    return found, [now - then for now, then in zip(cpp.module.counts(), before)][2:]
"""


def _close(one: Any, other: Any) -> bool:
    return torch.allclose(torch.tensor(one), torch.tensor(other), atol=1e-5)


@pytest.mark.parametrize(("templates", "graphs"), [("on", "off"), ("on", "on"), ("off", "on"), ("check", "on")])
def test_sequences_that_come_again(templates: str, graphs: str) -> None:
    built()
    RECORDER.build()
    importlib.import_module("transformers")
    native: dict[str, Any] = {}
    exec(compile(SOURCE.replace("from dormouse", "# from dormouse"), "native", "exec"), native)
    there = native["models"]()
    followed = []
    with running_node(f'[gpu]\ncount = 1\nmemory = "1GiB"\ntemplates = "{templates}"\ngraphs = "{graphs}"\n') as node:
        node.deployed("f", SOURCE)
        node.deployed("one_by_one", SOURCE, eager=True)
        for number in range(7):
            node.result("one_by_one", number // 6)
            found, (commands, left) = node.result("f", number // 6)
            expected = native["answers"](there, number // 6, "cpu")
            assert found[0] == expected[0]
            assert all(_close(*pair) for pair in zip(found[1:], expected[1:], strict=True))
            followed.append((commands, left))
        replayed = {name: node.status()["functions"][name]["replayed"] for name in ("f", "one_by_one")}
    commands, left = zip(*followed, strict=True)
    if templates == "off":
        assert not any(commands)
    else:
        assert not any(commands[:2])
        assert commands[5] > 200
        assert not any(left[:6])
    if templates != "check":  # then a section that is not at its end is not computed as a whole
        assert {name: count > 0 for name, count in replayed.items()} == dict.fromkeys(replayed, templates == "on")
