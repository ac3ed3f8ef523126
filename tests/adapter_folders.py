"""Folders of LoRA adapters over tiny models, as PEFT writes them."""

import json
import warnings
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from language_models import reference, spec_of

from dormouse.client_shim.llm import weights
from dormouse.client_shim.llm.adapter import FoundAdapter, read_adapter
from dormouse.client_shim.llm.adapter_config import CONFIG
from dormouse.client_shim.llm.folder import BadFolder

peft: Any = pytest.importorskip("peft", reason="needs peft: make setup")

PREFIX: Final = "base_model.model."
Q: Final = f"{PREFIX}model.layers.0.self_attn.q_proj"
TIED: Final = {"tie_word_embeddings": True}
APART: Final = {"tie_word_embeddings": False}


def base_model(family: str = "llama", **config: Any) -> Any:
    return reference(family, **config)


def _random(model: Any) -> None:
    """All that an adapter trains gets other values than the base's."""
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)  # in place: some are tied


def save_adapter(folder: Path, base: Any, save: dict[str, Any] | None = None, **config: Any) -> Any:
    """PEFT's own model with this adapter, saved in the folder."""
    with warnings.catch_warnings(action="ignore"):
        model = peft.get_peft_model(base, peft.LoraConfig(**config))
        _random(model)
        model.save_pretrained(folder, **(save or {}))
    return model.eval()


def read_folder(folder: Path, family: str = "llama", **config: Any) -> FoundAdapter:
    return read_adapter(str(folder), weights.skeleton(spec_of(base_model(family, **config))))


def plain(folder: Path) -> Path:
    save_adapter(folder, base_model(num_hidden_layers=1), target_modules=["q_proj", "v_proj"], r=4)
    return folder


def configure(folder: Path, **fields: Any) -> None:
    path = folder / CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def refused(folder: Path, family: str = "llama", **config: Any) -> str:
    with pytest.raises(BadFolder) as raised:
        read_folder(folder, family, **{"num_hidden_layers": 1, **config})
    return str(raised.value)
