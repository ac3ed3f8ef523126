"""The part of the router's policy on functions with LoRA adapters and their bases: the changes that these allow. Pure.

A function with an adapter has its base's files itself, so it goes on unchanged when its base is deployed anew. It names
its base to clients (`parent`), so the base is neither removed nor deployed as something else while it has adapters.
"""

from dormouse.core.decisions.requests import failures
from dormouse.core.decisions.requests.state import OpenDeploy, RouterState
from dormouse.schemas import messages as m


def adapters_of(p: RouterState, name: str) -> list[str]:
    """Functions over this one, deployed or on their way."""
    specs = [function.spec for function in p.functions.values()]
    specs += [change.spec for change in p.changes.values() if isinstance(change, OpenDeploy)]
    return sorted({spec.name for spec in specs if spec.llm is not None and spec.llm.base == name})


def deploy_refusal(p: RouterState, spec: m.FunctionSpec) -> m.Failure | None:
    """Reason why this cannot be deployed."""
    base = "" if spec.llm is None else spec.llm.base
    if (spec.llm is None or base) and (adapters := adapters_of(p, spec.name)) and adapters != [spec.name]:
        return failures.has_adapters(spec.name, adapters, "become something else than a language model")
    if not base or spec.llm is None:
        return None
    found = p.functions.get(base)
    if found is None or base in p.changes or found.spec.content != spec.llm.backbone:
        return failures.base_changed(base)
    return None


def removal_refusal(p: RouterState, name: str) -> m.Failure | None:
    """Reason why this cannot be removed."""
    adapters = adapters_of(p, name)
    return failures.has_adapters(name, adapters, "be removed") if adapters else None
