"""A language model on a node: first tokens of models that sleep, neighbours, and what the way to the client costs.

    python -m benchmarks.llm_node [--folder build/smollm2] [--parts front,beside,sleeping,many,fork] [--out FILE]

* ``front``: processor milliseconds of router and instances for each step with sixteen streams.
* ``beside``: p99 of an ordinary function's requests, alone and beside a language model that always computes.
* ``sleeping``: the first token of a model that is not on the GPU, over a link on which its copy takes as long as its
  prefill.
* ``many``: twelve models of three architectures, asked in turn on a GPU that holds four of them.
* ``fork``: time until a blank runtime answers, and memory that is its own once it has computed.
"""

import argparse
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import openai

if __name__ == "__main__":
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # as runtimes have it: threads that wait leave the cores to the others

import torch
from safetensors.torch import load_file, save_file

from benchmarks.front import spent_s, summary
from benchmarks.llm import Alone, at_once
from benchmarks.report import Goal, arguments, report
from dormouse.core.folder import FunctionFolder
from dormouse.core.links.fds import PacketSocket, close_all
from dormouse.core.node import procfs
from dormouse.core.node.testing import TestNode, running_node
from dormouse.schemas import messages as m
from examples import smollm2

PROMPT: Final = 128
NEW: Final = 64
MODELS: Final = 12
GRANULES: Final = 64 << 20
"""Room on a GPU beside the models: KV, activations and what granules leave."""

ORDINARY: Final = """
import torch

def load():
    return torch.ones(1 << 18, device="cuda")

def handle(model, request):
    return float(model.sum().item())
"""
LARGE: Final = """
import torch

def load():
    return torch.ones({nbytes} // 4, device="cuda")

def handle(model, request):
    return float(model[:8].sum().item())
"""


def prompt(seed: int, length: int = PROMPT, vocabulary: int = 40_000) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(100, vocabulary, (length,), generator=generator).tolist()
    return tokens


