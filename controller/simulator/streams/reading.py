"""Reads ``[models.llm]`` of a scenario, each value checked, and a file of lengths, if one is named. Raises ConfigError
that names the key.
"""

import csv
import math
import re
from pathlib import Path
from typing import Final

from dormouse.controller.simulator.checks import Checks
from dormouse.controller.simulator.streams.cost import StepCost
from dormouse.controller.simulator.streams.model import Lengths, LlmSpec
from dormouse.controller.simulator.tree import LengthSection, LlmSection, ModelSection, Time
from dormouse.schemas.errors import ConfigError

MAX_TOKENS: Final = 1_000_000
"""Of a sequence: more is a slip."""

MAX_ROWS: Final = 1_000_000

FOREIGN: Final = {
    "run": ("", "the steps say how long a request takes"),
    "host": ("", "it has no time on the host"),
    "wake": ("", "write llm.seat, what a seat takes beside the copy"),
    "peer_wake": ("", "write llm.seat, what a seat takes beside the copy"),
    "deadline": ("1s", "write llm.ttft and llm.tpot"),
    "activation": (0, "its KV grows with its tokens: write llm.kv"),
    "idempotent": (False, "its streams go on when a GPU is lost, once"),
    "native": ("", "processes with language models are not simulated"),
    "native_run": ("", "processes with language models are not simulated"),
    "cold_start": ("", "processes with language models are not simulated"),
    "allocate": ("", "memory of language models is not allocated for each wake"),
    "instances": (1, "those of a language model come and go: write max_instances"),
    "batch": (0, "its streams are in one batch anyway"),
    "batch_wait": ("", "write policy.batching, with which streams wait for others"),
    "per_request": ("", "the steps say how long a request takes"),
}
"""Keys of other models, with what they are if nobody has written them, and why not."""


def read_llm(
    check: Checks, at: str, model: ModelSection, nbytes: int, gpu_nbytes: int, adapter: tuple[int, str]
) -> LlmSpec:
    """``at``: the model. ``adapter``: as `read_adapter` gives it."""
    llm = model.llm
    assert llm is not None
    for key, (unset, why) in FOREIGN.items():
        found = getattr(model, key)
        check.need(found == unset, f"{at}.{key}", repr(found), f"remove it: {model.name} has [models.llm], and {why}")
    at = f"{at}.llm"
    kv_nbytes = check.nbytes(f"{at}.kv", llm.kv)
    prompt, output, pairs = _lengths(check, at, llm)
    longest = max((one + two for one, two in pairs), default=prompt.most + output.most)
    check.need(
        longest <= llm.context,
        f"{at}.context",
        llm.context,
        f"the longest prompt and output together are {longest:,} tokens: write at least that, or shorter ones",
    )
    check.need(1 <= llm.context <= MAX_TOKENS, f"{at}.context", llm.context, f"write 1 to {MAX_TOKENS:,} tokens")
    wrong = "write the tokens of prompts that a step has at most: 256, and 1024 as on CUDA devices"
    check.need(llm.step_tokens >= 1, f"{at}.step_tokens", llm.step_tokens, wrong)
    context_nbytes = 0
    if llm.context_memory not in (0, "0", ""):
        context_nbytes = check.nbytes(f"{at}.context_memory", llm.context_memory)
    needed = nbytes + adapter[0] + context_nbytes + longest * kv_nbytes
    check.need(
        needed <= gpu_nbytes,
        f"{at}.kv",
        repr(llm.kv),
        f"the model and one sequence of {longest:,} tokens need {needed:,} bytes, and gpus.memory is {gpu_nbytes:,}: "
        "write less, shorter sequences, or larger GPUs",
    )
    return LlmSpec(
        kv_nbytes=kv_nbytes,
        cost=_cost(check, at, llm),
        ttft_s=check.seconds(f"{at}.ttft", llm.ttft),
        tpot_s=check.seconds(f"{at}.tpot", llm.tpot),
        prompt=prompt,
        output=output,
        pairs=pairs,
        idle_s=check.seconds(f"{at}.idle", llm.idle),
        seat_s=_or_0(check, f"{at}.seat", llm.seat),
        turn_s=_or_0(check, f"{at}.turn", llm.turn),
        adapter_nbytes=adapter[0],
        group=adapter[1],
        context_nbytes=context_nbytes,
        start_s=_or_0(check, f"{at}.start", llm.start),
        step_tokens=llm.step_tokens,
    )


