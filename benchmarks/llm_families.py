"""Greedy answers of every family of models on a real node, judged by `transformers` token for token.

For each family, with random weights in fp32, fifty prompts each:

* ``alone``: one after the other.
* ``batched``: all at once; so many were computed together at some moment.
* ``prefix reuse``: of an equal beginning, whose KV was there.
* ``resumed after a kill``: the runtime gets SIGKILL while streams are open; a stream counts if it was begun and not
  ended.
* ``preempted``: all at once on a GPU whose memory does not hold their KV.
* ``after eviction``: before each ten of them a function needed all of the GPU, and the model's weights left it.
* ``bf16``: all at once, in bf16, beside `transformers` in bf16; both judged by the same weights computed in fp32.

Each condition counts how often it has really happened, and never is a failure. A token that is not the reference's
choice is listed with what its logit lacks; in fp32 1e-4 or more is wrong. In bf16 a logprob may be as far from
fp32's as twice the largest error of `transformers`, and another token only where the reference's gap is below that.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

if __name__ == "__main__":
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

import torch
from transformers import PreTrainedModel

from benchmarks.llm_judge import GAP, judged, logits_of
from benchmarks.llm_streams import Stream, at_once
from benchmarks.llm_tiny import TINY, VOCABULARY, make_folder, never_special, prompts, reference, tokens_of
from benchmarks.nodes.testnode import TestNode, running_node
from benchmarks.report import Goal, arguments, report
from dormouse.core import procfs
from dormouse.core.folder import FunctionFolder

PROMPTS: Final = 50
NEW: Final = 32
LONG: Final = 96
"""Tokens of answers that something is to happen to."""

MANY: Final = 128
"""Tokens of answers that have no room together."""

BEGINNING: Final = 48
"""Three blocks of KV."""

AT_ONCE: Final = 10
CONFIG: Final = '[gpu]\ncount = 1\nmemory = "{memory}"\nthreads = 1\npool = "pages"\n'
LARGE: Final = """
import torch
def load():
    return torch.ones({nbytes} // 4, device="cuda")
def handle(weights, request):
    return float(weights[0].item())
"""
SMALL_NBYTES: Final = 6 << 20
LARGE_NBYTES: Final = SMALL_NBYTES - (128 << 10)
"""Beside it there is no room for any model's weights."""

RIGHT: Final = 1.0


Asked = list[list[int]]


def lengths(seed: int, count: int) -> Asked:
    """Prompts of 8 to 60 tokens."""
    generator = torch.Generator().manual_seed(seed)
    return prompts(seed, *torch.randint(8, 61, (count,), generator=generator).tolist())


def together(streams: Sequence[Stream]) -> int:
    """The most that were between their first and last token at one moment: each step computes all of these."""
    some = [stream for stream in streams if stream.times_s]
    begins = [(stream.times_s[0], 1) for stream in some] + [(stream.times_s[-1], -1) for stream in some]
    most = now = 0
    for _, step in sorted(begins):
        now += step
        most = max(most, now)
    return most


def settled(streams: Sequence[Stream]) -> None:
    """No part is on its way any more: nothing has come for a while."""
    before = -1
    while (heard := sum(len(stream.times_s) for stream in streams)) != before:
        before = heard
        time.sleep(0.2)


class Family:
    """A model on the two nodes, one with room and one without."""

    def __init__(self, name: str, folder: Path, roomy: TestNode, small: TestNode, count: int) -> None:
        self.name, self.roomy, self.small, self.count = name, roomy, small, count
        self.model: PreTrainedModel = never_special(reference(name, seed=14))
        make_folder(folder, self.model)
        self.folder = folder

    def deploy(self, node: TestNode, name: str, dtype: str = "float32") -> None:
        settings = {"llm": True, "dtype": dtype, "context": 256}
        node.admin.deploy(name, FunctionFolder(self.folder, "config.json", False), settings)

    def begin(self, node: TestNode, asked: Asked, new: int, **more: Any) -> list[Stream]:
        return [Stream(node.port, self.name, prompt, new, **more) for prompt in asked]

    def alone(self) -> tuple[list[Stream], int]:
        found = []
        for prompt in lengths(1, self.count):
            found += [stream.joined() for stream in self.begin(self.roomy, [prompt], NEW)]
            assert found[-1].cached == 0
        return found, len(found)

    def batched(self) -> tuple[list[Stream], int]:
        streams = at_once(self.begin(self.roomy, lengths(2, self.count), NEW))
        return streams, together(streams) - 1

    def prefix_reuse(self) -> tuple[list[Stream], int]:
        start, *ends = prompts(3, BEGINNING, *[7] * (self.count + 1))
        at_once(self.begin(self.roomy, [start + ends[0]], 2))
        streams = at_once(self.begin(self.roomy, [start + end for end in ends[1:]], NEW))
        return streams, sum(stream.cached >= BEGINNING for stream in streams)

    def resumed(self) -> tuple[list[Stream], int]:
        found, caught = [], 0
        asked = lengths(4, self.count)
        for start in range(0, self.count, AT_ONCE):
            streams = self.begin(self.roomy, asked[start : start + AT_ONCE], LONG)
            streams[0].heard(2)
            (pid,) = with_memory(self.roomy)  # not one in reserve too: a stream may lose one runtime, not two
            os.kill(pid, signal.SIGSTOP)  # so that it is known which streams it dies under
            settled(streams)
            caught += sum(len(stream.times_s) > 0 and not stream.ended for stream in streams)
            os.kill(pid, signal.SIGKILL)
            found += [stream.joined() for stream in streams]
        return found, caught

    def preempted(self) -> tuple[list[Stream], int]:
        before = preemptions(self.small, self.name)
        streams = at_once(self.begin(self.small, lengths(5, PROMPTS), MANY))
        end_s = time.monotonic() + 5
        while preemptions(self.small, self.name) == before and time.monotonic() < end_s:
            time.sleep(0.1)  # the status is told a few times a second
        return streams, preemptions(self.small, self.name) - before

    def evicted(self) -> tuple[list[Stream], int]:
        found, evictions = [], 0
        asked = lengths(6, self.count)
        for start in range(0, self.count, AT_ONCE):
            at_once(self.begin(self.small, lengths(100 + start, 1), 2))
            held = with_memory(self.small)
            assert self.small.result("large", {}) == RIGHT
            evictions += bool(held) and not with_memory(self.small)
            found += at_once(self.begin(self.small, asked[start : start + AT_ONCE], NEW))
        return found, evictions


def preemptions(node: TestNode, name: str) -> int:
    return sum(each["preempted"] for each in node.status()["functions"][name]["runtimes"])


def with_memory(node: TestNode) -> list[int]:
    """Runtimes that have memory of the pool: weights, and KV."""
    return [pid for pid in runtimes(node) if "memfd:dormouse-granule" in Path(f"/proc/{pid}/maps").read_text()]


def runtimes(node: TestNode) -> list[int]:
    """Their processes: children of the process that forks them."""
    zygotes = [pid for pid in node.descendants() if "dormouse.gpuserver.runtime.zygote" in procfs.words(pid)]
    return [pid for pid in zygotes if any(pid in procfs.children(other) for other in zygotes)]


def in_bf16(family: Family) -> dict[str, Any]:
    """Errors of logprobs, and tokens that are not the choice of the same weights in fp32."""
    streams = at_once(family.begin(family.roomy, lengths(7, family.count), NEW, logprobs=5))
    asked, answers = [stream.prompt for stream in streams], [stream.tokens for stream in streams]
    model: Any = family.model
    rounded = model.to(torch.bfloat16)
    theirs = {number: logits for number, _, logits in logits_of(rounded, asked, answers)}
    exact = rounded.to(torch.float32)
    ours_most = theirs_most = 0.0
    others = []
    for number, answer, logits in logits_of(exact, asked, answers):
        known = logits.log_softmax(-1)
        theirs_most = max(theirs_most, float((theirs[number].log_softmax(-1) - known).abs().max()))
        for at, top in enumerate(streams[number].top):
            for text, logprob in top.items():
                ours_most = max(ours_most, abs(logprob - float(known[at, tokens_of(text)[0]])))
        chosen = logits[torch.arange(len(answer)), torch.tensor(answer)]
        lacks = logits.max(-1).values - chosen
        others += [(number, at, float(lacks[at])) for at in lacks.nonzero()[:, 0].tolist()]
    return {
        "answers": len(streams),
        "tokens": sum(len(answer) for answer in answers),
        "happened": together(streams) - 1,
        "error": ours_most,
        "error of transformers": theirs_most,
        "others": others,
        "wrong": sum(lacks >= 2 * theirs_most for _, _, lacks in others) + (ours_most > 2 * theirs_most),
    }


CONDITIONS: Final = {
    "alone": Family.alone,
    "batched": Family.batched,
    "prefix reuse": Family.prefix_reuse,
    "resumed after a kill": Family.resumed,
    "preempted": Family.preempted,
    "after eviction": Family.evicted,
}


def measured(family: Family) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    family.deploy(family.roomy, family.name)
    family.deploy(family.small, family.name)
    for condition, run in CONDITIONS.items():
        streams, happened = run(family)
        lacking = [each.lacking for each in streams if each.lacking]
        if lacking:
            Path(f"build/llm/{family.name} {condition}.log").write_text(family.roomy.logs() + family.small.logs())
        streams = [each for each in streams if not each.lacking]
        verdict = judged(family.model, [each.prompt for each in streams], [each.tokens for each in streams])
        found[condition] = {
            "answers": verdict.answers,
            "tokens": verdict.tokens,
            "happened": happened,
            "others": verdict.others,
            "wrong": verdict.wrong() + len(lacking),
            "lacking": lacking,
        }
    family.small.remove(family.name)
    family.deploy(family.roomy, family.name, "bfloat16")
    found["bf16"] = in_bf16(family)
    family.roomy.remove(family.name)
    return found


def goals(results: dict[str, dict[str, dict[str, Any]]]) -> list[Goal]:
    made = []
    for condition in (*CONDITIONS, "bf16"):
        some = [each[condition] for each in results.values()]
        tokens, listed = (sum(each["tokens"] for each in some), sum(len(each["others"]) for each in some))
        wrong = sum(each["wrong"] for each in some)
        least = min(each["happened"] for each in some)
        name = (
            f"{condition}: wrong of {tokens} tokens, {sum(each['answers'] for each in some)} answers; {listed} listed"
        )
        made.append(Goal(name=name, goal="0", measured=wrong, met=not wrong))
        made.append(Goal(name=f"{condition}: happened, least of a family", goal=">= 1", measured=least, met=least >= 1))
    return made


def main(args: argparse.Namespace) -> None:
    names = args.families.split(",")
    if unknown := set(names) - set(TINY):
        sys.exit(f"there are no families {sorted(unknown)}; there are {', '.join(TINY)}")
    torch.set_num_threads(2)
    results: dict[str, dict[str, dict[str, Any]]] = {}
    roomy, small = (CONFIG.format(memory=memory) for memory in ("64MiB", str(SMALL_NBYTES)))
    with running_node(roomy) as one, running_node(small) as other, tempfile.TemporaryDirectory(prefix="dm") as place:
        other.deployed("large", LARGE.format(nbytes=LARGE_NBYTES))
        for name in names:
            began_s = time.monotonic()
            results[name] = measured(Family(name, Path(place) / name, one, other, 10 if args.quick else PROMPTS))
            short = {condition: (each["happened"], each["wrong"]) for condition, each in results[name].items()}
            print(f"{name}, {time.monotonic() - began_s:.0f} s: happened, wrong: {short}", file=sys.stderr, flush=True)
    report(goals(results), args, {"vocabulary": VOCABULARY, "gap": GAP, "families": results})


if __name__ == "__main__":
    parser = arguments(__doc__ or "")
    parser.set_defaults(out=Path("build/llm/families.json"))
    parser.add_argument("--families", default=",".join(TINY), help="some of them")
    main(parser.parse_args())
