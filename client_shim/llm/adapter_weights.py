"""An adapter's tensors as runtimes want them: their names, layout and dtype (schemas/llm.py). Runs in the sandbox."""

from collections.abc import Callable, Iterator

import torch
from msgspec import structs

from dormouse.client_shim.llm.adapter import FoundAdapter
from dormouse.schemas.llm import BIAS, DOWN, REPLACED, UP


def without_equal(found: FoundAdapter, base: Callable[[str], torch.Tensor]) -> FoundAdapter:
    """Without parameters that equal the base's: PEFT saves whole embeddings beside its additions to them, and
    parameters that were to be trained but were not. ``base(parameter)``: the base's, as runtimes have it; asked once
    for each.
    """
    kept: dict[str, str] = {}
    for parameter, name in found.replaced.items():
        own = base(parameter)
        ((_, tensor),) = found.checkpoint.read([name])
        if not torch.equal(tensor.to(own.dtype), own):
            kept[parameter] = name
    return found._replace(spec=structs.replace(found.spec, replaced=list(kept)), replaced=kept)


def weights_of(found: FoundAdapter, dtype: torch.dtype) -> Iterator[tuple[list[str], torch.Tensor]]:
    """Each tensor once, with all names that it has in the end; ``found.spec.weights`` are these names."""
    names: dict[str, list[str]] = {}  # by name in the file
    turned: set[str] = set()
    for module in found.spec.modules:
        of = found.tensors[module.name]
        names[of.a], names[of.b] = [module.name + DOWN], [module.name + UP]
        turned.update([of.b, *[of.a] * (module.kind == "embedding")])
        if module.bias:
            names[of.bias] = [module.name + BIAS]
    for parameter, name in found.replaced.items():
        names.setdefault(name, []).append(parameter + REPLACED)
    for name, tensor in found.checkpoint.read(names):
        yield names[name], (tensor.T if name in turned else tensor).to(dtype).contiguous()
