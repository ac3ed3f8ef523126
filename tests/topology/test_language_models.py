"""Language models on a real node, through the `openai` client: answers, streams, faults, folders that are refused."""

import contextlib
import json
import os
import signal
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import needs
import openai
import pytest
import torch
from language_models import make_folder, tokenizer
from llm_node import (
    CONFIG,
    GREEDY,
    MESSAGES,
    ORDINARY,
    ask,
    client,
    connected,
    deploy,
    generated,
    model,
    only_runtime,
    prompt_tokens,
    rest,
    runtimes,
    streaming,
)
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from benchmarks.nodes.testnode import TestNode, running_node
from dormouse.core import procfs
from dormouse.core.decisions.leases.reclaim import REST_S
from dormouse.core.node.refusals import CallRefused

__all__ = ["client", "model"]


@pytest.fixture(scope="module")
def node() -> Iterator[TestNode]:
    with running_node(CONFIG) as running:
        running.deployed("ordinary", ORDINARY)
        yield running


def test_models_are_listed_functions_are_not(node: TestNode, model: PreTrainedModel, client: openai.OpenAI) -> None:
    assert [each.id for each in client.models.list().data] == ["chat"]
    assert client.models.retrieve("chat").owned_by == "default"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("ordinary")
    with pytest.raises(openai.NotFoundError) as raised:
        ask(client, name="ordinary")
    assert raised.value.code == "model_not_found"


def test_answers_are_those_of_transformers(model: PreTrainedModel, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="chat", messages=MESSAGES, max_tokens=40, **GREEDY)
    prompt = prompt_tokens()
    assert answer.choices[0].message.content == generated(model, prompt, 40)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 40)
    assert answer.choices[0].finish_reason == "length"


def test_the_model_s_own_end_ends_it(model: PreTrainedModel, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="chat", messages=MESSAGES, max_tokens=200, temperature=0)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == generated(model, prompt_tokens(), 200, end=2)


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "mistral", "opt", "qwen3"])
def test_other_families_answer_too(node: TestNode, client: openai.OpenAI, tmp_path: Path, family: str) -> None:
    other = make_folder(tmp_path, family, seed=3)
    deploy(node, family, tmp_path)
    assert ask(client, name=family) == generated(other, prompt_tokens(), 40)
    node.remove(family)


def test_a_stream_says_the_same_and_ends_with_usage(model: PreTrainedModel, client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="chat",
        messages=MESSAGES,
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
        **GREEDY,
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == generated(model, prompt_tokens(), 40)
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 40
    assert len({chunk.id for chunk in chunks}) == 1


def test_logprobs_are_those_of_transformers(model: PreTrainedModel, client: openai.OpenAI) -> None:
    answer = client.completions.create(model="chat", prompt="abc", max_tokens=6, logprobs=3, **GREEDY)
    words: Any = tokenizer()
    prompt = words.encode("abc")
    with torch.inference_mode():
        logprobs = model(torch.tensor([prompt])).logits[0, -1].float().log_softmax(-1)
    choice = answer.choices[0]
    assert choice.text == generated(model, prompt, 6)
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] == pytest.approx(float(logprobs.max()), abs=1e-3)
    chat = client.chat.completions.create(
        model="chat", messages=MESSAGES, max_tokens=6, logprobs=True, top_logprobs=3, **GREEDY
    )
    told = chat.choices[0].logprobs
    assert told is not None
    assert [len(each.top_logprobs) for each in told.content or []] == [3] * 6
    assert all(each.logprob == each.top_logprobs[0].logprob for each in told.content or [])


def test_sampling_is_repeatable_and_choices_differ(model: PreTrainedModel, client: openai.OpenAI) -> None:
    def sample(seed: int) -> list[str | None]:
        answer = client.chat.completions.create(
            model="chat", messages=MESSAGES, max_tokens=20, temperature=1.0, n=3, seed=seed
        )
        return [choice.message.content for choice in answer.choices]

    first = sample(1)
    assert len(set(first)) == 3
    assert sample(1) == first
    assert sample(2) != first


