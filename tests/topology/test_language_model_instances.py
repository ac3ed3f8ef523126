"""A language model whose tokens come late has a second runtime on another GPU, on a real node with two. A simulated one
has it in the same place.
"""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from language_models import make_folder
from llm_node import CONFIG, ask, connected, deploy, expected, runtimes

from benchmarks.nodes.testnode import TestNode, running_node
from dormouse.controller.recording import Recording
from dormouse.controller.replay import replay
from dormouse.controller.simulator.devices import ModelSpec
from dormouse.controller.simulator.engine import Simulation
from dormouse.controller.simulator.streams.cost import StepCost
from dormouse.controller.simulator.streams.model import Lengths, LlmSpec
from dormouse.core.decisions.scheduling import events as ev
from dormouse.core.decisions.scheduling.topology import Topology
from dormouse.schemas.policy import Policy

CLIENTS = 12


LIVES = ["0 comes", "0 on gpu 0", "1 comes", "1 on gpu 1"]

Heard = list[tuple[ev.Event, list[ev.Action]]]


def lives(heard: Heard, function: str) -> list[str]:
    """What becomes of a function's instances, counted as they come, and where they are, each once."""
    names: list[str] = []
    found: dict[str, None] = {}
    for event, actions in heard:
        if isinstance(event, ev.InstanceKnown) and event.function == function and event.instance not in names:
            names.append(event.instance)
            found[f"{len(names) - 1} comes"] = None
        elif isinstance(event, ev.InstanceLost) and event.instance in names:
            found[f"{names.index(event.instance)} goes"] = None
        for each in actions:
            if isinstance(each, ev.WakeOn) and each.instance in names:
                found[f"{names.index(each.instance)} on gpu {each.lease.gpu}"] = None
    return list(found)


def simulated(further: bool) -> Heard:
    """The same of a model whose prompts, or else whose further tokens, take longer than they should."""
    llm = LlmSpec(
        kv_nbytes=1000,
        cost=StepCost(fixed_s=0.002, per_prompt_s=0.001),
        ttft_s=60.0 if further else 0.02,
        tpot_s=0.001 if further else 1.0,
        prompt=Lengths(mean=20, most=20),
        output=Lengths(mean=60, most=60),
    )
    spec = ModelSpec(name="chat", nbytes=1 << 20, run_s=llm.alone_s, llm=llm, max_instances=2, load_s=0.1)
    simulation = Simulation(Policy(), Topology(host_bps=1e9), 2, 64 << 20, [spec], [llm.ttft_s], 0.98)
    heard: Heard = [(ev.InstanceKnown("f0", "f0"), [])]
    handle = simulation.core.handle

    def watched(event: ev.Event, now_s: float) -> list[ev.Action]:
        actions = handle(event, now_s)
        heard.append((event, actions))
        return actions

    simulation.core.handle = watched  # type: ignore[method-assign]
    times_s = np.array([0.0, *[5.0] * CLIENTS, *[5.3] * CLIENTS])
    simulation.run(times_s, np.zeros(len(times_s), dtype=np.int64))
    return heard


def instances(node: TestNode) -> int:
    return len(node.status()["functions"]["chat"]["instances"])


def talk_until(node: TestNode, client: openai.OpenAI, answers: dict[str, set[str]], stop: threading.Event) -> None:
    """Many clients at once, each with another question after the other."""

    def talk(number: int) -> None:
        text = f"client {number}"
        while text not in answers or not stop.is_set():
            answers.setdefault(text, set()).add(ask(client, text, 60))

    threads = [threading.Thread(target=talk, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        node.wait(lambda: seats_of_both(node), 120, "both GPUs to have a seat of it")
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def seats_of_both(node: TestNode) -> bool:
    gpus: dict[str, Any] = node.status()["gpus"]
    return all(gpu["seats"] for gpu in gpus.values()) and len(runtimes(node)) == 2


@pytest.mark.parametrize("wanted", [{"ttft": "20ms"}, {"ttft": "60s", "tpot": "1ms"}], ids=["first", "further"])
def test_many_streams_open_a_second_runtime_on_the_other_gpu_and_it_ends(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, wanted: dict[str, str]
) -> None:
    model = make_folder(tmp_path)
    events = tmp_path_factory.mktemp("record") / "events"
    config = CONFIG.replace("count = 1", "count = 2") + f'[limits]\nextra_idle_ms = 3000\n[record]\npath = "{events}"\n'
    with running_node(config) as node, connected(node) as client:
        deploy(node, "chat", tmp_path, **wanted, max_instances=2)
        assert ask(client, "alone", 20) == expected(model, "alone", 20)
        assert instances(node) == 1
        answers: dict[str, set[str]] = {}
        talk_until(node, client, answers, threading.Event())
        assert {text: {expected(model, text, 60)} for text in answers} == answers
        assert len(answers) == CLIENTS
        node.wait(lambda: len(runtimes(node)) == 1, 60, "the second runtime to end")
        assert instances(node) == 1
        assert ask(client, "alone", 20) == expected(model, "alone", 20)
    record = Recording(str(events))
    heard = [(entry.event, list(entry.actions)) for entry in record.events()]
    for story in (lives(heard, "chat"), lives(simulated("tpot" in wanted), "f0")):
        assert (story[:4], "1 goes" in story) == (LIVES, True)
    assert replay(record).difference is None
