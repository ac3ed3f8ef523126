"""Requests per second of a function in batches and one by one: ``python -m benchmarks.request_batches``.

Sixteen clients send requests of 16 tokens to a transformer of the size of all-MiniLM-L6-v2 (six layers of 384, random
weights), to two functions in turns.
"""

import argparse
import statistics
import threading
import time

from dormouse.core.node.testing import TestNode, running_node

FUNCTION = """
import torch
from torch import nn

def load():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(384, 12, 1536, activation="gelu", batch_first=True, dropout=0.0)
    return nn.ModuleDict({
        "words": nn.Embedding(30522, 384), "layers": nn.TransformerEncoder(layer, 6, enable_nested_tensor=False),
    }).to("cuda").eval()

def handle_batch(model, requests):
    tokens = torch.tensor(requests).to("cuda")
    with torch.no_grad():
        vectors = model["layers"](model["words"](tokens)).mean(1)
    return vectors.cpu().numpy()[:, :8].tolist()
"""


def rate(node: TestNode, name: str, clients: int, seconds: float) -> tuple[float, float]:
    """Requests per second, and their median latency in milliseconds."""
    took: list[float] = []
    end_s = time.monotonic() + seconds

    def client(number: int) -> None:
        tokens = [(number * 131 + i * 17) % 30522 for i in range(16)]
        while (began_s := time.monotonic()) < end_s:
            node.result(name, tokens)
            took.append(time.monotonic() - began_s)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(took) / seconds, statistics.median(took) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with running_node('[gpu]\ncount = 1\nmemory = "512MiB"\n') as node:
        node.deployed("alone", FUNCTION)
        node.deployed("batched", FUNCTION, batch=16)
        tokens = list(range(16))
        alone, batched = node.result("alone", tokens), node.result("batched", tokens)
        assert max(abs(a - b) for a, b in zip(alone, batched, strict=True)) < 1e-4
        found: dict[str, list[tuple[float, float]]] = {"alone": [], "batched": []}
        for _ in range(arguments.rounds):
            for name, rows in found.items():
                rows.append(rate(node, name, arguments.clients, arguments.seconds))
        medians = {name: [statistics.median(each) for each in zip(*rows, strict=True)] for name, rows in found.items()}
        for name, (per_s, ms) in medians.items():
            print(f"{name:8} {per_s:7.1f} requests/s, p50 {ms:6.1f} ms")
        print(f"batched / alone: {medians['batched'][0] / medians['alone'][0]:.2f}")


if __name__ == "__main__":
    main()