def test_stop_strings_end_it_before_them(model: PreTrainedModel, client: openai.OpenAI) -> None:
    whole = ask(client)
    stop = whole[11:14]
    answer = client.chat.completions.create(model="chat", messages=MESSAGES, max_tokens=40, stop=[stop], **GREEDY)
    assert answer.choices[0].message.content == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_equal_beginnings_are_told_as_cached(node: TestNode, model: PreTrainedModel, client: openai.OpenAI) -> None:
    text = "a beginning that is quite long, and no other test has it"

    def cached() -> int:
        answer = client.chat.completions.create(
            model="chat", messages=[{"role": "user", "content": text}], max_tokens=2, **GREEDY
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    assert cached() < 48
    node.wait(lambda: cached() >= 48, 60, "two that come within the time of a seat")


def test_a_beginning_is_kept_until_another_model_needs_the_room(tmp_path: Path) -> None:
    """Of 64 MiB, the model and its KV have four, and the other one needs 60 for its weights alone."""
    model = make_folder(tmp_path / "chat")
    other = make_folder(tmp_path / "other", seed=1, intermediate_size=26_000)
    text = "a beginning that is quite long, and it is asked for again"
    expected = generated(model, prompt_tokens([{"role": "user", "content": text}]), 2)
    with running_node(CONFIG.replace("2000", "600000")) as node, connected(node) as client:
        for name in ("chat", "other"):
            deploy(node, name, tmp_path / name)

        def cached() -> int:
            answer = client.chat.completions.create(
                model="chat", messages=[{"role": "user", "content": text}], max_tokens=2, **GREEDY
            )
            assert answer.choices[0].message.content == expected
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            return answer.usage.prompt_tokens_details.cached_tokens or 0

        assert cached() == 0
        time.sleep(REST_S + 1)  # idle for longer than weights in a seat are kept from others
        assert cached() >= 48
        assert ask(client, new=4, name="other") == generated(other, prompt_tokens(), 4)
        assert cached() == 0


def test_many_clients_and_an_ordinary_function(node: TestNode, model: PreTrainedModel, client: openai.OpenAI) -> None:
    expected = {number: generated(model, prompt_tokens(_say(number)), 30) for number in range(8)}
    found: dict[int, str] = {}

    def talk(number: int) -> None:
        found[number] = ask(client, f"number {number}", 30)

    threads = [threading.Thread(target=talk, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    alive = True
    while alive:  # once after they have ended
        alive = any(thread.is_alive() for thread in threads)
        assert node.result("ordinary", 2) == 999000.0
    assert found == expected


def _say(number: int) -> Any:
    return [{"role": "user", "content": f"number {number}"}]


def test_streams_go_on_when_their_runtime_dies(node: TestNode, model: PreTrainedModel, client: openai.OpenAI) -> None:
    expected = generated(model, prompt_tokens([{"role": "user", "content": "live on"}]), 180)
    stream = streaming(client, "live on", 180)
    start = next(stream).choices[0].delta.content or ""
    pid, executor = only_runtime(node), node.pids()["gpu0"]
    os.kill(pid, signal.SIGKILL)
    assert start + rest(stream) == expected
    node.wait(lambda: pid not in runtimes(node), 60, "its end")
    assert node.pids()["gpu0"] == executor


def test_streams_go_on_when_their_executor_dies(node: TestNode, model: PreTrainedModel, client: openai.OpenAI) -> None:
    expected = generated(model, prompt_tokens([{"role": "user", "content": "go on"}]), 180)
    stream = streaming(client, "go on", 180)
    start = next(stream).choices[0].delta.content or ""
    before = runtimes(node)
    pid = node.kill("gpu0")
    assert start + rest(stream) == expected
    node.replaced("gpu0", pid)
    node.wait(lambda: not set(before) & set(runtimes(node)), 60, "the runtimes to end with their executor")


def test_a_second_death_ends_them_with_an_error(node: TestNode, model: PreTrainedModel, client: openai.OpenAI) -> None:
    ask(client, "warm", 2)
    stream = streaming(client, "twice", 1900)  # what a client that is slow to run has still not heard the end of

    def kill_whenever_it_speaks() -> None:
        for _ in stream:
            for pid in runtimes(node):
                with contextlib.suppress(ProcessLookupError):  # it is being replaced already
                    os.kill(pid, signal.SIGKILL)

    with pytest.raises(openai.APIError) as raised:
        kill_whenever_it_speaks()
    assert raised.value.code == "executor_lost"
    assert ask(client, "after that", 5) == generated(
        model, prompt_tokens([{"role": "user", "content": "after that"}]), 5
    )


def test_a_client_that_leaves_frees_its_sequence(node: TestNode, model: PreTrainedModel, client: openai.OpenAI) -> None:
    stream = streaming(client, "leave", 230)
    next(stream)
    stream.close()

    def left() -> bool:
        """The seat is left two seconds after the last sequence."""
        seats: list[str] = node.status()["gpus"]["0"]["seats"]
        return seats == []

    node.wait(left, 60, "the seat to be left")


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("store", True, "unsupported_parameter"),
        ("temperature", -1, "invalid_value"),
        ("n", 1000, "invalid_value"),
        ("messages", [{"role": "user", "content": [{"type": "image_url"}]}], "unsupported_parameter"),
        ("messages", [{"content": "no role"}], "invalid_value"),
        ("messages", "text", "invalid_value"),
        ("top_logprobs", 3, "invalid_value"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    model: PreTrainedModel, client: openai.OpenAI, field: str, value: Any, code: str
) -> None:
    body: dict[str, Any] = {"model": "chat", "messages": MESSAGES, field: value}
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(**body)
    assert (raised.value.code, raised.value.param) == (code, field)


def test_a_prompt_as_long_as_the_context_and_one_over(
    node: TestNode, model: PreTrainedModel, client: openai.OpenAI, tmp_path: Path
) -> None:
    make_folder(tmp_path)
    deploy(node, "short", tmp_path, context=20)
    fits = client.completions.create(model="short", prompt="x" * 19, max_tokens=1, temperature=0)
    assert fits.choices[0].finish_reason == "length"
    with pytest.raises(openai.BadRequestError, match=r"context is 20 tokens; the prompt has 20 tokens") as raised:
        client.completions.create(model="short", prompt="x" * 20, temperature=0)
    assert raised.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="15 tokens and 6 to be made"):
        client.completions.create(model="short", prompt="x" * 15, max_tokens=6)
    node.remove("short")


@pytest.mark.parametrize(
    ("template", "what"),
    [
        ("{{ raise_exception('only poems') }}", "only poems"),
        ("{% for i in range(9999) %}" * 3 + "{% endfor %}" * 3, "took more than"),  # on any machine
        ("{% for i in range(20000) %}{{ 'x' * 1000 }}{% endfor %}", "too much text"),
        (None, "no chat template"),
    ],
)
def test_templates_that_raise_loop_or_flood(
    node: TestNode, client: openai.OpenAI, tmp_path: Path, template: str | None, what: str
) -> None:
    make_folder(tmp_path, template=template)
    deploy(node, "odd", tmp_path)
    with pytest.raises(openai.BadRequestError, match=what):
        ask(client, name="odd")
    assert client.completions.create(model="odd", prompt="abc", max_tokens=3).choices[0].finish_reason
    node.remove("odd")


def _config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def _truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 100)


def _swap_index(folder: Path) -> None:
    weights = {"model.norm.weight": "model-00001-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))


def _pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _garbage(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 40) + b"{}")


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda f: (f / "tokenizer.json").unlink(), "no tokenizer"),
        (_pickle, "pickled"),
        (lambda f: _config(f, auto_map={"AutoModel": "evil.Model"}), "code of its own"),
        (lambda f: _config(f, quantization_config={"quant_method": "awq"}), "quantized"),
        (lambda f: _config(f, model_type="bloom"), "'bloom' is not served"),
        (lambda f: _config(f, vocab_size=100), "two models"),
        (_truncate, "truncated"),
        (_swap_index, "no model-00001-of-00002.safetensors"),
        (_garbage, "no safetensors file"),
        (lambda f: (f / "config.json").write_text("{"), "config.json cannot be read"),
    ],
)
def test_folders_that_cannot_be_served_are_refused(node: TestNode, tmp_path: Path, spoil: Any, what: str) -> None:
    make_folder(tmp_path)
    spoil(tmp_path)
    with pytest.raises(CallRefused, match=what):
        deploy(node, "bad", tmp_path)


