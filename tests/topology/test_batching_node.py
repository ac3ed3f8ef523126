"""Streams of a node that wait for others of their function, as `[schedule] batching` says. By default they do not
(test_language_model_status.py).
"""

from pathlib import Path
from threading import Thread
from typing import Any

from language_models import make_folder
from llm_node import CONFIG, ask, connected, deploy, expected

from benchmarks.nodes.testnode import TestNode, running_node

HOUR_MS = 3_600_000


def told(node: TestNode) -> Any:
    """Its runtime, as the status has it; nothing before there is one."""
    found = node.status()["functions"]["chat"]["runtimes"]
    return found[0] if found else {"running": 0, "waiting": 0, "gathered": {}}


def test_a_lone_stream_waits_and_two_fill_a_batch(tmp_path: Path) -> None:
    model = make_folder(tmp_path)
    answers: dict[str, str] = {}
    schedule = f'[schedule]\nbatching = "fixed"\nbatch_size = 2\nbatch_delay_ms = {HOUR_MS}\n'
    with running_node(CONFIG + schedule) as node, connected(node) as client:
        deploy(node, "chat", tmp_path)
        first = Thread(target=lambda: answers.update(first=ask(client, "first")))
        first.start()
        node.wait(lambda: told(node)["waiting"] == 1, 60, "the first stream to wait")
        assert (told(node)["running"], told(node)["gathered"], answers) == (0, {}, {})
        answers["second"] = ask(client, "second")
        first.join()
        assert answers == {text: expected(model, text, 40) for text in ("first", "second")}
        node.wait(lambda: told(node)["gathered"] == {"full": 2}, 60, "the runtime to have told of both")
