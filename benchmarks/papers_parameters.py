"""What ``benchmarks.papers`` assumes, each number with its source, written down before the first run and not changed
since, but for the unit of `GPU_NBYTES`; and the scenarios that are made of it, as `dormouse simulate` would read them
from a TOML file. Pure.

What neither paper nor prototype says is an assumption and marked so; all policies of a figure share it. Sizes in bytes,
times in milliseconds, bandwidths in bytes per second.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from benchmarks.pool_models import Model, language_models
from benchmarks.pool_trace import TOKENS

GB, MB, GIB = 10**9, 10**6, 1 << 30

Tree = dict[str, Any]


class Torpor(NamedTuple):
    """A model of Torpor's Table 4: weights in bytes; run resident (GPU remoting), woken from the host (Swap-PCIe) and
    from another GPU (Swap-NVLink), and in a process of its own (Native); deadlines at a node and in a cluster (§7); the
    process's memory and cold start (Table 1).
    """

    name: str
    parameters: int
    run_ms: float
    wake_ms: float
    peer_wake_ms: float
    native_ms: float
    deadline_ms: float = 80.0
    cluster_deadline_ms: float = 150.0
    native_nbytes: int = 1600 * MB
    cold_start_ms: float = 8000.0

    @property
    def nbytes(self) -> int:
        """float32."""
        return 4 * self.parameters


MODELS: Final = (
    Torpor("DenseNet-169", 14_149_480, 25, 27, 26, 30),
    Torpor("DenseNet-201", 20_013_928, 28, 30, 30, 36),
    Torpor("Inception-v3", 23_834_568, 14, 17, 16, 19),
    Torpor("EfficientNet", 5_288_548, 12, 13, 13, 17),
    Torpor("ResNet-50", 25_557_032, 9, 13, 11, 11),
    Torpor("ResNet-101", 44_549_160, 14, 22, 16, 20),
    Torpor("ResNet-152", 60_192_808, 17, 25, 20, 25),
    Torpor("Bert-qa", 335_143_938, 43, 144, 45, 42, 200, 250, 2400 * MB, 11_000),
)
"""Parameters: torchvision's model table (Inception-v3 without its auxiliary head, which only training uses;
EfficientNet-B0, the paper does not say which), and BERT-large with a question-answering head (transformers; the
prototype's, with sequences of 512). Table 1 has footprint and cold start of ResNet-152 and Bert-qa only: the other
vision models are taken to be like ResNet-152, which fits the 18 containers per GPU of the prototype's script.
"""

ACTIVATION: Final = 100 * MB
"""Assumption: that a request needs beside the weights while it runs; the same for all models and policies."""

GPU_NBYTES: Final = 25 * GIB
"""For models: the prototype's MEM_LIMIT on a V100 of 32 GB, which it multiplies by 1024³. It counts the activations of
every resident model; here only those of the model that runs count (`ACTIVATION`), so less would be as right.
"""

NATIVE_GPU_NBYTES: Final = 32 * GB
"""All of it: a process's footprint (Table 1) has its CUDA context in it."""

HOST_BPS: Final = 10.4 * GB
"""Table 1: Llama2-13B, 26 GB of weights, is loaded in 2.5 s."""

SWITCH_BPS: Final = 12.0 * GB
"""PCIe 3.0 x16 in practice (pinned memory), shared by GPUs 0 and 1, and 2 and 3 (Fig. 5). With it Table 3 comes out
within 10 %.
"""

NVLINK_BPS: Final = 22.0 * GB
"""One link of NVLink 2 (25 GB/s nominal) in practice, for pairs 0-1 and 2-3; all others have two (Fig. 5)."""

ALLOCATE: Final = 1.0
"""Assumption, for Torpor-Block: a wake allocates memory for as long as a request runs. The paper's text has a largest
value only ("over 4x than the actual inference time"), and its Fig. 13 no numbers.
"""

MINUTES: Final = 30
"""Of the trace (m0 to m29; the 31st is nearly empty)."""

NATIVE_MINUTES: Final = 10
"""Of Fig. 10: what INFless-KA executes at least once depends on how long one looks, and its authors' run 10 minutes."""

CONTAINERS: Final = 19
"""ResNet-152 containers that Native has on one GPU in the prototype's script for Fig. 8."""

SHARED: Final = 0.988
"""Assumption, for content sharing: that fine-tunes of one base have in common (docs/benchmarks.md: biases, norms and
the output weights of two layers differ); in groups of `GROUP` functions.
"""

GROUP: Final = 10

HEAVY_SHARE: Final = 0.6
"""Fig. 12: of the memory that all models need (§7.3)."""

HEAVY_OVER: Final = 1.2
"""Assumption for Fig. 12: all models need so much of the GPUs' memory. Less, and nothing is evicted."""

HEAVY_SCALE: Final = 0.5
"""Assumption for Fig. 12: of the trace's rates, which makes 5 requests per minute, the least that §7.3 speaks of."""


def trace(path: str, within: str, minutes: int = MINUTES, scale: float = 1.0) -> Tree:
    """``[arrivals]``"""
    return {"process": "trace", "trace": path, "within": within, "minutes": minutes, "scale": scale}


def gpus(count: int, link: float = 1.0, memory: float = 1.0) -> Tree:
    """``[gpus]`` of Torpor's Fig. 5, as many times as ``count`` needs; ``link`` scales what comes from the host,
    ``memory`` that for models.
    """
    peer = [[_nvlink(a, b) for b in range(count)] for a in range(count)]
    wires = {"peer": peer} if count > 1 else {}
    return {
        "count": count,
        "memory": int(GPU_NBYTES * memory),
        "link": int(HOST_BPS * link),
        "switch": int(SWITCH_BPS * link),
        "switches": [gpu // 2 for gpu in range(count)],
        **wires,
    }


def _nvlink(a: int, b: int) -> int:
    """Between GPUs of the same four."""
    if a == b or a // 4 != b // 4:
        return 0
    return int(NVLINK_BPS if a // 2 == b // 2 else 2 * NVLINK_BPS)


def model(of: Torpor, functions: int, *, link: float = 1.0, cluster: bool = False, shared: float = 0.0) -> Tree:
    """``[[models]]``. What a wake adds beyond the longer of run and copy is as measured, however fast the link."""
    extra_ms = of.wake_ms - max(of.run_ms, of.nbytes / HOST_BPS * 1000)
    wake_ms = max(of.run_ms, of.nbytes / (HOST_BPS * link) * 1000) + extra_ms
    return {
        "name": of.name,
        "size": of.nbytes,
        "run": of.run_ms,
        "wake": round(wake_ms + 1e-6, 6),
        "peer_wake": of.peer_wake_ms,
        "deadline": of.cluster_deadline_ms if cluster else of.deadline_ms,
        "activation": ACTIVATION,
        "functions": functions,
        "shared": shared,
        "native": of.native_nbytes,
        "native_run": of.native_ms,
        "cold_start": of.cold_start_ms,
        "allocate": ALLOCATE * of.run_ms,
    }


def node(
    functions: int, arrivals: Mapping[str, Any], *, count: int = 4, link: float = 1.0, memory: float = 1.0
) -> Tree:
    """Torpor's node (§7), with ``count`` GPUs: functions have the eight models in turn."""
    return {"gpus": gpus(count, link, memory), "models": in_turn(functions, link=link), "arrivals": dict(arrivals)}


def in_turn(functions: int, *, link: float = 1.0, cluster: bool = False) -> list[Tree]:
    numbers = [functions // len(MODELS) + (index < functions % len(MODELS)) for index in range(len(MODELS))]
    pairs = zip(MODELS, numbers, strict=True)
    return [model(of, number, link=link, cluster=cluster) for of, number in pairs if number]


def native(tree: Tree) -> Tree:
    """The same, for processes: they have all of each GPU."""
    return {**tree, "gpus": {**tree["gpus"], "memory": NATIVE_GPU_NBYTES}}


def cluster(functions: int, arrivals: Mapping[str, Any]) -> Tree:
    """Six nodes, with the deadlines of §7.4."""
    return {
        "gpus": {**gpus(4), "nodes": 6},
        "models": in_turn(functions, cluster=True),
        "arrivals": dict(arrivals),
    }


def resnets(functions: int, arrivals: Mapping[str, Any], count: int) -> Tree:
    """Figs. 8 and 9: functions that all have a ResNet-152 of their own."""
    return {"gpus": gpus(count), "models": [model(MODELS[6], functions)], "arrivals": dict(arrivals)}


def heavy_and_light(arrivals: Mapping[str, Any]) -> Tree:
    """Fig. 12: Bert-qa and DenseNet-201."""
    all_nbytes = HEAVY_OVER * 4 * GPU_NBYTES
    heavy, light = MODELS[7], MODELS[1]
    return {
        "gpus": gpus(4),
        "models": [
            model(heavy, round(HEAVY_SHARE * all_nbytes / heavy.nbytes)),
            model(light, round((1 - HEAVY_SHARE) * all_nbytes / light.nbytes)),
        ],
        "arrivals": dict(arrivals),
    }


def fine_tunes(functions: int, arrivals: Mapping[str, Any]) -> Tree:
    """The node, with models that are fine-tunes of one base in groups."""
    groups = functions // GROUP
    return {
        "gpus": gpus(4),
        "models": [model(MODELS[index % len(MODELS)], GROUP, shared=SHARED) for index in range(groups)],
        "arrivals": dict(arrivals),
    }


# --- Tangram

L40_NBYTES: Final = 45 * GB
"""§5.1."""

RTX4090_NBYTES: Final = 24 * GB
"""§5.1, each in a worker of its own."""

LLM_BPS: Final = 25 * GB
"""Assumption: PCIe 4.0 x16 in practice; what the paper measured is not in its text."""

OTHER_MS: Final = 640.0
"""Init and prefill. Load is "up to 72 % of TTFT" in SLLM-CM (§5.2): of the largest model, GPT-20B, whose 41 GB take
1.65 s at `LLM_BPS`, the rest is 0.64 s; assumed for all models and policies.
"""

ANSWER: Final = 161
"""Tokens decoded: mean of the means of the four data sets (Llama tokens; ShareGPT 278, GSM8K 130, Alpaca 169, HumanEval
66).
"""

RTX4090_BPS: Final = 1008 * GB
"""Assumption: a token takes as long as the GPU (its data sheet) takes to read all weights, which is so for single
requests. With Table 1's throughput as that of a batch of 16 instead, a request takes 5.9 s on average, and 1.6 per
second need 9.4 GPUs: the paper's eight then have no tail that falls.
"""

LOCALITY: Final = {"L1": (0.25, 0.0), "L2": (0.5, 0.22), "L3": (1.0, 0.44), "L4": (2.0, 0.74)}
"""CV of the gaps (§5.1), and share of requests for the same model as the one before (``benchmarks.pool_trace``)."""


def decode_ms(of: Model) -> float:
    """Time from the first token to the last."""
    return ANSWER * of.nbytes / RTX4090_BPS * 1000


MEAN_TOKENS: Final = sum(TOKENS.values()) / len(TOKENS)
"""Of a request with its answer."""

MAX_TOKENS: Final = 2048
"""The same at most: what the oldest of the models, OPT and GPT-NeoX, can have."""


def pool_of(nbytes: int) -> list[Model]:
    """Fig. 12b: so many of Tangram's models, small and large in turn, that they have at most ``nbytes``. More than
    eight are the same ones again with other weights: the paper names no more.
    """
    by_name = {of.name: of for of in language_models()}
    turn = ("llama8B", "opt1.3B", "opt13B", "qwen3B", "opt6.7B", "gpt20B", "llama3B", "yi9B")
    found: list[Model] = []
    while True:
        copy, index = divmod(len(found), len(turn))
        of = by_name[turn[index]]
        if sum(model.nbytes for model in found) + of.nbytes > nbytes:
            return found
        found.append(dataclasses.replace(of, name=f"{of.name} {copy + 1}" if copy else of.name))


def workers(
    count: int, memory: int, batch: int, per_s: float, minutes: float, *,
    pool: Sequence[Model] = (), tokens: float = MEAN_TOKENS,
) -> Tree:  # fmt: skip
    """Tangram's GPUs, each in its own worker, and its models (``pool``, or the eight) of those that fit. A wake is
    load, then the rest. A batch's requests have ``tokens`` each in the KV cache. That of the largest model may be more
    than is left: then it has what is left, and shorter requests. A model may run on all GPUs at once.
    """
    models = [of for of in pool or language_models() if of.nbytes + 2 * GB <= memory]
    total = sum(of.share for of in models)
    return {
        "gpus": {"count": count, "memory": memory, "link": LLM_BPS},
        "models": [
            {
                "name": of.name,
                "size": of.nbytes,
                "activation": min(int(batch * tokens * of.kv_nbytes), memory - of.nbytes),
                "run": round(OTHER_MS + decode_ms(of), 3),
                "wake": round(OTHER_MS + decode_ms(of) + of.nbytes / LLM_BPS * 1000, 3),
                "rate": per_s * 60 * of.share / total,
                "deadline": "60s",  # there is none in the paper
                "instances": count,
            }
            for of in models
        ],
        "arrivals": {"process": "poisson", "minutes": minutes},
    }


def decodes_s() -> dict[str, float]:
    """What of a lease lies after the first token, by model."""
    return {of.name: decode_ms(of) / 1000 for of in language_models()}
