"""Answers of an engine with eight adapters over SmolLM2, in fp32, judged by PEFT's own models, unmerged. One reference
forward over each answer says of every token whether it is the reference's choice.

A prompt is answered with each adapter in four ways: ``alone``; ``beside`` all others and the base; ``evicted`` in the
middle, its tensors gone and back elsewhere; and ``added`` while others are under way.
"""

import gc
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.llm_alone import Alone, begin, random_prompt
from benchmarks.llm_judge import GAP, judged
from benchmarks.lora_adapters import EVERY, base_model, brought, save
from benchmarks.report import Goal
from dormouse.core.decisions.batches.batch import NO_ADAPTER, Sequence
from dormouse.gpuserver.runtime.engine import Engine
from dormouse.gpuserver.runtime.weights import AdapterParts

PROMPTS: Final = 25
NEW: Final = 24
TOGETHER: Final = 2
"""Prompts in one batch, each with all adapters."""

Answers = list[list[int]]
"""By adapter: all tokens."""


def _moved(parts: AdapterParts) -> AdapterParts:
    """The same elsewhere; where it was, is nothing any more."""
    low = {
        name: each._replace(down=_new(each.down), up=_new(each.up), bias=None if each.bias is None else _new(each.bias))
        for name, each in parts.adds.items()
    }
    return AdapterParts(low, {name: _new(tensor) for name, tensor in parts.replaced.items()})


def _new(tensor: torch.Tensor) -> torch.Tensor:
    made = tensor.clone()
    tensor.fill_(float("nan"))
    return made


class Ways:
    """See the module. ``adapters``: by number."""

    def __init__(self, alone: Alone, adapters: list[AdapterParts], new: int) -> None:
        self._alone, self._adapters, self._new = alone, adapters, new

    def _engine(self, bound: bool) -> Engine:
        made = self._alone.engine()
        for parts in self._adapters:
            number = made.adapters.open()
            if bound:
                made.bind(number, *parts)
        return made

    def _begin(self, engine: Engine, prompts: Answers, base: bool = True) -> list[list[Sequence]]:
        begun = []
        for which, prompt in enumerate(prompts):
            numbers = [*range(len(self._adapters)), *[NO_ADAPTER] * base]
            begun.append([begin(engine, 100 * which + of, prompt, self._new, of) for of in numbers])
        return begun

    def _end(self, engine: Engine) -> None:
        while not engine.batch.idle:
            engine.step()
        for number in range(len(self._adapters)):
            engine.adapters.close(number)

    def alone(self, prompts: Answers) -> list[Answers]:
        engine = self._engine(bound=True)
        found = []
        for which, prompt in enumerate(prompts):
            answers: Answers = []
            for of in range(len(self._adapters)):
                sequence = begin(engine, 100 * which + of, prompt, self._new, of)
                while not engine.batch.idle:
                    engine.step()
                answers.append(sequence.tokens)
            found.append(answers)
        self._end(engine)
        return found

    def beside(self, prompts: Answers) -> list[Answers]:
        engine = self._engine(bound=True)
        begun = self._begin(engine, prompts)
        self._end(engine)
        return [[sequence.tokens for sequence in each] for each in begun]

    def evicted(self, prompts: Answers) -> list[Answers]:
        """One after the other, for two steps each."""
        engine = self._engine(bound=True)
        begun = self._begin(engine, prompts)
        for number in range(len(self._adapters)):
            engine.step()
            engine.unbind(number)
            self._adapters[number] = _moved(self._adapters[number])
            for _ in range(2):
                engine.step()
            engine.bind(number, *self._adapters[number])
        self._end(engine)
        return [[sequence.tokens for sequence in each] for each in begun]

    def added(self, prompts: Answers) -> list[Answers]:
        """One after the other."""
        engine = self._engine(bound=False)
        found: list[list[Sequence]] = [[] for _ in prompts]
        for number, parts in enumerate(self._adapters):
            engine.bind(number, *parts)
            for which, prompt in enumerate(prompts):
                found[which].append(begin(engine, 100 * which + number, prompt, self._new, number))
            for _ in range(2):
                engine.step()
        self._end(engine)
        return [[sequence.tokens for sequence in each] for each in found]


def measure(folder: Path, place: Path, quick: bool) -> tuple[list[Goal], dict[str, Any]]:
    folders = save(folder, place, EVERY)
    new = 10 if quick else NEW
    prompts = [random_prompt(50 + seed, 6 + 7 * seed % 45) for seed in range(2 if quick else PROMPTS)]
    alone = Alone(folder, "float32")
    adapters = [parts for _, parts in brought(folder, folders, alone.spec)]
    base = alone.answers(prompts, new)
    ways = Ways(alone, adapters, new)
    every: dict[str, Callable[[Answers], list[Answers]]] = {
        "alone": ways.alone, "beside": ways.beside, "evicted": ways.evicted, "added": ways.added,
    }  # fmt: skip
    found: dict[str, list[Answers]] = defaultdict(list)
    for name, way in every.items():
        for start in range(0, len(prompts), TOGETHER):
            found[name] += way(prompts[start : start + TOGETHER])
    del ways, adapters, alone
    gc.collect()
    return _judge(folder, folders, prompts, dict(found), base)


def _judge(
    folder: Path, folders: list[Path], prompts: Answers, found: dict[str, list[Answers]], base: Answers
) -> tuple[list[Goal], dict[str, Any]]:
    import peft  # type: ignore[import-untyped, unused-ignore]

    tokens = wrong = same = changed = 0
    listed: list[dict[str, Any]] = []
    for number, each in enumerate(folders):
        with warnings.catch_warnings(action="ignore"):
            model = peft.PeftModel.from_pretrained(base_model(folder, torch.float32), each).eval()
        asked: list[list[int]] = []
        answers: list[list[int]] = []
        for which, prompt in enumerate(prompts):
            said = {tuple(answer[which][number][len(prompt) :]) for answer in found.values()}
            same += len(said) == 1
            changed += tuple(base[which]) not in said
            for answer in said:
                asked.append(prompt)
                answers.append(list(answer))
        judgement = judged(model, asked, answers)
        tokens += judgement.tokens
        wrong += judgement.wrong()
        listed += [{"adapter": each.name, "prompt": p, "token": at, "lacks": gap} for p, at, gap in judgement.others]
    whole = len(prompts) * len(folders)
    name = f"answers by PEFT, unmerged, fp32: tokens beyond a gap of {GAP}, of {tokens:,}"
    goals = [
        Goal(name=name, goal="0", measured=wrong, met=wrong == 0),
        Goal(name=f"answers that are the same in {len(found)} ways, of {whole}", goal="", measured=same, met=True),
        Goal(name=f"answers that adapters change, of {whole}", goal=f">= {0.9 * whole:.0f}", measured=changed,
             met=changed >= 0.9 * whole),
    ]  # fmt: skip
    return goals, {"prompts": len(prompts), "adapters": [each.name for each in folders], "not the choice": listed}
