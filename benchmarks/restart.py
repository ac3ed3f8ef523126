"""How long after `kill -9` of a whole node its functions answer again, with 5 GB of models in the store.

A real node with one emulated GPU. All processes are killed at once, the store's segment files and the checkpoints are
dropped from the page cache, and the node is started with the same state directory. Requests are sent from the first
moment on until one is answered; ``load()`` measures itself and the answer says how long it took. This is done once for
a function that reads its weights from a file, and once for one that makes them. Answers are compared bit by bit.
"""

import argparse
import http.client
import os
import threading
import time
from pathlib import Path
from typing import Any, Final

import safetensors.torch
import torch

from benchmarks.nodes.testnode import TestNode, running_node
from benchmarks.report import Goal, arguments, report

FIRST_GOAL_S: Final = 10.0  # beyond the function's own load()
TENSOR_NBYTES: Final = 16 << 20
MODELS: Final = 5  # of about 1 GB each; the last one is made, the others are read
RETRY_S: Final = 0.02

HANDLE: Final = """
def handle(loaded, request):
    state, load_s = loaded
    return {"load_s": load_s, "bits": [value.sum(dtype=torch.int64).item() for value in state.values()]}
"""

READ: Final = """
import time
from pathlib import Path
import torch
from safetensors.torch import load_file

def load():
    begun_s = time.perf_counter()
    state = load_file(Path(__file__).parent / "NAME.safetensors", device="cuda")
    return state, time.perf_counter() - begun_s
"""

MADE: Final = """
import time
import torch

def load():
    begun_s = time.perf_counter()
    torch.manual_seed(SEED)
    state = {str(k): torch.empty(ELEMENTS, dtype=torch.int32).random_().to("cuda") for k in range(TENSORS)}
    return state, time.perf_counter() - begun_s
"""


def weights(seed: int, tensors: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {str(k): torch.empty(TENSOR_NBYTES // 4, dtype=torch.int32).random_() for k in range(tensors)}


def deploy(node: TestNode, models: int, tensors: int) -> dict[str, list[int]]:
    """All functions; the right answers by name, in the order in which the function has its tensors."""
    expected: dict[str, list[int]] = {}
    texts: dict[str, str] = {}
    files: dict[str, dict[str, Path | str]] = {}
    for seed in range(models):
        name = f"m{seed}"
        state = weights(seed, tensors)
        sums = {key: int(value.sum(dtype=torch.int64).item()) for key, value in state.items()}
        if seed < models - 1:
            path = node.directory / f"{name}.safetensors"
            safetensors.torch.save_file(state, path)
            files[name] = {path.name: path}
            texts[name] = READ.replace("NAME", name) + HANDLE
            expected[name] = [sums[key] for key in sorted(sums)]
        else:
            text = MADE.replace("SEED", str(seed)).replace("TENSORS", str(tensors))
            texts[name] = text.replace("ELEMENTS", str(TENSOR_NBYTES // 4)) + HANDLE
            expected[name] = list(sums.values())
    for name, text in texts.items():
        node.deployed(name, text, files.get(name))
    return expected


def drop_from_cache(node: TestNode) -> None:
    """Files are read from the disk again, as after a restart of the machine."""
    for path in [*(node.state / "store").rglob("*"), *(node.state / "functions").rglob("*")]:
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def disk_nbytes(node: TestNode) -> dict[str, int]:
    """What the store's process has read, and what of it came from the disk."""
    lines = Path(f"/proc/{node.pids()['store']}/io").read_text().splitlines()
    values = dict(line.split(": ") for line in lines)
    return {"read_nbytes": int(values["rchar"]), "disk_nbytes": int(values["read_bytes"])}


def restart(node: TestNode, name: str, expected: dict[str, list[int]]) -> dict[str, Any]:
    """Kill, start, and ask until there is an answer."""
    node.kill_all()
    drop_from_cache(node)
    begun_s = time.perf_counter()
    result: dict[str, Any] = {}

    def ask() -> None:
        while "first_s" not in result:
            try:
                answer = node.invoke(name, {})
            except (OSError, http.client.HTTPException):  # not listening yet
                time.sleep(RETRY_S)
                continue
            if answer.status == 200:
                result["first_s"] = time.perf_counter() - begun_s
                result["load_s"] = answer.body["load_s"]
                assert answer.body["bits"] == expected[name], name
            else:
                time.sleep(RETRY_S)

    asking = threading.Thread(target=ask)
    asking.start()
    node.start()
    result["up_s"] = time.perf_counter() - begun_s
    asking.join()
    result |= disk_nbytes(node)
    for other, bits in expected.items():
        assert node.result(other, {})["bits"] == bits, other
    result["all_s"] = time.perf_counter() - begun_s
    result["wake"] = node.status()["functions"][name]["last_wake"]
    return result


def main(args: argparse.Namespace) -> None:
    tensors = 8 if args.quick else 64
    config = f'[gpu]\ncount = 1\nmemory = "{tensors * TENSOR_NBYTES + (256 << 20)}"\n'
    results: dict[str, Any] = {}
    with running_node(config) as node:
        expected = deploy(node, MODELS, tensors)
        total = MODELS * tensors * TENSOR_NBYTES
        node.wait(lambda: node.status()["store"]["file_nbytes"] == total, 300, "everything to be in files")
        for kind, name in (("read", "m0"), ("made", f"m{MODELS - 1}")):
            results[kind] = restart(node, name, expected)
            print(f"{kind}: {results[kind]}", flush=True)
    goals = []
    for kind, result in results.items():
        beyond_s = result["first_s"] - result["load_s"]
        goals.append(
            Goal(
                name=f"{total / 1e9:.1f} GB in the store, weights {kind}: first answer - load(), s",
                goal=f"<= {FIRST_GOAL_S:g}",
                measured=beyond_s,
                met=beyond_s <= FIRST_GOAL_S,
            )
        )
    report(goals, args, {"store_nbytes": total, "restarts": results})


if __name__ == "__main__":
    main(arguments(__doc__.splitlines()[0] if __doc__ else "").parse_args())
