"""Language models with adapters of their own over one base: the settings of a scenario for them, checked, and the
functions that share a runtime. Pure. The base's segments are the same content in all of them; each adapter is its
function's own.
"""

from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from dormouse.controller.simulator.checks import Checks
from dormouse.controller.simulator.devices import ModelSpec
from dormouse.controller.simulator.tree import ModelSection

ISOLATIONS: Final = ("tenant", "function")

SAME: Final = ("kv", "step", "per_sequence", "per_context", "per_prompt", "free_tokens", "step_tokens")
"""Of all entries over one base: they are the same model but for the adapter."""


def read_bases(check: Checks, models: Sequence[ModelSection]) -> list[str]:
    """For each entry, where the scenario has its base: itself, if it names no other."""
    numbers = {model.name: number for number, model in reversed(list(enumerate(models)))}
    found = []
    for number, model in enumerate(models):
        at, llm = f"models[{number}]", model.llm
        if llm is None or not llm.base:
            found.append(at)
            continue
        first = numbers.get(llm.base, number)
        base = models[first]
        right = base.llm is not None and not base.llm.base and first != number
        cure = "write the name of another entry with [models.llm], which names no base"
        check.need(right, f"{at}.llm.base", repr(llm.base), cure)
        check.need(model.size == base.size, f"{at}.size", repr(model.size), f"write {base.size!r}, as {base.name} has")
        for key in SAME:
            mine, its = getattr(llm, key), getattr(base.llm, key)
            check.need(mine == its, f"{at}.llm.{key}", repr(mine), f"write {its!r}, as {base.name} has")
        found.append(f"models[{first}]")
    return found


def read_adapter(check: Checks, at: str, model: ModelSection, base: str) -> tuple[int, str]:
    """Bytes of each function's adapter, and the group whose runtime computes for it; "": it has its own."""
    llm = model.llm
    assert llm is not None
    at = f"{at}.llm"
    check.need(llm.isolation in ISOLATIONS, f"{at}.isolation", repr(llm.isolation), f"write one of {ISOLATIONS}")
    if llm.adapter in (0, "0", ""):
        for key, unset in (("base", ""), ("isolation", "tenant"), ("tenant", "")):
            found = getattr(llm, key)
            check.need(found == unset, f"{at}.{key}", repr(found), "write llm.adapter, its bytes, or remove it")
        return 0, ""
    key = f"{at.removesuffix('.llm')}.shared"
    check.need(not model.shared, key, model.shared, "remove it: all of size is the base, and adapters are beside it")
    return check.nbytes(f"{at}.adapter", llm.adapter), f"{llm.tenant}/{base}" if llm.isolation == "tenant" else ""


def check_groups(check: Checks, models: Sequence[ModelSpec], gpu_nbytes: int) -> None:
    """All adapters of a runtime are on its GPU with the base, and one longest sequence."""
    for host, members in runtime_groups(models).items():
        spec = models[host]
        llm = spec.llm
        assert llm is not None
        needed = group_spec(models, members).nbytes + llm.context_nbytes
        needed += max(each.prompt.most + each.output.most for n in members if (each := models[n].llm)) * llm.kv_nbytes
        check.need(
            needed <= gpu_nbytes,
            "gpus.memory",
            f"{gpu_nbytes:,}",
            f"{spec.name}'s runtime, with the base, {len(members)} adapters and one longest sequence, needs "
            f"{needed:,} bytes: use larger GPUs, or isolation = 'function'",
        )


def runtime_groups(models: Sequence[ModelSpec]) -> dict[int, list[int]]:
    """Functions that have one runtime, by the first of them."""
    groups: dict[str, list[int]] = {}
    for number, spec in enumerate(models):
        if spec.llm is not None and spec.llm.group:
            groups.setdefault(spec.llm.group, []).append(number)
    return {members[0]: members for members in groups.values()}


def group_spec(models: Sequence[ModelSpec], members: Sequence[int]) -> ModelSpec:
    """The model of their one instance on a GPU: the base, and the adapters of all. It has as many instances as any."""
    first = models[members[0]]
    adapters = sum(llm.adapter_nbytes for number in members if (llm := models[number].llm) is not None)
    each = [models[number] for number in members]
    most = max((spec.max_instances for spec in each), key=lambda most: most or float("inf"))
    load_s = max(spec.load_s for spec in each)
    return replace(first, nbytes=first.base_nbytes + adapters, max_instances=most, load_s=load_s)