def test_replaced_and_removed_under_streams(node: TestNode, client: openai.OpenAI, tmp_path: Path) -> None:
    old, new = make_folder(tmp_path / "old", seed=5), make_folder(tmp_path / "new", seed=6)
    deploy(node, "turns", tmp_path / "old")
    messages: Any = [{"role": "user", "content": "who are you"}]
    stream = client.chat.completions.create(
        model="turns", messages=messages, max_tokens=150, temperature=0, stream=True
    )
    start = next(stream).choices[0].delta.content or ""
    deploy(node, "turns", tmp_path / "new")
    prompt = prompt_tokens(messages)
    assert ask(client, "who are you", 20, "turns") == generated(new, prompt, 20)
    assert start + rest(stream) == generated(old, prompt, 150)
    stream = client.chat.completions.create(
        model="turns", messages=messages, max_tokens=150, temperature=0, stream=True
    )
    start = next(stream).choices[0].delta.content or ""
    assert node.remove("turns").status == 200
    assert start + rest(stream) == generated(new, prompt, 150)
    with pytest.raises(openai.NotFoundError):
        ask(client, name="turns")


def test_the_same_functions_answer_invoke(node: TestNode, model: PreTrainedModel, client: openai.OpenAI) -> None:
    body = {"messages": MESSAGES, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = node.invoke("chat", body)
    assert answer.body["choices"][0]["message"]["content"] == ask(client, new=8)
    assert node.invoke("chat", {"prompt": "abc", "max_tokens": 3}).body["object"] == "text_completion"
    calls = "from dormouse import call\ndef handle(state, request):\n    return call('chat', request)\n"
    node.deployed("asks", calls, call=("chat",))
    assert node.result("asks", body)["choices"] == answer.body["choices"], "of a function that calls it, too"
    *chunks, last = node.result("asks", body | {"stream": True})
    assert last == "[DONE]"
    said = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert said == answer.body["choices"][0]["message"]["content"]


@pytest.mark.parametrize("pool", ["pages", "regions"])
def test_more_models_than_fit_take_turns(tmp_path: Path, pool: str) -> None:
    """Each wakes where there is no room for it beside another's KV."""
    with running_node(CONFIG.replace("64MiB", "8MiB").replace("pages", pool)) as small:
        found = {}
        for number in range(4):
            found[f"m{number}"] = make_folder(tmp_path / f"m{number}", seed=10 + number)
            deploy(small, f"m{number}", tmp_path / f"m{number}")
        prompt = prompt_tokens()
        with connected(small) as client:
            for _ in range(2):
                for name, model in found.items():
                    assert ask(client, name=name, new=20) == generated(model, prompt, 20)


# --- what a runtime may do


def _status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def test_a_runtime_is_confined_and_has_its_own_granules_only(
    node: TestNode, model: PreTrainedModel, client: openai.OpenAI
) -> None:
    """While it computes: weights can be read, KV can be written, and nothing else of the pool is there."""
    stream = streaming(client, "look at me", 1900)
    next(stream)
    pid = only_runtime(node)
    os.kill(pid, signal.SIGSTOP)  # else it may give its memory back before all is seen
    status = _status(pid)
    assert (status["Seccomp"], status["NoNewPrivs"], int(status["CapEff"], 16)) == ("2", "1", 0)
    maps = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/memfd:" in line]
    executor = Path(f"/proc/{node.pids()['gpu0']}/maps").read_text().splitlines()
    own = {words[4] for words in maps}
    everything = {line.split()[4] for line in executor if "/memfd:dormouse-granule" in line}
    assert own < everything, "it has all of the pool"
    assert {words[1] for words in maps} == {"r--s", "rw-s"}
    assert {words[4] for words in maps if words[1] == "r--s"}.isdisjoint(
        words[4] for words in maps if words[1] == "rw-s"
    ), "what holds weights can be written"
    held = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    assert not [name for name in held if "memfd" in name], "it keeps descriptors of memory"
    if os.getuid() == 0:
        instance = next(other for other in node.descendants() if "zygote" in " ".join(procfs.words(other)))
        uid = int(status["Uid"].split()[0])
        assert uid not in (0, int(_status(instance)["Uid"].split()[0]))
        assert os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net")
    os.kill(pid, signal.SIGCONT)
    stream.close()


def test_logits_that_are_no_numbers_are_an_error_each_time(
    node: TestNode, client: openai.OpenAI, tmp_path: Path
) -> None:
    make_folder(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.norm.weight"] = torch.full((64,), float("nan"))
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    deploy(node, "nan", tmp_path)
    for _ in range(2):
        with pytest.raises(openai.InternalServerError, match="NaN or infinity") as raised:
            ask(client, name="nan")
        assert raised.value.code == "model_refused"
    node.remove("nan")


@needs.ROOT
def test_kv_that_is_returned_is_unmapped(tmp_path: Path) -> None:
    """When a runtime has nothing to do, what holds no beginning of a prompt goes back: another may have it at once. In
    a pool of small granules, four extents lie in four at least.
    """
    make_folder(tmp_path)
    with running_node(CONFIG.replace("64MiB", "32MiB").replace("2000", "600000")) as small:
        deploy(small, "chat", tmp_path)
        with connected(small) as client:
            ask(client, "map", 2)
            maps = Path(f"/proc/{only_runtime(small)}/maps")

            def written() -> int:
                lines = maps.read_text().splitlines()
                return sum("rw-s" in line and "memfd:dormouse-granule" in line for line in lines)

            small.wait(lambda: 1 <= written() <= 2, 60, "KV to be unmapped")
