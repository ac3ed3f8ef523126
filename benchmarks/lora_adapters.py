"""Folders of random LoRA adapters over a model, as PEFT writes them, and what a runtime gets of them."""

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file

from dormouse.client_shim.llm import weights
from dormouse.client_shim.llm.adapter import FoundAdapter, read_adapter
from dormouse.client_shim.llm.adapter_weights import weights_of, without_equal
from dormouse.gpuserver.runtime.weights import AdapterParts, adapter_parts
from dormouse.schemas.llm import DecoderSpec

QV: Final = ["q_proj", "v_proj"]
ATTENTION: Final = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP: Final = ["gate_proj", "up_proj", "down_proj"]
ALL: Final = [*ATTENTION, *MLP]
STRENGTH: Final = 0.4
"""What an adapter adds to a product, against what comes in: enough to change most of what is said."""

EMBEDDED: Final = 0.1
"""About what a token's embedding has."""

SPEED: Final[dict[str, dict[str, Any]]] = {f"plain{n}": {"r": 8, "target_modules": ALL} for n in range(8)}
"""To be as fast with: they add to all products of each layer."""

EVERY: Final[dict[str, dict[str, Any]]] = {
    "r4": {"r": 4, "target_modules": QV},
    "r8": {"r": 8, "target_modules": ALL, "lora_alpha": 16},
    "r16": {"r": 16, "target_modules": ATTENTION},
    "rslora": {"r": 32, "target_modules": ALL, "use_rslora": True},
    "r64": {"r": 64, "target_modules": MLP},
    "bias": {"r": 8, "target_modules": ATTENTION, "lora_bias": True},
    "head": {"r": 8, "target_modules": QV, "modules_to_save": ["lm_head", "model.norm"]},
    "embedding": {"r": 16, "target_modules": [*QV, "embed_tokens"]},
}
"""To be equal with: what adapters can have."""


def base_model(folder: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    models: Any = AutoModelForCausalLM
    quiet: Any = logging
    quiet.disable_progress_bar()
    return models.from_pretrained(folder, dtype=dtype).eval()


def save(base: Path, place: Path, configs: Mapping[str, dict[str, Any]]) -> list[Path]:
    """A folder for each of these, unless it is there."""
    import peft  # type: ignore[import-untyped, unused-ignore]

    for seed, (name, config) in enumerate(configs.items()):
        if (place / name / "adapter_config.json").exists():
            continue
        with warnings.catch_warnings(action="ignore"):
            model = peft.get_peft_model(base_model(base, torch.float32), peft.LoraConfig(**config))
            _randomize(model, seed)
            model.save_pretrained(str(place / name))
    return [place / name for name in configs]


@torch.no_grad()
def _randomize(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    found = {name: getattr(module, "scaling", None) for name, module in model.named_modules()}
    scales = {name: each["default"] for name, each in found.items() if isinstance(each, dict)}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        random = torch.randn(parameter.shape, generator=generator) * STRENGTH
        scale = scales.get(name.split(".lora_")[0], 1.0)
        if "lora_A" in name:
            parameter.copy_(random / STRENGTH / parameter.shape[1] ** 0.5)
        elif "lora_B" in name and name.endswith("weight"):
            parameter.copy_(random / scale / parameter.shape[1] ** 0.5)
        elif "lora_B" in name:
            parameter.copy_(random / scale)
        elif "lora_embedding_A" in name:
            parameter.copy_(random / STRENGTH)
        elif "lora_embedding_B" in name:
            parameter.copy_(random * EMBEDDED / scale / parameter.shape[1] ** 0.5)
        else:
            parameter.add_(random * parameter.std())


def brought(base: Path, folders: list[Path], spec: DecoderSpec) -> Iterator[tuple[FoundAdapter, AdapterParts]]:
    """What was read in a sandbox, and what a runtime gets of it."""
    skeleton, dtype = weights.skeleton(spec), weights.DTYPES[spec.dtype]
    aliases = weights.wanted_by(skeleton).aliases
    stored = load_file(base / "model.safetensors")
    for folder in folders:
        found = read_adapter(str(folder), skeleton)
        found = without_equal(found, lambda name: stored[aliases[name]].to(dtype))
        tensors = {name: tensor for names, tensor in weights_of(found, dtype) for name in names}
        yield found, adapter_parts(found.spec, tensors)
