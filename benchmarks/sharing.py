"""What fine-tunes of one model cost beside it: bytes on the host, bytes on a GPU, and the copies of their wakes.

A real node with one emulated GPU serves checkpoints of BERT-base (Devlin et al. 2018), each a folder of its own that
``from_pretrained`` reads. A fine-tune has its own biases and norms in every layer, as BitFit (Ben Zaken et al. 2022)
trains them, and its own attention output weights in two layers: together about 1 % of the bytes. What is equal lies in
another file of another function, and nobody says so: the store finds it. Every answer is compared with PyTorch's.
"""

import argparse
from typing import Any, Final

import torch

from benchmarks.nodes.testnode import TestNode, running_node
from benchmarks.report import Goal, arguments, report

TUNES: Final = 8
TOTAL_GOAL: Final = 1.10  # bytes of all fine-tunes / of one model
WAKE_GOAL: Final = 0.03  # copies of another one's wake / of the first one's
SEQUENCE: Final = 64
CONFIG: Final = '[sandbox]\n[gpu]\ncount = 1\nmemory = "1GiB"\n'

FUNCTION: Final = """
from pathlib import Path
import torch
from transformers import BertForQuestionAnswering

def load():
    return BertForQuestionAnswering.from_pretrained(Path(__file__).parent / "NAME").eval().to("cuda")

def handle(model, request):
    return model(torch.tensor([request], device="cuda")).start_logits[0].tolist()
"""


def tune(model: Any, number: int) -> int:
    """Make the model the fine-tune of this number; returns the bytes in which it differs from every other one."""
    generator = torch.Generator().manual_seed(number)
    layers = model.bert.encoder.layer
    changed = [value for layer in layers for name, value in layer.named_parameters() if value.ndim == 1]
    changed += [layers[k].attention.output.dense.weight for k in (len(layers) // 3, 2 * len(layers) // 3)]
    for value in changed:
        value.add_(torch.randn(value.shape, generator=generator) * 0.01)
    return sum(value.nbytes for value in changed)


def deploy(node: TestNode, count: int) -> tuple[dict[str, list[float]], float]:
    """Functions tune0, tune1, …; native answers by name, and the share of its own bytes that a fine-tune has."""
    from transformers import BertConfig, BertForQuestionAnswering

    torch.manual_seed(0)
    base = BertForQuestionAnswering(BertConfig()).state_dict()
    model = BertForQuestionAnswering(BertConfig())
    model.train(False)
    nbytes = sum(value.nbytes for value in base.values())
    own_nbytes = 0
    expected: dict[str, list[float]] = {}
    for number in range(count):
        name = f"tune{number}"
        with torch.no_grad():
            model.load_state_dict(base)
            own_nbytes = tune(model, number)
            expected[name] = model(torch.tensor([request(number)])).start_logits[0].tolist()
        folder = node.directory / name
        model.save_pretrained(folder)
        node.deployed(name, FUNCTION.replace("NAME", name), {name: folder})
    return expected, own_nbytes / nbytes


def request(number: int) -> list[int]:
    return torch.randint(0, 30522, (SEQUENCE,), generator=torch.Generator().manual_seed(number)).tolist()


def ask(node: TestNode, number: int, expected: dict[str, list[float]]) -> dict[str, Any]:
    """One right answer; returns what the function's last wake has cost."""
    name = f"tune{number}"
    answer = torch.tensor(node.result(name, request(number)))
    assert torch.allclose(answer, torch.tensor(expected[name]), atol=1e-4), name
    wakes: list[dict[str, Any]] = []

    def told() -> bool:
        """The lease ends a moment after the answer, and is counted then."""
        wakes[:] = [node.status()["functions"][name]["last_wake"]]
        return wakes[0] is not None

    node.wait(told, 10, f"the wake of {name} to be counted")
    return wakes[0]


def main(args: argparse.Namespace) -> None:
    count = 3 if args.quick else TUNES
    with running_node(CONFIG) as node:
        expected, share = deploy(node, count)
        wakes = [ask(node, number, expected) for number in range(count)]
        for number in reversed(range(count)):  # what came later has changed nothing
            ask(node, number, expected)
        status = node.status()
    functions = status["functions"]
    gpu = status["gpus"]["0"]
    one = functions["tune0"]["nbytes"]
    host = status["store"]["host_nbytes"] / one
    device = (gpu["weights_nbytes"] + gpu["lost_nbytes"]) / one
    first, others = wakes[0], wakes[1:]
    assert len(gpu["resident"]) == count, "they are to be on the GPU together"
    assert all(len(row["shared_with"]) == count - 1 for row in functions.values())
    again = max(wake["copied_nbytes"] for wake in others) / first["copied_nbytes"]
    print(f"one model: {one:,} bytes, of which a fine-tune has {share:.2%} of its own; pool {gpu['pool']}")
    print(f"first wake {first['wake_us'] / 1e3:.1f} ms, others {[wake['wake_us'] / 1e3 for wake in others]} ms")
    goals = [
        Goal(
            name=f"host bytes of {count} fine-tunes / of one",
            goal=f"<= {TOTAL_GOAL}",
            measured=host,
            met=host <= TOTAL_GOAL,
        ),
        Goal(
            name=f"GPU bytes of {count} fine-tunes / of one",
            goal=f"<= {TOTAL_GOAL}",
            measured=device,
            met=device <= TOTAL_GOAL,
        ),
        Goal(
            name="copies of another one's wake / of the first's, worst",
            goal=f"<= {WAKE_GOAL}",
            measured=again,
            met=again <= WAKE_GOAL,
        ),
    ]
    report(goals, args, {"own_share": share, "model_nbytes": one, "wakes": wakes, "status": status})


if __name__ == "__main__":
    main(arguments(__doc__.splitlines()[0] if __doc__ else "").parse_args())
