"""Torpor's Table 4 on a GPU: eight models, native, redirected, woken from host memory, and cold (Torpor, section 7.2).

Random weights at the published sizes, batch 1. For each model: one process of PyTorch's own on the device; then a node
for each pool with two functions of the model and room for one of them, so that asking them in turn wakes each time,
and asking one again does not. As in the paper a request comes once a second, after one to warm up; every answer is
compared with PyTorch's on the same device.

    python -m benchmarks.gpu_models [--models NAME,...] [--pools regions,pages] [--requests N] [--pause SECONDS]

Without a GPU, and over the fake driver of the tests, "native" is the CPU: to see that it runs.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any, Final

from benchmarks.nodes.testnode import TestNode, running_node
from benchmarks.report import arguments, report
from dormouse.gpuserver.device.cuda.probe import device_memory_is_host_memory

MIB: Final = 1 << 20

SOURCE: Final = """
import time
import torch

def vision(name, side=224, **settings):
    import torchvision
    model = getattr(torchvision.models, name)(weights=None, **settings)
    return model, lambda g: (torch.randn(1, 3, side, side, generator=g),)

def bert(**sizes):
    import transformers
    model = transformers.BertModel(transformers.BertConfig(**sizes))
    length = min(512, model.config.max_position_embeddings)
    return model, lambda g: (torch.randint(0, model.config.vocab_size, (1, length), generator=g),)

def mlp():
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(1024, 1024), torch.nn.ReLU())]
    return torch.nn.Sequential(*layers), lambda g: (torch.randn(1, 1024, generator=g),)

def decoding(length):
    import transformers

    class Step(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = transformers.GPT2LMHeadModel(transformers.GPT2Config(bos_token_id=0, eos_token_id=0))
            self.register_buffer("past", torch.randn(12, 2, 1, 12, length, 64))

        def forward(self, ids):
            cache = transformers.DynamicCache()
            for layer, (key, value) in enumerate(self.past):
                cache.update(key, value, layer)
            return self.model(ids, past_key_values=cache).logits

    return Step(), lambda g: (torch.randint(0, 50257, (1, 1), generator=g),)

def small():
    layers = [layer for _ in range(4) for layer in (torch.nn.Conv2d(64, 64, 3, padding=1), torch.nn.ReLU())]
    return torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(64 * 64, 2048)), \\
        lambda g: (torch.randn(1, 64, 8, 8, generator=g),)

def build(seed):
    torch.manual_seed(seed)
    with torch.no_grad():
        model, inputs = MODEL
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.uniform_(0.5, 1.5)
    return model.eval().to(DEVICE), inputs

