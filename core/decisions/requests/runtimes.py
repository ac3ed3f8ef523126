"""Names of runtimes that compute for instances of a language model: pure."""

from dormouse.schemas import messages as m


def runtime_group(spec: m.FunctionSpec) -> str:
    """The group of instances that one runtime may compute for: those of a tenant that serve the same files in the same
    way, with adapters or without. "" for a runtime of its own.
    """
    llm = spec.llm
    backbone = "" if llm is None else llm.backbone or spec.content
    if llm is None or llm.isolation != "tenant" or not backbone:
        return ""
    return f"{spec.tenant}/{backbone}/{spec.entry}/{llm.dtype}/{llm.context}/{int(llm.convert)}"


def runtime_of(spec: m.FunctionSpec, instance: str) -> str:
    """The name of the runtime that may compute for this instance; "" if it has none."""
    return "" if spec.llm is None else runtime_group(spec) or instance
