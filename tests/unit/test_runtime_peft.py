"""PEFT's folders in an engine: each sequence is what PEFT's own, unmerged model says, alone and beside others.

Folders are read as a sandbox reads them, and their tensors are given as a runtime gets them.
"""

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from adapted_models import adapted, adapter
from adapter_folders import APART, TIED, base_model, peft, read_folder, save_adapter
from language_models import prompts, wrong_tokens
from runtime_engines import begin, engine

from dormouse.client_shim.llm.adapter_weights import weights_of, without_equal
from dormouse.core.decisions.batches.batch import NO_ADAPTER
from dormouse.gpuserver.runtime import layers
from dormouse.gpuserver.runtime.engine import Engine
from dormouse.gpuserver.runtime.weights import AdapterParts, adapter_parts

WAYS: Final = ["fused", "modules", "torch"]
QKV: Final = ["q_proj", "v_proj"]
NEW: Final = 10


def brought(folder: Path, family: str, **config: Any) -> AdapterParts:
    """What a runtime gets of a folder."""
    found = read_folder(folder, family, **config)
    base = dict(base_model(family, **config).named_parameters(remove_duplicate=False))
    found = without_equal(found, lambda name: base[name].data)
    found.spec.check()
    tensors = {name: tensor for names, tensor in weights_of(found, torch.float32) for name in names}
    return adapter_parts(found.spec, tensors)


Judge = Callable[[list[int], int], list[Any]]


def judges(folder: Path, family: str, base: dict[str, Any], config: dict[str, Any]) -> list[tuple[AdapterParts, Judge]]:
    """PEFT's adapter first, and two plain ones, each with what judges it."""
    save_adapter(folder, base_model(family, **base), **config)
    with warnings.catch_warnings(action="ignore"):
        wanted = peft.PeftModel.from_pretrained(base_model(family, **base), folder).eval()
    made: list[tuple[AdapterParts, Judge]] = [(brought(folder, family, **base), partial(wrong_tokens, wanted))]
    model = base_model(family, **base)
    for adds in (adapter(model, 1), adapter(model, 2, rank=40, only="1.")) if family != "gpt2" else ():

        def judge(tokens: list[int], prompt: int, adds: Any = adds) -> list[Any]:
            with adapted(model, adds):
                return wrong_tokens(model, tokens, prompt)

        made.append((AdapterParts(adds, {}), judge))
    return made


def answers(made: Engine, given: list[list[int]], adapters: list[int]) -> list[list[int]]:
    begun = [
        begin(made, n, prompt, NEW, adapter=of) for n, (prompt, of) in enumerate(zip(given, adapters, strict=True))
    ]
    while not made.batch.idle:
        made.step()
    return [sequence.tokens for sequence in begun]


def check(tmp_path: Path, family: str, how: str, base: dict[str, Any], config: dict[str, Any]) -> None:
    """Beside rows of the base and of plain adapters, with long prompts in several steps, and alone."""
    made = engine(model := base_model(family, **base), 96, native=how != "torch", step_tokens=48, fused=how == "fused")
    judged = judges(tmp_path, family, base, config)
    for parts, _ in judged:
        made.bind(made.adapters.open(), *parts)
    *given, last = prompts(11, 37, 5, 64, 21, 1, 40, 9, 50, 33)
    adapters = [n % (len(judged) + 1) - 1 for n in range(len(given))]
    together = answers(made, given, adapters)
    alone = answers(made, [last], [0])
    changed = 0
    for tokens, prompt, of in zip(together + alone, [*given, last], [*adapters, 0], strict=True):
        assert len(tokens) == len(prompt) + NEW
        wrong = wrong_tokens(model, tokens, len(prompt))
        changed += of == 0 and bool(wrong)
        assert (wrong if of == NO_ADAPTER else judged[of][1](tokens, len(prompt))) == [], f"of adapter {of}"
    assert changed > 0, "the adapter changes what is said"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Models so small are computed sooner by one, and where many tests run, much sooner."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    *((family, {}, {"target_modules": QKV, "lora_bias": True}) for family in ("llama", "gemma2")),
    ("llama", {"attention_bias": True}, {"target_modules": ["q_proj"], "lora_bias": True, "bias": "all"}),
    ("qwen2", {}, {"target_modules": ["q_proj", "o_proj"], "bias": "lora_only"}),
    ("qwen2", {}, {"target_modules": ["q_proj"], "bias": "all"}),
    ("opt", {}, {"target_modules": ["fc1"], "bias": "lora_only", "lora_bias": True}),
    ("opt", {}, {"target_modules": ["q_proj"], "bias": "all"}),
    ("opt", {}, {"target_modules": ["q_proj"], "modules_to_save": ["embed_positions"]}),
    ("phi", APART, {"target_modules": ["dense", "lm_head"], "bias": "all"}),
    ("phi", {"qk_layernorm": True}, {"target_modules": ["dense"], "modules_to_save": ["q_layernorm"]}),
    ("gpt_neox", {}, {"target_modules": ["query_key_value"], "bias": "all"}),
    ("gpt_neox", {}, {"target_modules": ["dense"], "modules_to_save": ["embed_in", "lm_head"]}),
    ("gpt2", {}, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    ("gpt2", {}, {"target_modules": ["c_attn"], "bias": "all", "lora_bias": True}),
    ("gpt2", {}, {"target_modules": ["c_fc", "wte", "wpe"]}),
    ("gpt2", {}, {"target_modules": ["c_fc"], "modules_to_save": ["wte", "ln_f", "h.1.attn.c_attn"]}),
    *((family, TIED, {"target_modules": ["embed_tokens"]}) for family in layers.GATED),
    ("llama", APART, {"target_modules": ["embed_tokens", "q_proj"]}),
    ("llama", APART, {"target_modules": ["lm_head", "q_proj"], "use_rslora": True}),
    ("llama", TIED, {"target_modules": ["lm_head"]}),
    ("llama", TIED, {"target_modules": ["embed_tokens", "lm_head"]}),
    ("llama", TIED, {"target_modules": ["embed_tokens"], "ensure_weight_tying": True}),
    ("llama", APART, {"target_modules": QKV, "modules_to_save": ["embed_tokens", "lm_head"]}),
    ("llama", TIED, {"target_modules": QKV, "modules_to_save": ["embed_tokens"]}),
    ("llama", TIED, {"target_modules": QKV, "modules_to_save": ["lm_head"]}),
    ("llama", TIED, {"target_modules": QKV, "modules_to_save": ["lm_head"], "ensure_weight_tying": True}),
    ("llama", {}, {"target_modules": QKV, "modules_to_save": ["model.norm", "layers.1.mlp"]}),
    ("mistral", {}, {"target_modules": QKV, "modules_to_save": ["k_proj", "input_layernorm"]}),
    ("qwen3", {}, {"target_modules": ["k_proj"], "modules_to_save": ["q_norm"]}),
    ("gemma2", {}, {"target_modules": ["q_proj"], "modules_to_save": ["post_feedforward_layernorm", "up_proj"]}),
]
"""Family, base configuration, adapter configuration."""


@pytest.mark.parametrize(
    ("how", "family", "base", "config"),
    [(how, *case) for how in WAYS for case in CASES if how != "modules" or case[0] in layers.GATED],  # has fused layers
)
def test_it_says_what_peft_says(tmp_path: Path, how: str, family: str, base: Any, config: Any) -> None:
    check(tmp_path, family, how, base, {"r": 4, **config})
