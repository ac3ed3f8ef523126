"""What models are worth on a GPU: the order of each eviction policy, and the same as numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dormouse.core.decisions.memory.holdings import OwnerGroup
from dormouse.core.decisions.memory.quotas import MemoryQuotas
from dormouse.core.decisions.scheduling.functions import Function
from dormouse.core.decisions.scheduling.keeping import EVICTION_CLASSES
from dormouse.core.decisions.scheduling.state import Gpu, Model
from dormouse.core.decisions.scheduling.topology import Topology
from dormouse.schemas.messages import PoolStats
from dormouse.schemas.policy import EVICTIONS

MB = 1_000_000
HALF_LIFE_S = 120.0
TOPOLOGY = Topology(host_bps=10_000.0 * MB)


class Shelf:
    """One GPU and models on it."""

    def __init__(self, eviction: str) -> None:
        self.models: dict[str, Model] = {}
        self.keeping = EVICTION_CLASSES[eviction](TOPOLOGY, self.models)
        self.gpu = Gpu(0, 1, PoolStats(), 1 << 40)

    def put(
        self,
        name: str,
        *,
        nbytes: int = 100 * MB,
        run_s: float = 0.02,
        deadline_s: float = 0.1,
        sensitivity: float = 1.0,
        arrivals: list[float] | None = None,
        used_s: float = 0.0,
        replicas: int = 1,
        instances: int = 1,
    ) -> Model:
        function = Function(name, 100, HALF_LIFE_S)
        function.instances = instances
        function.deadline_s, function.sensitivity = deadline_s, sensitivity
        function.measured(run_s, 0.0)
        for at_s in sorted([0.0] if arrivals is None else arrivals):
            function.arrived(at_s)
        model = self.models[name] = Model(name, function, used_s)
        model.nbytes = self.gpu.resident[name] = nbytes
        model.resident = dict.fromkeys(range(replicas), nbytes)
        self.keeping.used(model)
        return model

    def order(self) -> list[str]:
        worth = self.keeping.worth(self.gpu)
        assert list(worth.values()) == sorted(worth.values()), "it ascends"
        return list(worth)


# --- orders


def test_lru_goes_by_last_use() -> None:
    shelf = Shelf("lru")
    for name, used_s, nbytes in (("a", 3.0, MB), ("b", 1.0, 900 * MB), ("c", 2.0, MB)):
        shelf.put(name, used_s=used_s, nbytes=nbytes, replicas=2 if name == "a" else 1)
    assert shelf.order() == ["b", "c", "a"]


@pytest.mark.parametrize(
    ("name", "nbytes", "run_s", "wake_s", "heavy"),
    [  # Torpor Table 4; sizes are those of torchvision's and Hugging Face's weights in single precision
        ("DenseNet-169", 57 * MB, 0.025, 0.027, False),
        ("DenseNet-201", 80 * MB, 0.028, 0.030, False),
        ("Inception-v3", 108 * MB, 0.014, 0.017, False),
        ("EfficientNet", 21 * MB, 0.012, 0.013, False),
        ("ResNet-50", 102 * MB, 0.009, 0.013, True),
        ("ResNet-101", 178 * MB, 0.014, 0.022, True),
        ("ResNet-152", 241 * MB, 0.017, 0.025, True),
        ("Bert-qa", 1340 * MB, 0.043, 0.144, True),
    ],
)
def test_heavy_models_are_those_that_torpor_names(
    name: str, nbytes: int, run_s: float, wake_s: float, heavy: bool
) -> None:
    shelf = Shelf("torpor")
    model = shelf.put(name, nbytes=nbytes, run_s=run_s)
    for _ in range(100):
        model.function.measured(wake_s, nbytes / TOPOLOGY.host_bps)
    assert shelf.keeping.heavy(model) is heavy


def test_torpor_takes_light_models_and_replicas_before_heavy_ones() -> None:
    shelf = Shelf("torpor")
    shelf.put("heavy-old", nbytes=1000 * MB, used_s=1.0)
    shelf.put("light-new", nbytes=10 * MB, used_s=9.0)
    shelf.put("heavy-new", nbytes=1000 * MB, used_s=8.0)
    shelf.put("light-old", nbytes=10 * MB, used_s=4.0)
    shelf.put("heavy-twice", nbytes=1000 * MB, used_s=5.0, replicas=2)
    assert shelf.order() == ["light-old", "heavy-twice", "light-new", "heavy-old", "heavy-new"]


def test_tangram_goes_by_rate() -> None:
    """Its cost is rate times size over bandwidth: for each byte the rate counts alone."""
    shelf = Shelf("tangram")
    shelf.put("often", arrivals=[1.0, 2.0, 3.0], nbytes=MB)
    shelf.put("once", arrivals=[1.0], nbytes=900 * MB)
    shelf.put("twice", arrivals=[1.0, 2.0], nbytes=10 * MB, replicas=2)
    assert shelf.order() == ["once", "twice", "often"]


def test_cost_takes_replicas_before_only_copies() -> None:
    shelf = Shelf("cost")
    shelf.put("only", arrivals=[0.0])
    shelf.put("hot-replica", arrivals=[1.0] * 50, replicas=2)
    shelf.put("replica", arrivals=[1.0] * 3, replicas=2)
    assert shelf.order() == ["replica", "hot-replica", "only"]


@pytest.mark.parametrize(
    ("less", "more"),
    [
        ({"arrivals": [1.0]}, {"arrivals": [1.0, 1.0]}),
        ({"arrivals": [1.0]}, {"arrivals": [500.0]}),
        ({"run_s": 0.03}, {"run_s": 0.001}),  # what a run hides is not missed
        ({"deadline_s": 10.0}, {"deadline_s": 0.1}),
        ({"sensitivity": 1.0}, {"sensitivity": 2.0}),
        ({"nbytes": 100 * MB}, {"nbytes": 1000 * MB}),  # for each byte: its run hides less of a longer copy
    ],
)
def test_cost_weighs(less: dict[str, object], more: dict[str, object]) -> None:
    for first, second in ((less, more), (more, less)):
        shelf = Shelf("cost")
        for settings in (first, second):
            shelf.put("less" if settings is less else "more", **settings)  # type: ignore[arg-type]
        assert shelf.order() == ["less", "more"]


@pytest.mark.parametrize("eviction", ["cost", "torpor"])
def test_a_part_on_another_gpu_is_no_replica(eviction: str) -> None:
    """As of a fine-tune whose base is there for others."""
    shelf = Shelf(eviction)
    for name in ("part", "whole"):
        shelf.put(name, nbytes=1000 * MB, used_s=9.0 if name == "whole" else 0.0, arrivals=[0.0, 1.0])
    shelf.models["part"].resident[1] = 900 * MB
    shelf.models["whole"].resident[1] = 1000 * MB
    assert shelf.order() == ["whole", "part"]
    worth = shelf.keeping.worth(shelf.gpu)
    assert worth["whole"] < worth["part"]


@pytest.mark.parametrize("eviction", ["cost", "tangram"])
def test_instances_have_each_a_part_of_their_functions_rate(eviction: str) -> None:
    shelf = Shelf(eviction)
    shelf.put("one of four", arrivals=[0.0] * 6, instances=4)
    shelf.put("the only one", arrivals=[0.0] * 2)
    shelf.put("one of two", arrivals=[0.0] * 6, instances=2)
    assert shelf.order() == ["one of four", "the only one", "one of two"]


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_a_function_of_no_weight_goes_first(eviction: str) -> None:
    shelf = Shelf(eviction)
    shelf.put("a", arrivals=[1.0], used_s=1.0)
    shelf.put("none", arrivals=[1.0], sensitivity=0.0)
    assert shelf.order() == ["none", "a"]


# --- the same as numbers

MODELS = st.lists(
    st.fixed_dictionaries(
        {
            "nbytes": st.integers(1, 4000).map(lambda n: n * MB),
            "run_s": st.floats(0.001, 1.0),
            "deadline_s": st.floats(0.001, 10.0),
            "sensitivity": st.floats(0.1, 10.0),
            "arrivals": st.lists(st.floats(0.0, 600.0), max_size=6),
            "used_s": st.floats(0.0, 600.0),
            "replicas": st.integers(1, 3),
        }
    ),
    max_size=8,
)


@given(st.sampled_from(EVICTIONS), MODELS)
def test_worth_is_a_number_that_can_be_summed(eviction: str, models: list[dict[str, object]]) -> None:
    """For models used within the last hour."""
    shelf = Shelf(eviction)
    for number, settings in enumerate(models):
        shelf.put(str(number), **settings)  # type: ignore[arg-type]
    worth = shelf.keeping.worth(shelf.gpu)
    assert worth.keys() == shelf.models.keys()
    assert all(0.0 < value < float("inf") for value in [*worth.values(), sum(worth.values())] if worth)


def test_models_that_nobody_has_used_for_a_day_keep_their_order() -> None:
    shelf = Shelf("cost")
    shelf.put("yesterday", arrivals=[0.0])
    shelf.put("last-night", arrivals=[40_000.0])
    worth = shelf.keeping.worth(shelf.gpu)
    assert shelf.order() == ["yesterday", "last-night"]
    assert worth["yesterday"] < worth["last-night"]


def test_a_replica_is_worth_less_than_a_copy_that_was_last_used_hours_ago() -> None:
    shelf = Shelf("cost")
    shelf.put("only", arrivals=[0.0])
    shelf.put("replica", arrivals=[7200.0], replicas=2)
    worth = shelf.keeping.worth(shelf.gpu)
    assert shelf.order() == ["replica", "only"]
    assert worth["replica"] < worth["only"]


# --- pinned


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_what_is_pinned_leaves_last_and_in_its_order(eviction: str) -> None:
    shelf = Shelf(eviction)
    for name, used_s, replicas in (("a", 1.0, 1), ("b", 2.0, 2), ("c", 3.0, 1), ("d", 4.0, 1), ("e", 5.0, 2)):
        shelf.put(name, used_s=used_s, replicas=replicas, arrivals=[used_s] * int(used_s))
    before = shelf.order()
    for name in ("a", "b"):
        shelf.models[name].function.pinned = True
    others, pinned = [name for name in before if name in "cde"], [name for name in before if name in "ab"]
    assert shelf.order() == others + pinned
    worth = shelf.keeping.worth(shelf.gpu)
    assert min(worth[name] for name in pinned) > 1000 * sum(worth[name] for name in others)
    assert max(worth.values()) * 2.0**-300 < 2.0**-250 * max(worth[name] for name in others), "a quota counts first"
    for model in shelf.models.values():
        model.function.pinned = True
    assert shelf.order() == before


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_a_pin_does_not_beat_a_quota(eviction: str) -> None:
    shelf = Shelf(eviction)
    names = [f"b{number}" for number in range(20)] + ["a1", "a2"]
    for at_s, name in enumerate(names):
        shelf.put(name, used_s=float(at_s), arrivals=[float(at_s)])
    for name in ("a1", "a2"):
        shelf.models[name].function.pinned = True
    worth = shelf.keeping.worth(shelf.gpu)
    held = {OwnerGroup.of("weights", [name]): nbytes for name, nbytes in shelf.gpu.resident.items()}
    left = list(MemoryQuotas({"a": 100 * MB}, lambda name: name[0]).adjusted(worth, held, {}))
    assert (left[0], left[-1]) == ("a1", "a2"), "what is beyond it goes first, what is within it last"
