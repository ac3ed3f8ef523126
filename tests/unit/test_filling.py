"""What is to be held: precedence and room are kept, and greed comes near the exact optimum."""

from collections.abc import Callable, Mapping, Sequence

import pytest

from benchmarks.filling_cases import any_forest, backbones_and_adapters, optimum
from dormouse.core.decisions.scheduling.filling import FEW, Artefact, fill

Case = tuple[list[Artefact], dict[str, int]]


def keys(artefacts: Sequence[Artefact], room: Mapping[str, int]) -> list[str]:
    return [each.key for each in fill(artefacts, room)]


def test_the_densest_come_first() -> None:
    some = [Artefact("a", "gpu", 10, 1.0), Artefact("b", "gpu", 10, 3.0), Artefact("c", "gpu", 1, 2.0)]
    assert keys(some, {"gpu": 100}) == ["c", "b", "a"]
    assert keys(some, {"gpu": 11}) == ["c", "b"]


def test_an_adapter_is_held_beside_its_backbone_only() -> None:
    some = [Artefact("backbone", "gpu", 90, 1.0), Artefact("adapter", "gpu", 5, 50.0, "backbone")]
    assert keys(some, {"gpu": 94}) == ["backbone"]
    assert keys(some, {"gpu": 95}) == ["backbone", "adapter"]
    assert keys(some, {"gpu": 89}) == []
    assert keys(some[1:], {"gpu": 95}) == []  # what it needs cannot be had at all


def test_a_backbone_is_worth_what_its_adapters_are() -> None:
    """Alone, it is worth less per byte than the model that would take its place."""
    backbone, other = Artefact("backbone", "gpu", 90, 1.0), Artefact("other", "gpu", 90, 2.0)
    adapters = [Artefact(f"adapter{number}", "gpu", 1, 1.0, "backbone") for number in range(2 * FEW)]
    room = {"gpu": 90 + len(adapters)}
    assert keys([backbone, other], room) == ["other"]
    assert set(keys([backbone, other, *adapters], room)) == {"backbone", *(each.key for each in adapters)}


def test_each_place_has_room_of_its_own() -> None:
    some = [Artefact("libraries", "host", 5, 0.0), Artefact("context", "gpu", 5, 1.0, "libraries")]
    assert keys(some, {"host": 5, "gpu": 5}) == ["libraries", "context"]
    assert keys(some, {"host": 4, "gpu": 100}) == []
    assert keys(some, {"host": 100, "gpu": 4}) == []  # and nothing that is of no use by itself


def test_what_is_worth_nothing_is_not_brought() -> None:
    assert keys([Artefact("a", "gpu", 1, 0.0)], {"gpu": 10}) == []


def test_greed_that_goes_wrong_is_tried_again() -> None:
    """By value per byte the small one comes first, and then the large one has no room."""
    some = [Artefact("small", "gpu", 1, 2.0), Artefact("large", "gpu", 100, 100.0)]
    assert keys(some, {"gpu": 100}) == ["large"]


@pytest.mark.parametrize(("case", "least"), [(backbones_and_adapters, 0.95), (any_forest, 0.85)])
def test_it_comes_near_the_optimum(case: Callable[[int], Case], least: float) -> None:
    shares = []
    for seed in range(300):
        artefacts, room = case(seed)
        found = fill(artefacts, room)
        names = [each.key for each in found]
        assert len(set(names)) == len(names)
        assert all(not each.needs or each.needs in names[:index] for index, each in enumerate(found))
        for place, nbytes in room.items():
            assert sum(each.nbytes for each in found if each.place == place) <= nbytes
        if best := optimum(artefacts, room):
            shares.append(sum(each.value for each in found) / best)
    assert min(shares) >= least
    assert sum(shares) / len(shares) >= 0.995


def test_with_many_greed_alone_comes_near() -> None:
    """Then nothing is tried again, and nothing is large beside the room: the sum of the densest is a bound."""
    many = [Artefact(str(number), "gpu", 10 + number % 7, 1.0 + number % 11) for number in range(10 * FEW)]
    room = 1000
    found = fill(many, {"gpu": room})
    bound, left = 0.0, float(room)
    for each in sorted(many, key=lambda each: -each.value / each.nbytes):
        bound += each.value * min(1.0, left / each.nbytes)
        left = max(0.0, left - each.nbytes)
    assert sum(each.value for each in found) >= 0.99 * bound
