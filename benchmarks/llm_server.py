"""vLLM's server beside a node: started in an environment of its own, and both asked through HTTP in the same way."""

import http.client
import json
import os
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.nodes.ports import reserved_port
from dormouse.core import openmp

PEER: Final = Path("build/peers/vllm")
THREADS: Final = 2
READY_S: Final = 420.0
LONGEST_S: Final = 300.0

Prompts = Sequence[Sequence[int]]


def installed() -> bool:
    """By scripts/llm-peers."""
    return (PEER / "bin/vllm").exists()


def answer(port: int, model: str, prompt: Sequence[int], new: int) -> int:
    """Tokens of one greedy completion. Raises OSError."""
    body = {"model": model, "prompt": list(prompt), "max_tokens": new, "temperature": 0, "ignore_eos": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LONGEST_S)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        said = response.read()
        if response.status != 200:
            raise OSError(f"{response.status}: {said.decode(errors='replace')}")
        return int(json.loads(said)["usage"]["completion_tokens"])
    finally:
        connection.close()


def tokens_s(port: int, model: str, prompts: Prompts, new: int) -> float:
    """Output tokens per second of a client for each prompt. Raises OSError."""
    made: list[int] = []
    clients = [
        threading.Thread(target=lambda prompt=prompt: made.append(answer(port, model, prompt, new)))
        for prompt in prompts
    ]
    began_s = time.perf_counter()
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    took_s = time.perf_counter() - began_s
    if sum(made) != new * len(prompts):
        raise OSError(f"{len(made)} of {len(prompts)} answers, {sum(made)} tokens")
    return sum(made) / took_s


class VllmServer:
    """A running one. ``started_s`` is when its process began."""

    def __init__(self, folder: Path, dtype: str, log: Path) -> None:
        reserved = reserved_port()
        self.port, self.model = int(reserved.getsockname()[1]), "chat"
        reserved.close()
        command = [
            str(PEER / "bin/python"), "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(folder.absolute()), "--served-model-name", self.model,
            "--dtype", dtype, "--max-model-len", "2048", "--max-num-seqs", "16", "--no-enable-prefix-caching",
            "--host", "127.0.0.1", "--port", str(self.port),
        ]  # fmt: skip
        environment: dict[str, Any] = {
            **os.environ,
            "PYTHONPATH": "",
            "PATH": f"{(PEER / 'bin').absolute()}:{os.environ['PATH']}",
            "HF_HUB_OFFLINE": "1",
            **openmp.WAITING,
            "OMP_NUM_THREADS": str(THREADS),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # by default it keeps a core of two for itself
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        self.started_s = time.perf_counter()
        with log.open("w") as sink:
            self._process = subprocess.Popen(command, stdout=sink, stderr=sink, env=environment, start_new_session=True)

    def ready(self) -> "VllmServer":
        """Once it answers. Raises SystemExit if it does not."""
        end_s = time.perf_counter() + READY_S
        while time.perf_counter() < end_s:
            if self._process.poll() is not None:
                break
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
            try:
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return self
            except OSError:
                time.sleep(0.02)  # another program's start, which it announces in no other way
            finally:
                connection.close()
        self.close()
        raise SystemExit(f"vLLM's server did not start: see {self._log}")

    def first_s(self, prompt: Sequence[int]) -> float:
        """From the start of its process to the first token."""
        self.ready()
        assert answer(self.port, self.model, prompt, 1) == 1
        return time.perf_counter() - self.started_s

    def close(self) -> None:
        """It and the processes that it has started."""
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, 9)
            self._process.wait()
