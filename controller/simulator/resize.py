"""The same scenario with other numbers of GPUs (of each node) or functions, after its pattern: pure."""

from collections.abc import Sequence

import msgspec

from dormouse.controller.simulator.scenario import Scenario, built
from dormouse.controller.simulator.tree import Tree
from dormouse.schemas.errors import ConfigError


def with_gpus(scenario: Scenario, count: int) -> Scenario:
    """Switches are repeated as the scenario has them; a list of ``peer`` bandwidths cannot grow (ConfigError); what
    happens to GPUs that are not there does not happen.
    """
    gpus = scenario.tree.gpus
    switches, peer = gpus.switches, gpus.peer
    if switches is not None:
        step = max(switches) + 1 - min(switches)
        switches = [switches[gpu % gpus.count] + gpu // gpus.count * step for gpu in range(count)]
    if isinstance(peer, list):
        if count > gpus.count:
            raise ConfigError(
                f"{scenario.path}: gpus.peer is a list for {gpus.count} GPUs, and {count} are to be tried; write one "
                f"bandwidth for all pairs, or --limit {gpus.count}"
            )
        peer = [row[:count] for row in peer[:count]]
    changed = msgspec.structs.replace(gpus, count=count, switches=switches, peer=peer)
    places = [(fault, *divmod(fault.gpu, gpus.count)) for fault in scenario.tree.faults]
    faults = [msgspec.structs.replace(fault, gpu=node * count + gpu) for fault, node, gpu in places if gpu < count]
    return _with(scenario, msgspec.structs.replace(scenario.tree, gpus=changed, faults=faults))


def least_gpus(scenario: Scenario) -> int:
    """Of each node: with fewer, some of the scenario's faults would not happen."""
    return 1 + max((fault.gpu % scenario.gpus for fault in scenario.faults), default=0)


def with_functions(scenario: Scenario, count: int) -> Scenario:
    """Each model has the share of ``count`` functions that it has in the scenario, rounded."""
    models = scenario.tree.models
    numbers = _shares([model.functions for model in models], count)
    changed = [
        msgspec.structs.replace(model, functions=number)
        for model, number in zip(models, numbers, strict=True)
        if number
    ]
    return _with(scenario, msgspec.structs.replace(scenario.tree, models=changed))


def _with(scenario: Scenario, tree: Tree) -> Scenario:
    return built(tree, str(scenario.path))


def _shares(weights: Sequence[int], count: int) -> list[int]:
    """``count`` in proportion to weights, by largest remainder; of equal ones the first."""
    total = sum(weights)
    shares = [count * weight // total for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda i: (-(count * weights[i] % total), i))
    for i in by_remainder[: count - sum(shares)]:
        shares[i] += 1
    return shares
