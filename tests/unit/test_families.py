"""Functions in the order of what their bytes are worth: kept up to date by what changed, the same as made anew."""

from random import Random

import pytest

from dormouse.core.decisions.scheduling.families import Families, ModelFamily, per_byte
from dormouse.core.decisions.scheduling.functions import Function
from dormouse.core.decisions.scheduling.state import Model
from dormouse.core.decisions.scheduling.topology import Topology

TOPOLOGY = Topology(host_bps=1e9)


def settled(families: Families) -> list[str]:
    for _ in families.settle():
        pass
    return [name for _, name in families.order]


def function(name: str, base: str = "") -> Function:
    made = Function(name, 100, 60.0)
    made.base, made.instances = base, 1
    return made


class Zoo:
    """Functions that come, go, are asked for and measured, a quarter of them with a base."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.functions = [function(f"f{n}", f"f{n % 4}" if n % 4 == 3 else "") for n in range(24)]
        self.models: dict[str, Model] = {}
        self.families = Families(self.models, TOPOLOGY)

    def act(self, now_s: float) -> None:
        rng, each = self.rng, self.rng.choice(self.functions)
        instance = f"{each.name}.{rng.randrange(2)}"
        match rng.randrange(5):
            case 0:
                self.models.pop(instance, None)
            case 1:
                model = self.models[instance] = Model(instance, each, now_s)
                model.nbytes = rng.choice([0, 10 ** (3 + int(each.name[1:]) % 7)])  # 0: not known yet
            case 2 if instance in self.models:
                each.measured(rng.random(), 0.0)
            case _ if instance in self.models:
                each.arrived(now_s)
        for name in (f"{each.name}.0", f"{each.name}.1"):
            self.families.touch(name)

    def anew(self) -> Families:
        made = Families(self.models, TOPOLOGY)
        made.touch_all()
        return made


@pytest.mark.parametrize("seed", range(20))
def test_the_order_is_the_same_as_made_anew(seed: int) -> None:
    zoo = Zoo(seed)
    for step in range(300):
        zoo.act(step * 1.0)
        if step % 7 == 0:
            anew = zoo.anew()
            assert settled(zoo.families) == settled(anew)
            assert len(zoo.families) == len(anew)
            assert zoo.families.order == sorted(zoo.families.order)


@pytest.mark.parametrize("seed", range(20))
def test_no_byte_is_worth_more_than_its_familys_bound(seed: int) -> None:
    """Of a base, what it is worth to all that have it."""
    zoo = Zoo(seed)
    for step in range(300):
        zoo.act(step * 1.0)
    settled(zoo.families)
    assert zoo.families.order
    for name, family in zoo.families.by_name.items():
        worth = sum(per_byte(model, TOPOLOGY, 400.0) for model in family.models())
        most = family.most_per_byte(400.0)
        assert worth <= most * (1 + 1e-9) or not any(each == name for _, each in zoo.families.order)
        if len(family.functions) == 1 and worth:
            assert most == pytest.approx(worth)
            assert family.lately(400.0) == pytest.approx(next(family.models()).function.lately(400.0))


def test_what_was_never_asked_for_is_not_in_order() -> None:
    asked, never = function("asked"), function("never")
    models = {each.name: Model(each.name, each, 0.0) for each in (asked, never)}
    for model in models.values():
        model.nbytes = 100
    families = Families(models, TOPOLOGY)
    families.touch_all()
    assert settled(families) == []
    asked.arrived(1.0)
    assert settled(families) == []  # nobody has said that anything changed
    families.touch("asked")
    assert settled(families) == ["asked"]


def test_of_several_instances_one_without_a_lease() -> None:
    family, of = ModelFamily("f"), function("f")
    family.functions["f"] = {name: Model(name, of, 0.0) for name in "ab"}
    family.functions["f"]["a"].leased = True
    found = family.of("f")
    assert found is not None
    assert found.instance == "b"
