"""Language models of published shapes with random weights, made on the GPU by a seed: nothing is downloaded."""

import json
import mmap
import struct
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dormouse.client_shim.llm.folder import spec_of
from dormouse.core.decisions.batches.batch import NO_ADAPTER, Sequence
from dormouse.gpuserver.runtime import models as built
from dormouse.gpuserver.runtime.attention import BlockAttention
from dormouse.gpuserver.runtime.engine import Engine, Generation, kv_layout
from dormouse.gpuserver.runtime.low_rank import LowRank
from dormouse.gpuserver.runtime.sampling import Sampling

DEVICE: Final = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CONTEXT: Final = 2048
STD: Final = 0.02
SHARDS: Final = 8
"""Files of a folder, each written by a thread."""


def _llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, words: int, tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": words, "tie_word_embeddings": tied, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    }  # fmt: skip


SHAPES: Final[dict[str, dict[str, Any]]] = {
    "8b": _llama(4096, 14336, 32, 32, 8, 128256, False),  # Llama 3 8B
    "1b": _llama(2048, 8192, 16, 32, 8, 128256, True),  # Llama 3.2 1B
    "tiny": _llama(64, 96, 3, 4, 2, 1000, True),
    "small": _llama(256, 512, 4, 8, 4, 1000, False),
}


def names_of(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shapes of its weights, by the names of a hub's files."""
    hidden, inner, words = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    of_layer = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
    }  # fmt: skip
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (words, hidden)}
    for layer in range(config["num_hidden_layers"]):
        found |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    found["model.norm.weight"] = (hidden,)
    return found if config["tie_word_embeddings"] else found | {"lm_head.weight": (words, hidden)}


def weights_of(config: Mapping[str, Any], dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor]:
    """On the device. Norms are ones."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    found = {}
    for name, shape in names_of(config).items():
        made = torch.ones(shape, dtype=dtype, device=DEVICE)
        found[name] = made if len(shape) == 1 else made.normal_(0, STD, generator=generator)
    return found


# --- a folder


def make_folder(folder: Path, shape: str, dtype: torch.dtype, seed: int = 0) -> int:
    """As a hub has it. Returns its weights' bytes."""
    config = SHAPES[shape]
    folder.mkdir(parents=True, exist_ok=True)
    weights = weights_of(config, dtype, seed)
    config = {**config, "torch_dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(config))
    shards: list[dict[str, torch.Tensor]] = [{} for _ in range(SHARDS)]
    for tensor in sorted(weights, key=lambda name: -weights[name].nbytes):
        min(shards, key=lambda shard: sum(each.nbytes for each in shard.values()))[tensor] = weights[tensor]
    files = {f"model-{number:05}-of-{SHARDS:05}.safetensors": shard for number, shard in enumerate(shards, 1)}
    with ThreadPoolExecutor(SHARDS) as pool:
        list(pool.map(lambda each: _write(folder / each[0], each[1]), files.items()))
    total = sum(each.nbytes for each in weights.values())
    index = {name: file for file, shard in files.items() for name in shard}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    )
    tokenizer(config["vocab_size"]).save_pretrained(str(folder))
    return total


def _write(path: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """A file of safetensors, its numbers straight from the device."""
    names, at, header, spans = {torch.bfloat16: "BF16", torch.float32: "F32"}, 0, dict[str, Any](), {}
    for name, tensor in weights.items():
        spans[name] = at, at + tensor.nbytes
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": spans[name]}
        at += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    with path.open("w+b") as file:
        file.truncate(start + at)
        with mmap.mmap(file.fileno(), start + at) as memory:
            memory[:start] = struct.pack("<Q", len(text)) + text
            target = torch.frombuffer(memory, dtype=torch.uint8)
            for name, tensor in weights.items():
                first, end = spans[name]
                target[start + first : start + end].copy_(tensor.view(-1).view(torch.uint8))
            del target


def tokenizer(words: int) -> PreTrainedTokenizerFast:
    """A word for each token, so that no answer's text lacks one: "t17 " for 17."""
    made = Tokenizer(models.WordLevel(vocab={f"t{number} ": number for number in range(words)}, unk_token="t0 "))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # prompts are given as tokens
    made.decoder = decoders.Fuse()
    fast: Any = PreTrainedTokenizerFast
    found: PreTrainedTokenizerFast = fast(tokenizer_object=made, unk_token="t0 ", bos_token="t1 ", eos_token="t2 ")
    return found


# --- an engine without a node


def engine_of(shape: str, dtype: torch.dtype, weights: Mapping[str, torch.Tensor], tokens: int) -> Engine:
    """With room for so many tokens in its KV."""
    spec = spec_of(SHAPES[shape], str(dtype).removeprefix("torch."), CONTEXT)
    layout = kv_layout(spec)
    blocks = -(-tokens // layout.block_tokens)
    memory = torch.zeros(blocks * layout.block_nbytes // dtype.itemsize, dtype=dtype, device=DEVICE)
    attention = BlockAttention(layout, memory)
    model = built.build(spec, attention)
    built.bind(model, weights)
    attention.backend.warm(SHAPES[shape]["num_attention_heads"], False, {2048, 4096, 8192, 14336})
    engine = Engine(model, attention, lambda wanted: False)
    engine.add_extent(0, 0, memory.nbytes)
    return engine


def begin(engine: Engine, number: int, prompt: list[int], new: int, adapter: int = NO_ADAPTER) -> Sequence:
    sequence = Sequence(number, list(prompt), len(prompt), len(prompt) + new, adapter=adapter)
    engine.add(number, Generation(sequence, Sampling(), frozenset()))
    return sequence


def low_ranks(shape: str, dtype: torch.dtype, rank: int, seed: int) -> dict[str, LowRank]:
    """What a random adapter adds to all seven products of each layer."""
    generator = torch.Generator(DEVICE).manual_seed(1000 + seed)

    def random(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=DEVICE).normal_(0, STD, generator=generator)

    return {
        name.removesuffix(".weight"): LowRank(random(rank, size[1]), random(rank, size[0]), 1.0)
        for name, size in names_of(SHAPES[shape]).items()
        if "_proj" in name
    }


def adapter_folders(
    folder: Path, shape: str, dtype: torch.dtype, rank: int, count: int, strength: float = 1.0
) -> Iterator[Path]:
    """As PEFT writes them, each matrix times ``strength``."""
    from safetensors.torch import save_file

    projections = sorted({name.split(".")[-2] for name in names_of(SHAPES[shape]) if "_proj" in name})
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "target_modules": projections,
        "bias": "none", "base_model_name_or_path": shape,
    }  # fmt: skip
    for number in range(count):
        own = folder / f"adapter{number}"
        own.mkdir(parents=True, exist_ok=True)
        tensors = {}
        for name, low in low_ranks(shape, dtype, rank, number).items():
            tensors[f"base_model.model.{name}.lora_A.weight"] = strength * low.down.cpu()
            tensors[f"base_model.model.{name}.lora_B.weight"] = strength * low.up.T.contiguous().cpu()
        save_file(tensors, own / "adapter_model.safetensors")
        (own / "adapter_config.json").write_text(json.dumps(config))
        yield own