def forward(state, seed):
    model, inputs = state
    operands = [each.to(DEVICE) for each in inputs(torch.Generator().manual_seed(seed))]
    with torch.inference_mode():
        began = time.perf_counter()
        out = model(*operands)
        issued_ms = (time.perf_counter() - began) * 1e3
        out = out if isinstance(out, torch.Tensor) else out[0]
        return out.flatten()[:: max(1, out.numel() // 64)][:64].tolist(), issued_ms
"""

FUNCTION: Final = """
def load():
    return build(SEED)

def handle(state, request):
    from dormouse.client_shim.torch_face.remote_tensor import world
    recorded = world.stream.commands_recorded
    answer, issued_ms = forward(state, request)
    return {"answer": answer, "issued_ms": issued_ms, "commands": world.stream.commands_recorded - recorded}
"""

NATIVE: Final = """
import json
import sys
seed, requests, pause_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
state = build(seed)
answers, latencies_ms = [], []
for request in range(requests):
    time.sleep(pause_s)
    began = time.perf_counter()
    answer, _ = forward(state, request)
    latencies_ms.append((time.perf_counter() - began) * 1e3)
    answers.append(answer)
nbytes = sum(each.nbytes for each in (*state[0].parameters(), *state[0].buffers()))
print(json.dumps({"answers": answers, "latencies_ms": latencies_ms, "nbytes": nbytes}))
"""

MODELS: Final = {
    "ResNet-50": 'vision("resnet50")',
    "ResNet-101": 'vision("resnet101")',
    "ResNet-152": 'vision("resnet152")',
    "DenseNet-169": 'vision("densenet169")',
    "DenseNet-201": 'vision("densenet201")',
    "Inception-v3": 'vision("inception_v3", 299, init_weights=False)',
    "EfficientNet-B0": 'vision("efficientnet_b0")',
    "BERT-base": "bert()",
}
OTHERS: Final = {
    "BERT-large": "bert(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)",
    "GPT-2-step": "decoding(128)",
    "MLP": "mlp()",
    "small": "small()",
}
SEEDS: Final = (1, 2)
ACTIVATION_MIB: Final = 512


def source(model: str, device: str) -> str:
    return SOURCE.replace("MODEL", (MODELS | OTHERS)[model]).replace("DEVICE", repr(device))


def native(model: str, device: str, seed: int, requests: int, pause_s: float) -> dict[str, Any]:
    """``cold_s`` is from the process's start to its first answer, the others are in ms. Raises RuntimeError."""
    began = time.perf_counter()
    code = source(model, device) + "torch.set_num_threads(1)\n" + NATIVE
    command = [sys.executable, "-c", code, str(seed), str(requests), str(pause_s)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "native PyTorch failed")
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    warm_s = sum(told["latencies_ms"][1:]) / 1e3 + pause_s * requests
    return told | {"cold_s": time.perf_counter() - began - warm_s}


def difference(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


class Asked:
    """A function's requests on a node."""

    def __init__(self, node: TestNode, seed: int, model: str) -> None:
        self.node, self.name = node, f"f{seed}"
        code = source(model, "cuda") + FUNCTION.replace("SEED", str(seed))
        began = time.perf_counter()
        node.deployed(self.name, code)
        self.answers: dict[int, list[float]] = {}
        self.told: dict[str, Any] = {}
        self.ask(0)
        self.cold_s = time.perf_counter() - began

    def ask(self, request: int) -> float:
        """Milliseconds until the answer is here."""
        began = time.perf_counter()
        self.told = self.node.result(self.name, request)
        spent_ms = (time.perf_counter() - began) * 1e3
        self.answers[request] = self.told["answer"]
        return spent_ms


def redirected(model: str, pool: str, nbytes: int, requests: int, pause_s: float) -> dict[str, Any]:
    """Latencies in ms of requests that find the model awake, and of those that find it asleep."""
    pool_mib = nbytes * 3 // 2 // MIB + 16
    if pool == "pages":
        pool_mib = max(pool_mib, 2 * 64)  # a large granule, and small ones
    section = f'[gpu]\ncount = 1\nmemory = "{pool_mib + ACTIVATION_MIB}MiB"\nactivations = "{ACTIVATION_MIB}MiB"\n'
    section += f'device = "cuda"\npool = "{pool}"\nthreads = 1\n'  # as native PyTorch, where that is the CPU
    with running_node(section) as node:
        functions = [Asked(node, seed, model) for seed in SEEDS]
        awake, asleep, wakes_ms, client_ms = [], [], [], []
        functions[0].ask(0)
        for request in range(requests):
            time.sleep(pause_s)
            awake.append(functions[0].ask(request))
            client_ms.append(functions[0].told["issued_ms"])
        for request in range(requests):
            for function in reversed(functions):  # the other's last request has put this one to sleep
                time.sleep(pause_s)
                asleep.append(function.ask(request))
                wakes_ms.append((node.status()["functions"][function.name]["last_wake"]["wake_us"] or 0) / 1e3)
        status = node.status()
        told = [status["functions"][function.name] for function in functions]
        return {
            "awake_ms": awake[1:],
            "asleep_ms": asleep[2:],
            "wake_ms": wakes_ms[2:],
            "client_ms": client_ms[1:],
            "commands": functions[0].told["commands"],
            "cold_s": functions[0].cold_s,
            "wakes": [each["wakes"] for each in told],
            "repaired": sum(each["repaired"] for each in told),
            "trouble": status["gpus"]["0"]["trouble"],
            "answers": [function.answers for function in functions],
        }


def measure(model: str, device: str, pools: list[str], requests: int, pause_s: float) -> dict[str, Any]:
    alone = [native(model, device, seed, requests, pause_s) for seed in SEEDS]
    result: dict[str, Any] = {
        "MB": alone[0]["nbytes"] / 1e6,
        "native ms": statistics.median(alone[0]["latencies_ms"][1:]),
        "native cold s": alone[0]["cold_s"],
    }
    for pool in pools:
        found = redirected(model, pool, alone[0]["nbytes"], requests, pause_s)
        pairs = [
            (answer, native["answers"][request])
            for answers, native in zip(found["answers"], alone, strict=True)
            for request, answer in answers.items()
        ]
        result[pool] = {
            "awake ms": statistics.median(found["awake_ms"]),
            # None: granules are so large that both functions fitted.
            "asleep ms": statistics.median(found["asleep_ms"]) if sum(found["wakes"]) > requests else None,
            "wake ms": statistics.median(found["wake_ms"]) if sum(found["wakes"]) > requests else None,
            "client ms": statistics.median(found["client_ms"]),
            "commands": found["commands"],
            "cold s": found["cold_s"],
            "wakes": sum(found["wakes"]),
            "repaired": found["repaired"],
            "difference": max(difference(*pair) for pair in pairs),
            "compared": len(pairs),
            "trouble": found["trouble"],
        }
    return result


def main(args: argparse.Namespace) -> None:
    import torch

    device = "cuda" if not device_memory_is_host_memory() and torch.cuda.is_available() else "cpu"
    results: dict[str, Any] = {}
    for model in args.models.split(","):
        try:
            results[model] = measure(model, device, args.pools.split(","), args.requests, args.pause)
        except (RuntimeError, AssertionError, subprocess.TimeoutExpired) as error:  # the others are worth having
            results[model] = {"failed": str(error)[-1000:]}
        print(model, json.dumps(results[model]), flush=True)
        if args.out is not None:  # as it goes: the last model may be the one that does not end
            args.out.write_text(json.dumps({"results": results}, indent=1) + "\n")
    report([], args, {"results": results})
    if any("failed" in found for found in results.values()):
        sys.exit(1)


if __name__ == "__main__":
    parser = arguments(__doc__ or "")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--pools", default="regions,pages")
    parser.add_argument("--requests", type=int, default=10)
    parser.add_argument("--pause", type=float, default=1.0, help="seconds before each request")
    main(parser.parse_args())
