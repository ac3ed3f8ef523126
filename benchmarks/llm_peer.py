"""One side of benchmarks.llm_peers, in a process and perhaps an environment of its own.

    python llm_peer.py SIDE FOLDER DTYPE THREADS [ADAPTER ...]

A line of JSON in, ``{"prompts": [[token, ...], ...], "new": N, "adapters": [which, ...]}``; one out, ``{"s": seconds,
"tokens": N}``. ``which``: of the folders of ADAPTERs, -1 for none; without the field, none. It says ``{}`` once it is
ready. Imports nothing of Dormouse unless it is that side: vLLM's environment has none.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Generate = Callable[[list[list[int]], int, list[int]], int]


def vllm(folder: str, dtype: str, adapters: list[str]) -> Generate:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found, unused-ignore]

    more: dict[str, Any] = {"enable_lora": True, "max_loras": len(adapters), "max_lora_rank": 8} if adapters else {}
    engine = LLM(folder, dtype=dtype, max_model_len=2048, max_num_seqs=16, enable_prefix_caching=False, **more)

    def generate(prompts: list[list[int]], new: int, which: list[int]) -> int:
        from vllm.lora.request import LoRARequest  # type: ignore[import-not-found, unused-ignore]

        how = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        wanted = [LoRARequest(str(of), of + 1, adapters[of]) if of >= 0 else None for of in which] or None
        given = [{"prompt_token_ids": each} for each in prompts]
        found = engine.generate(given, how, use_tqdm=False, lora_request=wanted)
        return sum(len(each.outputs[0].token_ids) for each in found)

    return generate


def transformers(folder: str, dtype: str) -> Generate:
    from transformers import AutoModelForCausalLM, GenerationConfig

    loaded: Any = AutoModelForCausalLM
    settings: Any = GenerationConfig
    model = loaded.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")

    def generate(prompts: list[list[int]], new: int, _: list[int]) -> int:
        how = settings(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
        found = model.generate_batch(inputs=prompts, generation_config=how, progress_bar=False)
        return sum(len(each.generated_tokens) for each in found.values())

    return generate


def dormouse(folder: str, dtype: str, fused: bool, adapters: list[str]) -> Generate:
    from pathlib import Path

    from benchmarks.llm_alone import Alone
    from benchmarks.lora_adapters import brought

    alone = Alone(Path(folder), dtype, fused)
    parts = [each for _, each in brought(Path(folder), [Path(each) for each in adapters], alone.spec)]
    return lambda prompts, new, which: sum(map(len, alone.answers(prompts, new, parts, which)))


def main() -> None:
    side, folder, dtype, threads, *adapters = sys.argv[1:]
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    import torch

    torch.set_num_threads(int(threads))
    if side == "vllm":
        generate = vllm(folder, dtype, adapters)
    elif side == "transformers":
        generate = transformers(folder, dtype)
    else:
        generate = dormouse(folder, dtype, side == "fused", adapters)
    print(json.dumps({}), file=out)
    for line in sys.stdin:
        asked = json.loads(line)
        began_s = time.perf_counter()
        tokens = generate(asked["prompts"], asked["new"], asked.get("adapters", []))
        print(json.dumps({"s": time.perf_counter() - began_s, "tokens": tokens}), file=out)


if __name__ == "__main__":
    main()
