"""Members of a runtime with adapters: the base is shared, and each is computed with its own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted_models import adapted, adapter
from adapter_folders import base_model, read_folder, save_adapter
from language_models import prompts, wrong_tokens
from msgspec import structs
from played_runtime import KV_AT, MIB, Played, Said, played, tensors_of

from dormouse.client_shim.llm.adapter_weights import weights_of, without_equal
from dormouse.gpuserver.runtime.low_rank import LowRank
from dormouse.schemas import messages as m
from dormouse.schemas.llm import DOWN, UP, AdapterModule, AdapterSpec

__all__ = ["played"]

NEW = 20
(PROMPT,) = prompts(1, 40)


def check(played: Played, serial: int, added: Mapping[str, LowRank], number: int = 1) -> None:
    made = played.made[serial, number]
    assert len(made) == NEW
    with adapted(played.model, added) as model:
        assert wrong_tokens(model, PROMPT + made, len(PROMPT)) == []


def test_the_same_prompt_is_answered_by_base_and_two_adapters(played: Played) -> None:
    added = {1: {}, 2: adapter(played.model, 1), 3: adapter(played.model, 2, rank=4, only="mlp")}
    played.join_adapted(2, added[2], 24 * MIB)
    played.join_adapted(3, added[3], 26 * MIB)
    for serial in added:
        played.submit(1, PROMPT, serial, NEW)
    played.executor.send(m.TurnBegins())
    played.thread.start()
    played.compute(*((serial, 1) for serial in added))
    for serial, adds in added.items():
        check(played, serial, adds)
    assert len({tuple(made) for made in played.made.values()}) == 3


def test_an_adapter_that_is_on_its_way_holds_up_its_own_sequences_only(played: Played) -> None:
    added = adapter(played.model, 1)
    played.join_adapted(2, added, 24 * MIB, missing=True)
    for serial in (2, 1):
        played.submit(1, PROMPT, serial, NEW)
    played.executor.send(m.TurnBegins())
    played.thread.start()
    played.compute((1, 1))
    assert (2, 1) not in played.made
    played.executor.send(m.SegmentsCame(segments=[2]))
    played.compute((2, 1))
    check(played, 1, {})
    check(played, 2, added)


def test_an_adapter_that_comes_in_the_middle_of_a_step_is_bound_after_it(played: Played) -> None:
    """A layer that waits for the base hears of it."""
    added = adapter(played.model, 1)
    played.seat(1, 1)
    played.join_adapted(2, added, 24 * MIB, missing=True)
    for serial in (1, 2):
        played.submit(1, PROMPT, serial, NEW)
    played.executor.send(m.TurnBegins())
    played.thread.start()
    for segment in (2, 1):
        played.executor.send(m.SegmentsCame(segments=[segment]))
    played.compute((1, 1), (2, 1))
    check(played, 1, {})
    check(played, 2, added)


def test_a_seat_that_ends_takes_the_adapter_with_it_and_the_next_brings_it(played: Played) -> None:
    added = adapter(played.model, 1)
    played.join_adapted(2, added, 24 * MIB)
    played.submit(1, PROMPT, 2, NEW)
    played.executor.send(m.TurnBegins())
    played.thread.start()
    played.until(m.SeatLeft, in_step=[m.SeatEnds()])
    assert len(played.made[2, 1]) == 1
    played.give_base()
    played.seat(1)
    played.executor.send(m.TurnBegins())
    played.submit(2, PROMPT, 1, NEW)
    played.compute((1, 2))
    assert len(played.made[2, 1]) < NEW, "its adapter is not here"
    played.give_adapter(tensors_of(added), 26 * MIB)
    played.seat(2, adapter_at=26 * MIB)
    played.compute((2, 1))
    check(played, 2, added)


def test_one_that_leaves_makes_room_for_the_next_adapter(played: Played) -> None:
    first, second = adapter(played.model, 1), adapter(played.model, 2)
    played.join_adapted(2, first, 24 * MIB)
    played.executor.send(m.MemberLeaves(serial=2))
    played.join_adapted(3, second, 26 * MIB)
    played.submit(1, PROMPT, 3, NEW)
    played.executor.send(m.TurnBegins())
    played.thread.start()
    played.compute((3, 1))
    check(played, 3, second)


@pytest.mark.parametrize("stays", [True, False])
def test_one_leaves_while_memory_is_asked_for(played: Played, stays: bool) -> None:
    """It may be in the way of what is asked for: nothing is given before it has left. Its seat that was given
    meanwhile is gone, too; its sequence, which was in the plan, is in no step until its adapter is here again.
    """
    added = adapter(played.model, 1)
    played.join_adapted(2, added, 24 * MIB)
    played.submit(1, PROMPT, 2, NEW)
    played.submit(1, PROMPT, 1, NEW)
    played.executor.send(m.TurnBegins())
    played.thread.start()
    wanted = heard(played, m.KvWanted)
    played.seat(2, adapter_at=24 * MIB)
    if not stays:
        played.submit(2, PROMPT, 2, NEW)
    played.executor.send(m.MemberLeaves(serial=2, granules=[24 * MIB], stays=stays))
    assert heard(played, m.MemberLeft).serial == 2
    extents = [(-1 - n, KV_AT + n * wanted.nbytes) for n in range(wanted.extents)]
    played.executor.send(m.KvGiven(extents=extents))
    played.compute((1, 1))
    assert (2, 1) not in played.made
    if stays:
        played.give_adapter(tensors_of(added), 26 * MIB)
        played.seat(2, adapter_at=26 * MIB)
        played.compute((2, 1))
        check(played, 2, added)


def test_one_that_only_loses_its_seat_is_in_no_step_when_that_is_said(played: Played) -> None:
    """Nothing is unmapped for it: its granules are others', too."""
    added = adapter(played.model, 1)
    played.join_adapted(2, added, 24 * MIB)
    played.submit(1, PROMPT, 2, NEW)
    played.executor.send(m.MemberLeaves(serial=2, granules=[], stays=True))
    played.executor.send(m.TurnBegins())
    played.thread.start()
    assert heard(played, m.MemberLeft).serial == 2
    played.give_adapter(tensors_of(added), 26 * MIB)
    played.seat(2, adapter_at=26 * MIB)
    played.compute((2, 1))
    check(played, 2, added)


