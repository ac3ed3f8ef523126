"""Models: their segments, and the instances that share these. Pure."""

from collections.abc import Iterable


class ModelLayout:
    """A model, as far as memory is concerned."""

    __slots__ = ("nbytes", "needs", "needs_nbytes")

    def __init__(self, needs: Iterable[tuple[int, int]]) -> None:
        self.needs = list(needs)  # (segment, nbytes), first use first
        self.nbytes = dict(self.needs)  # by segment
        self.needs_nbytes = sum(self.nbytes.values())


class KnownModels:
    """The newest models of all instances of a node. Several GPUs may have one table in common."""

    def __init__(self) -> None:
        self.by_instance: dict[str, ModelLayout] = {}
        self.sharers: dict[int, set[str]] = {}  # instances by segment
        self.shared = 0  # segments that several instances have

    def learn(self, instance: str, model: ModelLayout) -> list[int]:
        """Its newest model. Returns the segments that it had before."""
        before = self.forget(instance)
        self.by_instance[instance] = model
        for segment in model.nbytes:
            sharers = self.sharers.setdefault(segment, set())
            sharers.add(instance)
            self.shared += len(sharers) == 2
        return before

    def forget(self, instance: str) -> list[int]:
        """It has no model any more. Returns the segments that it had."""
        model = self.by_instance.pop(instance, None)
        if model is None:
            return []
        for segment in model.nbytes:
            sharers = self.sharers[segment]
            sharers.discard(instance)
            self.shared -= len(sharers) == 1
            if not sharers:
                del self.sharers[segment]
        return list(model.nbytes)

    def check(self) -> None:
        found: dict[int, set[str]] = {}
        for name, model in self.by_instance.items():
            for segment in model.nbytes:
                found.setdefault(segment, set()).add(name)
        assert found == self.sharers
        assert self.shared == sum(len(sharers) > 1 for sharers in found.values())
