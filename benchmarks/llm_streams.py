"""Streams of a language model as a client hears them: a thread and a connection each, without a library between."""

import http.client
import json
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

from benchmarks.llm_tiny import tokens_of

LONGEST_S: Final = 300.0


class Stream:
    """A greedy completion of so many tokens by a model whose every token is one sign (benchmarks/llm_tiny.py)."""

    def __init__(self, port: int, model: str, prompt: list[int], new: int, logprobs: int = 0) -> None:
        self.prompt, self.tokens, self.top = prompt, list[int](), list[dict[str, float]]()
        self.times_s: list[float] = []  # of each part
        self.cached, self.ended = 0, False
        self._new, self._error = new, ""
        self._heard = threading.Condition()
        body: dict[str, Any] = {
            "model": model, "prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        if logprobs:
            body["logprobs"] = logprobs
        self._thread = threading.Thread(target=self._run, args=(port, body), daemon=True)
        self._thread.start()

    def heard(self, parts: int) -> None:
        """Wait for so many, or for the end."""
        with self._heard:
            if not self._heard.wait_for(lambda: len(self.times_s) >= parts or self.ended, LONGEST_S):
                raise AssertionError("a stream says nothing")

    def joined(self) -> "Stream":
        """At its end."""
        self._thread.join(LONGEST_S)
        return self

    @property
    def lacking(self) -> str:
        """Why it has not all of its tokens; "" if it has."""
        if self.ended and not self._error and len(self.tokens) == self._new:
            return ""
        return f"{len(self.tokens)} of {self._new} tokens: {self._error or 'no end'}"

    def _run(self, port: int, body: dict[str, Any]) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LONGEST_S)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                self._error = response.read().decode(errors="replace")
            while line := response.readline():
                if line.startswith(b"data: {"):
                    self._take(json.loads(line[6:]))
        except (OSError, http.client.HTTPException) as error:
            self._error = repr(error)
        finally:
            connection.close()
        with self._heard:
            self.ended = True
            self._heard.notify_all()

    def _take(self, part: dict[str, Any]) -> None:
        if "error" in part:
            self._error = str(part["error"])
            return
        if part.get("usage"):
            self.cached = int(part["usage"]["prompt_tokens_details"]["cached_tokens"])
        for choice in part.get("choices", ()):
            with self._heard:
                if choice["text"]:
                    self.tokens += tokens_of(choice["text"])
                    self.times_s.append(time.monotonic())
                if choice.get("logprobs"):
                    self.top += choice["logprobs"]["top_logprobs"]
                self._heard.notify_all()


def at_once(streams: Sequence[Stream]) -> list[Stream]:
    """All that are under way, at their ends."""
    return [stream.joined() for stream in streams]