def heard(played: Played, kind: type[Said]) -> Said:
    """The next of this kind, and nothing is answered before."""
    while True:
        packet = played.executor.recv()
        assert packet is not None
        if isinstance(packet[0], kind):
            return packet[0]


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head", "model.norm"]},
        {"target_modules": ["q_proj"], "lora_bias": True},
    ],
)
def test_a_folder_with_all_that_adapters_can_have(played: Played, tmp_path: Path, config: Any) -> None:
    judge = save_adapter(tmp_path, base_model("llama"), r=4, **config)
    found = read_folder(tmp_path)
    base = dict(played.model.named_parameters())
    found = without_equal(found, lambda name: base[name].data)
    tensors = {name: tensor for names, tensor in weights_of(found, torch.float32) for name in names}
    played.join_spec(2, found.spec, tensors, 24 * MIB)
    for serial in (1, 2):
        played.submit(1, PROMPT, serial, NEW)
    played.executor.send(m.TurnBegins())
    played.thread.start()
    played.compute((1, 1), (2, 1))
    check(played, 1, {})
    made = played.made[2, 1]
    assert wrong_tokens(judge, PROMPT + made, len(PROMPT)) == []
    assert made != played.made[1, 1]


MODULE = "model.layers.0.self_attn.q_proj"


def spec(*modules: AdapterModule, replaced: str = "") -> AdapterSpec:
    return AdapterSpec(modules=list(modules), replaced=[replaced] if replaced else [])


def module(bias: bool = False) -> AdapterModule:
    return AdapterModule(name=MODULE, kind="linear", rank=4, scale=1.0, bias=bias)


@pytest.mark.parametrize(
    ("down", "text"),
    [
        ([-4, -64], "has the shape"),
        ([4], "shapes at"),
        ([], "shapes at"),
        ([4, 63], "shapes at"),
        ([0, 64], "shapes at"),
        ([4, 1 << 40], "lies outside of what is here"),
    ],
)
def test_shapes_of_a_stranger_end_nobody_elses_answers(played: Played, down: list[int], text: str) -> None:
    tensors = {MODULE + DOWN: torch.zeros(4, 64), MODULE + UP: torch.zeros(4, 64)}
    weights = [*played.weights, *played.give_adapter(tensors, 24 * MIB)]
    weights[-2] = structs.replace(weights[-2], shape=down)
    played.seat(2, adapter_at=24 * MIB)
    played.tell(m.OpenModel(spec=played.spec, weights=len(weights), adapter=spec(module())), 2)
    played.tell(m.Weights(weights=weights), 2)
    played.submit(1, PROMPT, 1, NEW)
    played.executor.send(m.TurnBegins())
    played.thread.start()
    played.compute((1, 1))
    check(played, 1, {})
    assert text in played.refused[2]


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (spec(), "an adapter of 0 modules"),
        (spec(module()), f"the adapter lacks '{MODULE}.lora_down'"),
        (spec(module(bias=True)), f"the adapter lacks '{MODULE}.lora_bias'"),
        (spec(module(), replaced="model.norm.weight"), f"the adapter lacks '{MODULE}.lora_down'"),
    ],
)
def test_what_cannot_be_computed_is_refused_to_who_brings_it(played: Played, said: AdapterSpec, text: str) -> None:
    played.join(2, adapter=said)
    played.submit(1, PROMPT, 1, NEW)
    played.executor.send(m.TurnBegins())
    played.thread.start()
    played.compute((1, 1))
    check(played, 1, {})
    assert text in played.refused[2]


def test_a_part_of_no_adapter_is_refused_to_who_brings_it(played: Played) -> None:
    played.join(2)
    played.tell(m.AdapterPart(adapter=spec(module())), 2)
    played.submit(1, PROMPT, 1, NEW)
    played.executor.send(m.TurnBegins())
    played.thread.start()
    played.compute((1, 1))
    assert "a part of no adapter" in played.refused[2]


def test_an_adapter_whose_lease_ended_before_it_came_is_there_for_the_next(played: Played) -> None:
    """Nobody tells that it has come: the next seat says that it is not missing."""
    added = adapter(played.model, 1)
    played.join_adapted(2, added, 24 * MIB, missing=True)
    played.executor.send(m.MemberLeaves(serial=2))
    played.join_adapted(3, added, 24 * MIB)
    played.submit(1, PROMPT, 3, NEW)
    played.executor.send(m.TurnBegins())
    played.thread.start()
    played.compute((3, 1))
    check(played, 3, added)
