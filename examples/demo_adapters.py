"""The second half of ``make demo-llm``: chats with the eight adapters in ``examples/adapters`` and their base, all nine
at once, and shows the bytes saved by their common backbone.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

import openai

from benchmarks.nodes.testnode import TestNode
from dormouse.core import modelfolder
from examples.chats import Chat, talk_at_once
from examples.styles import ADAPTERS, STYLES

BASE: Final = "chat"
SHOWN: Final = "Why is the sky blue?"
QUESTIONS: Final = (SHOWN, "What is the capital of France?")
IDLE_MS: Final = 2000
"""The time after which a seat without requests ends: the bytes on a GPU are reported when it ends."""


class Saved(NamedTuple):
    """Bytes of weights: of as many models without a common backbone, and as the node's status has them."""

    functions: int
    separate_nbytes: int
    adapters_nbytes: int
    host_nbytes: int
    gpu_nbytes: dict[str, int]


def run(node: TestNode, client: openai.OpenAI) -> tuple[list[Chat], Saved]:
    """On a node that has nothing but the base."""
    print(f"{len(STYLES)} adapters come in the functions' place, and all nine are chatted with at once ...")

    def deploy(name: str) -> None:
        node.admin.deploy(name, modelfolder.find_adapter(str(ADAPTERS / name)), {"base": BASE, "ttft": "500ms"})

    with ThreadPoolExecutor(max_workers=2) as two:
        list(two.map(deploy, STYLES))
    chats = [Chat(question, name) for question in QUESTIONS for name in (BASE, *STYLES)]
    talk_at_once(client, chats)
    node.wait(lambda: not any(gpu["seats"] for gpu in node.status()["gpus"].values()), 60, "the seats to end")
    status = node.status()
    nbytes = {name: status["functions"][name]["nbytes"] for name in (BASE, *STYLES)}
    total = sum(nbytes.values())
    on_gpus = {number: gpu["weights_nbytes"] for number, gpu in status["gpus"].items() if gpu["weights_nbytes"]}
    adapters = total - len(nbytes) * nbytes[BASE]
    return chats, Saved(len(nbytes), total, adapters, status["store"]["host_nbytes"], on_gpus)


def show(chats: list[Chat], saved: Saved) -> list[str]:
    """Print a line for each function, and the savings. Returns the adapters that do not show."""
    hidden = []
    print(f"{SHOWN:42} {'tokens':>6} {'first token':>12} {'whole':>8}")
    for chat in chats:
        if chat.question == SHOWN:
            said = " / ".join(filter(None, chat.text.splitlines()))
            print(f"  {chat.model:8} {chat.tokens:6} {chat.first_s * 1000:9.0f} ms {chat.whole_s:6.1f} s {said}")
            if chat.model != BASE and not STYLES[chat.model].shows(chat.text):
                hidden.append(f"{chat.model} has not answered in its style: {chat.text!r}")
    print(f"\n{f'weights of {saved.functions} functions':42} {'separate':>12} {'one backbone':>14}")
    places = ", ".join(saved.gpu_nbytes)
    for place, nbytes in (
        ("in the host's memory", saved.host_nbytes),
        (f"on GPU {places}", sum(saved.gpu_nbytes.values())),
    ):
        print(f"{place:42} {saved.separate_nbytes / 1e6:9.0f} MB {nbytes / 1e6:11.0f} MB")
    print(f"the adapters' part of it: {saved.adapters_nbytes / 1e6:.1f} MB")
    return hidden