class Client:
    """Of a node's OpenAI interface; no two prompts are equal."""

    def __init__(self, node: TestNode) -> None:
        self.openai = openai.OpenAI(base_url=f"http://127.0.0.1:{node.port}/v1", api_key="none", max_retries=0)
        self._seeds = iter(range(10_000, 10_000_000))

    def first_ms(self, name: str = "chat") -> float:
        began_s = time.perf_counter()
        stream = self._stream(name, 2)
        next(iter(stream))
        first_ms = (time.perf_counter() - began_s) * 1e3
        for _ in stream:
            pass
        return first_ms

    def speak(self, new: int, name: str = "chat") -> None:
        """A whole stream."""
        for _ in self._stream(name, new):
            pass

    def _stream(self, name: str, new: int) -> Any:
        return self.openai.completions.create(
            model=name, prompt=prompt(next(self._seeds)), max_tokens=new, temperature=0, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip


@contextmanager
def serving(folder: Path, dtype: str, gpu: str) -> Iterator[tuple[TestNode, Client]]:
    with running_node(f'[gpu]\ncount = 1\nthreads = 2\npool = "pages"\n{gpu}\n') as node:
        deploy(node, "chat", folder, dtype)
        yield node, Client(node)


def deploy(node: TestNode, name: str, folder: Path, dtype: str) -> None:
    settings = {"llm": True, "dtype": dtype, "context": 2048}
    node.admin.deploy(name, FunctionFolder(folder.absolute(), "config.json", False), settings)


def front(folder: Path, dtype: str, rounds: int) -> dict[str, Any]:
    """Sixteen streams at once; a step is a token of each, so steps are tokens / 16."""
    with serving(folder, dtype, 'memory = "1GiB"') as (node, client):
        client.first_ms()
        router, steps = node.pids()["router"], 0
        instances = [pid for pid in node.descendants() if _is_instance(node, pid)]
        assert instances
        before_s, before = spent_s([router]), spent_s(instances)
        for _ in range(rounds):
            at_once(lambda _: client.speak(NEW), range(16), 16)
            steps += NEW
        return {
            "router, ms of a step": (spent_s([router]) - before_s) / steps * 1e3,
            "instance, ms of a step": (spent_s(instances) - before) / steps * 1e3,
            "as the node tells": node.status()["functions"]["chat"]["llm"],
        }


def _is_instance(node: TestNode, pid: int) -> bool:
    """Forked by the node's zygote, whose command line it has."""
    zygote = node.pids()["zygote"]
    return pid != zygote and procfs.words(pid) == procfs.words(zygote)


def beside(folder: Path, dtype: str, seconds: float) -> dict[str, Any]:
    """Requests of an ordinary function one after the other, beside four clients that never stop asking the model."""
    with serving(folder, dtype, 'memory = "1GiB"') as (node, client):
        node.deployed("ninth", ORDINARY)
        client.first_ms()

        def asked() -> dict[str, float]:
            times, end_s = [], time.monotonic() + seconds
            while time.monotonic() < end_s:
                began_s = time.perf_counter()
                assert node.result("ninth", {}) == float(1 << 18)
                times.append((time.perf_counter() - began_s) * 1e3)
            return summary(times)

        time.sleep(3)  # until the seat is left
        alone = asked()
        stop = threading.Event()

        def talk() -> None:
            while not stop.is_set():
                client.speak(NEW)

        talking = [threading.Thread(target=talk) for _ in range(4)]
        for thread in talking:
            thread.start()
        busy = asked()
        stop.set()
        for thread in talking:
            thread.join()
    return {"alone": alone, "beside": busy}


def sleeping(folder: Path, dtype: str, rounds: int) -> dict[str, Any]:
    """The link is as wide as makes the copy as long as the prefill is in this process."""
    nbytes = sum(each.numel() for each in load_file(folder / "model.safetensors").values()) * torch_size(dtype)
    alone = Alone(folder, dtype)
    prefill_ms = statistics.median(prefill(alone, seed) for seed in range(5))
    other_nbytes = nbytes + GRANULES
    memory_nbytes = other_nbytes + GRANULES
    link = int(nbytes / prefill_ms * 1e3)
    with serving(folder, dtype, f'memory = "{memory_nbytes}"\nlink = "{link}"') as (node, client):
        node.deployed("large", LARGE.format(nbytes=other_nbytes))
        client.first_ms()
        resident, asleep, prefills = [], [], []
        for number in range(rounds):
            resident.append(client.first_ms())
            prefills.append(prefill(alone, 100 + number))
            node.result("large", {})  # all of the model leaves
            asleep.append(client.first_ms())
    copy_ms = nbytes / link * 1e3
    return {
        "copy, ms": copy_ms,
        "prefill alone, ms": statistics.median(prefills),
        "first token, on the GPU, ms": statistics.median(resident),
        "first token, asleep, ms": statistics.median(asleep),
        "all asleep, ms": asleep,
    }


def torch_size(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else 4


def prefill(alone: Alone, seed: int) -> float:
    """Milliseconds of one prompt's prefill in this process."""
    from dormouse.gpuserver.runtime.batch import Sequence as Tokens
    from dormouse.gpuserver.runtime.engine import Engine, Generation
    from dormouse.gpuserver.runtime.sampling import Sampling

    engine = Engine(alone.model, alone.attention, lambda blocks: False)
    engine.add_extent(0, 0, alone.attention.memory.nbytes)
    engine.add(0, Generation(Tokens(0, prompt(seed), PROMPT, PROMPT + 1), Sampling(), frozenset()))
    began_s = time.perf_counter()
    while not engine.batch.idle:
        engine.step()
    return (time.perf_counter() - began_s) * 1e3


# --- many models


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
    return {"models": MODELS, "wrong": wrong, **summary(times)}


def _likely(smol: Path, text: str, logits: torch.Tensor) -> bool:
    """Whether a token with this text is within bf16's rounding of the most probable one."""
    from transformers import AutoTokenizer

    words: Any = AutoTokenizer.from_pretrained(smol)
    near = (logits >= logits.max() - 2**-6 * logits.abs().max()).nonzero().flatten().tolist()
    return text in {words.decode([token], skip_special_tokens=True) for token in near}


# --- the process


def fork(folder: Path, dtype: str, rounds: int) -> dict[str, Any]:
    """From the wish for a runtime to its first answer, of a zygote in this process's place of an executor."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "dormouse.gpuserver.runtime.zygote", str(theirs.fileno())]
    with theirs:
        process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env={**os.environ, "DORMOUSE_PARENT": str(os.getpid())}
        )
    zygote: PacketSocket[m.FromRuntimeZygote, m.ToRuntimeZygote] = PacketSocket(ours, m.FromRuntimeZygote)
    zygote.sock.setblocking(True)
    try:
        assert zygote.recv() is not None
        times = [_blank_ms(zygote, number) for number in range(1, rounds + 1)]
    finally:
        process.kill()
        process.wait()
        zygote.close()
    with serving(folder, dtype, 'memory = "1GiB"') as (node, client):
        client.first_ms()
        pids = [pid for pid in node.descendants() if _is_runtime(pid)]
        own_kib = [_private_kib(pid) for pid in pids]
    return {"fork to first answer, ms": statistics.median(times), "private memory, MiB": max(own_kib) / 1024}


def _blank_ms(zygote: PacketSocket[m.FromRuntimeZygote, m.ToRuntimeZygote], number: int) -> float:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    runtime: PacketSocket[m.RuntimeToExecutor, m.ExecutorToRuntime] = PacketSocket(ours, m.RuntimeToExecutor)
    runtime.sock.setblocking(True)
    began_s = time.perf_counter()
    with theirs:
        spawn = m.SpawnRuntime(number=number, uid=os.getuid(), address_nbytes=1 << 30, threads=2)
        zygote.send(spawn, [theirs.fileno()])
    runtime.send(m.SeatEnds())
    packet = runtime.recv()
    took_ms = (time.perf_counter() - began_s) * 1e3
    assert packet is not None
    assert packet[0] == m.SeatLeft()
    said = zygote.recv()
    assert said is not None
    signal.pidfd_send_signal(said[1][0], signal.SIGKILL)
    close_all(said[1])
    runtime.close()
    return took_ms


def _is_runtime(pid: int) -> bool:
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return all("dormouse.gpuserver.runtime.zygote" in procfs.words(each) for each in (pid, parent))


def _private_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean", "Private_Dirty")))


# --- all


def goals(results: dict[str, Any]) -> list[Goal]:
    found = []

    def goal(name: str, wanted: str, measured: float, met: bool) -> None:
        found.append(Goal(name=name, goal=wanted, measured=measured, met=met))

    if (each := results.get("front")) is not None:
        total = each["router, ms of a step"] + each["instance, ms of a step"]
        goal("router and instance, processor ms of a step, 16 streams", "<= 1.6", total, total <= 1.6)
    if (each := results.get("beside")) is not None:
        over = each["beside"]["p99 ms"] - 1.5 * each["alone"]["p99 ms"]
        goal("p99 beside a saturated model, over 1.5 x alone, ms", "<= one turn of one brief step", over, over <= 75)
    if (each := results.get("sleeping")) is not None:
        longer = max(each["copy, ms"], each["prefill alone, ms"])
        over = each["first token, asleep, ms"] - 1.1 * longer
        goal("first token of a sleeping model, over 1.1 x max(copy, prefill), ms", "<= 120", over, over <= 120)
        over = each["first token, on the GPU, ms"] - 1.2 * each["prefill alone, ms"]
        goal("first token, on the GPU, over 1.2 x prefill, ms", "<= 40", over, over <= 40)
    if (each := results.get("many")) is not None:
        goal("12 models on a GPU for 4: wrong answers", "0", len(each["wrong"]), not each["wrong"])
        goal("12 models on a GPU for 4: first token, p50, ms", "", each["p50 ms"], True)
        goal("12 models on a GPU for 4: first token, p99, ms", "", each["p99 ms"], True)
    if (each := results.get("fork")) is not None:
        took_ms = each["fork to first answer, ms"]
        goal("fork of a blank runtime, ms", "<= 60", took_ms, took_ms <= 60)
        goal("private memory of a runtime that has computed, MiB", "", each["private memory, MiB"], True)
    return found


def main(args: argparse.Namespace) -> None:
    folder, rounds = smollm2.build(args.folder), 3 if args.quick else 10
    torch.set_num_threads(2)
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "front": lambda: front(folder, args.dtype, 1 if args.quick else 4),
        "beside": lambda: beside(folder, args.dtype, 5.0 if args.quick else 20.0),
        "sleeping": lambda: sleeping(folder, args.dtype, rounds),
        "many": lambda: many(folder, 1 if args.quick else 4),
        "fork": lambda: fork(folder, args.dtype, rounds),
    }
    chosen: Sequence[str] = args.parts.split(",")
    if unknown := set(chosen) - set(parts):
        sys.exit(f"there are no parts {sorted(unknown)}; there are {', '.join(parts)}")
    results = {}
    for part in chosen:
        results[part] = parts[part]()
        print(part, results[part], flush=True)
    report(goals(results), args, {"results": results})


if __name__ == "__main__":
    parser = arguments(__doc__ or "")
    parser.add_argument("--folder", type=Path, default=Path("build/smollm2"))
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--parts", default="front,beside,sleeping,many,fork")
    main(parser.parse_args())
