"""Requests per second of a function in batches and one by one: ``python -m benchmarks.request_batches``.

Sixteen clients send requests to two functions in turns, which have the same model with random weights: ``minilm``, a
transformer of the size of all-MiniLM-L6-v2 (six layers of 384), or BERT-base, both with 16 tokens, or ResNet-50.
"""

import argparse
import statistics
import threading
import time

from benchmarks.nodes.testnode import TestNode, running_node

MINILM = """
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

BERT = """
import torch
from transformers import BertConfig, BertModel

def load():
    torch.manual_seed(0)
    return BertModel(BertConfig()).to("cuda").eval()

def handle_batch(model, requests):
    with torch.no_grad():
        return model(torch.tensor(requests).to("cuda")).pooler_output[:, :8].cpu().numpy().tolist()
"""

RESNET = """
import torch
from transformers import ResNetConfig, ResNetModel

def load():
    torch.manual_seed(0)
    return ResNetModel(ResNetConfig()).to("cuda").eval(), torch.randn(3, 224, 224).to("cuda")

def handle_batch(state, requests):
    model, picture = state
    scales = torch.tensor([1 + sum(each) / 1e6 for each in requests]).to("cuda")
    with torch.no_grad():
        return model(scales[:, None, None, None] * picture).pooler_output[:, :8, 0, 0].cpu().numpy().tolist()
"""

FUNCTIONS = {"minilm": MINILM, "bert": BERT, "resnet": RESNET}


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
    parser.add_argument("--model", choices=sorted(FUNCTIONS), default="minilm")
    parser.add_argument("--deadline", default="1s")
    arguments = parser.parse_args()
    function = FUNCTIONS[arguments.model]
    with running_node('[gpu]\ncount = 1\nmemory = "1GiB"\n') as node:
        node.deployed("alone", function, deadline=arguments.deadline)
        node.deployed("batched", function, deadline=arguments.deadline, batch=16)
        tokens = list(range(16))
        alone, batched = node.result("alone", tokens), node.result("batched", tokens)
        assert max(abs(a - b) for a, b in zip(alone, batched, strict=True)) < 1e-4
        found: dict[str, list[tuple[float, float]]] = {"alone": [], "batched": []}
        for _ in range(arguments.rounds):
            for name, rows in found.items():
                rows.append(rate(node, name, arguments.clients, arguments.seconds))
        medians = {name: [statistics.median(each) for each in zip(*rows, strict=True)] for name, rows in found.items()}
        status = node.status()["functions"]
        for name, (per_s, ms) in medians.items():
            share = 100 * status[name]["service"]["in_time"]
            print(f"{name:8} {per_s:7.1f} requests/s, p50 {ms:6.1f} ms, {share:5.1f}% within {arguments.deadline}")
        print(f"batched / alone: {medians['batched'][0] / medians['alone'][0]:.2f}")


if __name__ == "__main__":
    main()
