"""The exact optimum of what filling.py is greedy about, by search, for small cases; and such cases by a seed."""

from collections.abc import Mapping, Sequence
from random import Random

from dormouse.core.decisions.scheduling.filling import Artefact


def optimum(artefacts: Sequence[Artefact], room: Mapping[str, int]) -> float:
    """The most value that fits. ``artefacts``: each after the one that it needs."""
    rest = [0.0]  # of all from there on
    for each in reversed(artefacts):
        rest.append(rest[-1] + each.value)
    rest.reverse()
    taken: set[str] = set()
    left = dict(room)
    best = 0.0

    def search(index: int, value: float) -> None:
        nonlocal best
        best = max(best, value)
        if index == len(artefacts) or value + rest[index] <= best:
            return
        each = artefacts[index]
        if each.nbytes <= left[each.place] and (not each.needs or each.needs in taken):
            left[each.place] -= each.nbytes
            taken.add(each.key)
            search(index + 1, value + each.value)
            taken.discard(each.key)
            left[each.place] += each.nbytes
        search(index + 1, value)

    search(0, 0.0)
    return best


def backbones_and_adapters(seed: int) -> tuple[list[Artefact], dict[str, int]]:
    """As a node has them: libraries on the host, contexts and backbones that need them, adapters that need theirs; room
    for a part of that.
    """
    rng = Random(seed)
    found: list[Artefact] = []
    for base in range(rng.randint(1, 3)):
        lib, backbone = f"libraries {base}", f"backbone {base}"
        found.append(Artefact(lib, "host", rng.randint(1, 8), rng.expovariate(1.0)))
        found.append(Artefact(f"context {base}", "gpu", rng.randint(1, 5), rng.expovariate(1.0), lib))
        adapters = rng.randint(1, 4)
        rates = [rng.expovariate(1.0) for _ in range(adapters)]
        nbytes = rng.randint(50, 300)
        found.append(Artefact(backbone, "gpu", nbytes, nbytes / 50 * sum(rates), lib))
        for number, rate in enumerate(rates):
            size = rng.randint(1, 20)
            found.append(Artefact(f"adapter {base}.{number}", "gpu", size, size / 50 * rate + rng.random(), backbone))
    total = {place: sum(each.nbytes for each in found if each.place == place) for place in ("host", "gpu")}
    return found, {place: round(nbytes * rng.uniform(0.3, 0.9)) for place, nbytes in total.items()}


def any_forest(seed: int) -> tuple[list[Artefact], dict[str, int]]:
    """Things that need one another in any way, some of no value, some large."""
    rng = Random(seed)
    found: list[Artefact] = []
    for number in range(rng.randint(4, 14)):
        needs = rng.choice(found).key if found and rng.random() < 0.6 else ""
        nbytes = rng.choice([rng.randint(1, 100), rng.randint(100, 1000)])
        value = rng.choice([0.0, rng.random(), 10 * rng.random()])
        found.append(Artefact(str(number), rng.choice(["host", "gpu"]), nbytes, value, needs))
    total = {place: sum(each.nbytes for each in found if each.place == place) for place in ("host", "gpu")}
    return found, {place: round(nbytes * rng.uniform(0.2, 0.9)) for place, nbytes in total.items()}