def _or_0(check: Checks, key: str, value: Time) -> float:
    return 0.0 if re.fullmatch(r"0+(\.0+)?\s*(us|ms|s|m|h|)", str(value)) else check.seconds(key, value)


def _cost(check: Checks, at: str, llm: LlmSection) -> StepCost:
    found = [
        _or_0(check, f"{at}.{key}", getattr(llm, key)) for key in ("step", "per_sequence", "per_context", "per_prompt")
    ]
    right = found[0] > 0.0
    check.need(right, f"{at}.step", repr(llm.step), "write what any step takes, as 20ms; python -m benchmarks.llm_fit")
    free = llm.free_tokens
    check.need(free >= 0, f"{at}.free_tokens", repr(free), "write how many tokens of prompts take no time, as 14, or 0")
    return StepCost(
        fixed_s=found[0], per_sequence_s=found[1], per_context_s=found[2], per_prompt_s=found[3], free_tokens=free
    )


def _lengths(check: Checks, at: str, llm: LlmSection) -> tuple[Lengths, Lengths, tuple[tuple[int, int], ...]]:
    if llm.lengths:
        for key in ("prompt", "output"):
            right = getattr(llm, key) is None
            check.need(right, f"{at}.{key}", "given beside lengths", "write one of them: lengths has both")
        pairs = _rows(check, f"{at}.lengths", llm.lengths)
        prompt, output = ([pair[side] for pair in pairs] for side in (0, 1))
        return (
            Lengths(mean=sum(prompt) / len(pairs), most=max(prompt)),
            Lengths(mean=sum(output) / len(pairs), most=max(output)),
            pairs,
        )
    return _length(check, f"{at}.prompt", llm.prompt), _length(check, f"{at}.output", llm.output), ()


def _length(check: Checks, key: str, value: int | LengthSection | None) -> Lengths:
    cure = "write tokens, as 200, or { mean = 200, variation = 1, most = 1000 }, or lengths = a CSV file of both"
    if value is None:
        raise ConfigError(f"{check.origin}: {key} is missing; {cure}")
    if isinstance(value, int):
        check.need(1 <= value <= MAX_TOKENS, key, value, cure)
        return Lengths(mean=float(value), most=value)
    mean, variation, most = value.mean, value.variation, value.most
    check.need(math.isfinite(mean) and 1.0 <= mean <= MAX_TOKENS, f"{key}.mean", mean, cure)
    right = math.isfinite(variation) and 0.0 <= variation <= 100.0
    check.need(right, f"{key}.variation", variation, "write the standard deviation ÷ the mean, 0 to 100")
    check.need(mean <= most <= MAX_TOKENS, f"{key}.most", most, f"write the mean or more, at most {MAX_TOKENS:,}")
    return Lengths(mean=mean, variation=variation, most=most)


def _rows(check: Checks, key: str, name: str) -> tuple[tuple[int, int], ...]:
    """Of a CSV file with the columns prompt and output; others are ignored."""
    path = Path(check.origin).parent / name
    at = f"{check.origin}: {key}: {path}"
    try:
        lines = list(csv.reader(path.read_text(encoding="utf-8").splitlines(), strict=True))
    except FileNotFoundError:
        raise ConfigError(f"{at}: is not there; write a path as seen from the scenario's folder") from None
    except (OSError, ValueError, csv.Error) as error:  # not UTF-8, or a path that cannot be
        raise ConfigError(f"{at}: cannot be read as CSV ({error}); write UTF-8 text") from error
    header = lines[0] if lines else []
    if "prompt" not in header or "output" not in header or not 2 <= len(lines) <= MAX_ROWS + 1:
        raise ConfigError(
            f"{at}: no lengths; write a header with the columns prompt and output, and 1 to {MAX_ROWS:,} lines"
        )
    columns = header.index("prompt"), header.index("output")
    found = []
    for number, line in enumerate(lines[1:], 2):
        if len(line) != len(header):
            raise ConfigError(f"{at}: line {number} has {len(line)} fields; write {len(header)}, as the header has")
        pair = [line[column] for column in columns]
        if not all(re.fullmatch(r"[0-9]{1,7}", each) and 1 <= int(each) <= MAX_TOKENS for each in pair):
            raise ConfigError(f"{at}: line {number}: lengths are {', '.join(pair)}; write tokens, at least 1 of each")
        found.append((int(pair[0]), int(pair[1])))
    return tuple(found)
