"""Twelve language models of three architectures on a node whose GPU holds four, beside starting vLLM's server."""

import tempfile
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

from benchmarks.front import summary
from benchmarks.llm_client import GRANULES, Client, deploy, prompt
from benchmarks.llm_server import VllmServer, installed
from benchmarks.nodes.testnode import running_node

MODELS: Final = 12
ARCHITECTURES: Final[dict[str, dict[str, Any]]] = {
    "llama": {"num_key_value_heads": 3},
    "qwen2": {"num_key_value_heads": 3},
    "mistral": {"num_key_value_heads": 3, "sliding_window": 1024},
}
_SIZES: Final[dict[str, Any]] = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""SmolLM2-135M's."""


def folders(place: Path, smol: Path) -> list[Path]:
    """Twelve models with weights of their own, in three architectures."""
    from transformers import AutoConfig, AutoModelForCausalLM

    found = []
    for number in range(MODELS):
        family = list(ARCHITECTURES)[number % len(ARCHITECTURES)]
        torch.manual_seed(number)
        made: Any = AutoModelForCausalLM
        config = AutoConfig.for_model(family, **_SIZES, **ARCHITECTURES[family])
        model = made.from_config(config, dtype=torch.bfloat16)
        folder = place / f"m{number:02}"
        folder.mkdir()
        model.config.save_pretrained(folder)
        weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            (folder / name).write_bytes((smol / name).read_bytes())
        found.append(folder)
    return found


def reference(folder: Path, asked: list[int]) -> list[float]:
    """Logits of the next token, by `transformers`, in bf16."""
    from transformers import AutoModelForCausalLM

    made: Any = AutoModelForCausalLM
    with torch.inference_mode():
        logits: list[float] = made.from_pretrained(folder, dtype=torch.bfloat16)(torch.tensor([asked])).logits[0, -1]
    return logits


def many(smol: Path, rounds: int) -> dict[str, Any]:
    """Each round asks every model once. The first answer of each is compared: its token's logit, with the reference's
    largest.
    """
    with tempfile.TemporaryDirectory(prefix="dm", dir=Path("build")) as place:
        Path(place).chmod(0o755)
        made = folders(Path(place), smol)
        model_nbytes = (made[0] / "model.safetensors").stat().st_size
        config = f'memory = "{4 * model_nbytes + 2 * GRANULES}"'
        with running_node(f'[gpu]\ncount = 1\nthreads = 2\npool = "pages"\n{config}\n') as node:
            client = Client(node)
            for folder in made:
                deploy(node, folder.name, folder, "bfloat16")
            wrong = []
            for number, folder in enumerate(made):
                asked = prompt(number)
                answer = client.openai.completions.create(
                    model=folder.name, prompt=asked, max_tokens=1, temperature=0, logprobs=1,
                    extra_body={"ignore_eos": True},
                )  # fmt: skip
                text = answer.choices[0].text
                logits = torch.as_tensor(reference(folder, asked))
                if not _likely(smol, text, logits):
                    wrong.append(folder.name)
            times = [client.first_ms(folder.name) for _ in range(rounds) for folder in made]
        starts_s = [start_s(folder) for folder in made[: len(ARCHITECTURES)]] if installed() else []
    return {"models": MODELS, "wrong": wrong, "starts of vLLM's server, s": starts_s, **summary(times)}


def start_s(folder: Path) -> float:
    """From the start of vLLM's server to its first token, when nothing else runs."""
    server = VllmServer(folder, "bfloat16", Path("build/llm/server.log"))
    try:
        return server.first_s(prompt(0))
    finally:
        server.close()


def _likely(smol: Path, text: str, logits: torch.Tensor) -> bool:
    """Whether a token with this text is within bf16's rounding of the most probable one."""
    from transformers import AutoTokenizer

    words: Any = AutoTokenizer.from_pretrained(smol)
    near = (logits >= logits.max() - 2**-6 * logits.abs().max()).nonzero().flatten().tolist()
    return text in {words.decode([token], skip_special_tokens=True) for token in near}
