"""The members of a runtime: instances by their leases, each with its model and its sequences. Pure.

Instances are not trusted, and those of one runtime do not trust each other. Each numbers its sequences as it likes;
here they have numbers of the engine, in order of arrival, and an instance can only name its own.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from msgspec import structs

from dormouse.core.decisions.batches.batch import NO_ADAPTER
from dormouse.gpuserver.runtime.engine import Made
from dormouse.gpuserver.runtime.progress import SequenceBegun
from dormouse.gpuserver.runtime.submissions import Submissions
from dormouse.schemas import messages as m
from dormouse.schemas.errors import ConfigError
from dormouse.schemas.llm import AdapterSpec, DecoderSpec

PACKET_TOKENS: Final = 256
"""Tokens in one packet to the instance, at most."""

Places = dict[str, tuple[int, list[int]]]
"""Places of weights in the pool's address space, and their shapes, by name."""


@dataclass(slots=True, eq=False)
class Member:
    """One lease. ``weights`` of those that it has announced."""

    serial: int
    spec: DecoderSpec
    announced: int
    adapter: AdapterSpec | None = None
    parts: int = 0  # of its adapter, that have yet to come
    number: int = NO_ADAPTER  # of its adapter, in the engine
    weights: dict[str, m.WeightAt] = field(default_factory=dict)
    submissions: Submissions = field(default_factory=Submissions)
    numbers: dict[int, int] = field(default_factory=dict)  # the engine's, by its own
    refused: str = ""  # why no token will come

    @property
    def known(self) -> bool:
        """Whether all about its model is."""
        return len(self.weights) >= self.announced and self.parts <= 0

    def part(self, part: AdapterSpec) -> None:
        """Raises ConfigError."""
        if self.adapter is None or self.parts <= 0:
            raise ConfigError("a part of no adapter")
        self.adapter, self.parts = self.adapter.with_part(part), self.parts - 1

    @property
    def adapters_weights(self) -> set[str]:
        """Names of those that are its adapter's."""
        return set() if self.adapter is None else set(self.adapter.weights)

    @property
    def base_weights(self) -> dict[str, m.WeightAt]:
        """The weights that it shares with other members."""
        own = self.adapters_weights
        return {name: weight for name, weight in self.weights.items() if name not in own}

    def places(self, seat: m.SeatGiven) -> Places:
        """Of the base. Storages that are not there are at -1."""
        at = {storage.storage: storage.offset for storage in seat.storages}
        return {
            weight.name: (at[weight.storage] + weight.offset if weight.storage in at else -1, weight.shape)
            for weight in self.base_weights.values()
        }


class Members:
    """See the module."""

    def __init__(self) -> None:
        self.by_serial: dict[int, Member] = {}
        self._owners: dict[int, tuple[Member, int]] = {}  # by the engine's number: whose, and the number there
        self._numbers = count(1)

    def open(self, serial: int, opened: m.OpenModel) -> Member:
        """It begins, or begins anew: `leave` comes before."""
        member = self.by_serial[serial] = Member(serial, opened.spec, opened.weights, opened.adapter, opened.parts)
        return member

    def leave(self, serial: int) -> list[int]:
        """It is no more. Returns the engine's numbers of its sequences."""
        member = self.by_serial.pop(serial, None)
        if member is None:
            return []
        numbers = list(member.numbers.values())
        for number in numbers:
            del self._owners[number]
        return numbers

    def enter(self, member: Member, own: int) -> int:
        """The number of a new sequence."""
        number = member.numbers[own] = next(self._numbers)
        self._owners[number] = member, own
        return number

    @property
    def busy(self) -> list[int]:
        """Leases that have sequences."""
        return [serial for serial, member in self.by_serial.items() if member.numbers]

    def owner(self, number: int) -> tuple[Member, int]:
        """The member that has the sequence, and its number there."""
        return self._owners[number]

    def end(self, number: int) -> None:
        """A sequence is over."""
        if (owner := self._owners.pop(number, None)) is not None:
            del owner[0].numbers[owner[1]]

    def packets(self, made: Iterable[Made], begun: Mapping[int, SequenceBegun]) -> Iterator[tuple[int, m.Tokens]]:
        """The results of a step as packets, each with the lease of the instance that receives it. ``begun``: sequences
        that have their first token, by the engine's number.
        """
        for serial, theirs in self.sorted(made).items():
            for start in range(0, len(theirs), PACKET_TOKENS):
                yield serial, _tokens_of(theirs[start : start + PACKET_TOKENS], begun)

    def sorted(self, made: Iterable[Made]) -> dict[int, list[tuple[int, Made]]]:
        """The results of a step, by lease, each with its owner's number."""
        found: dict[int, list[tuple[int, Made]]] = {}
        for each in made:
            member, own = self._owners[each.number]
            found.setdefault(member.serial, []).append((own, each))
        return found


def _tokens_of(made: Iterable[tuple[int, Made]], begun: Mapping[int, SequenceBegun]) -> m.Tokens:
    """Of one lease."""
    tokens: list[m.ChosenToken] = []
    reused: list[tuple[int, int]] = []
    firsts: list[m.FirstToken] = []
    for own, each in made:
        chosen = each.chosen
        token = m.ChosenToken(
            number=own, token=chosen.token, finish=each.finish, logprob=chosen.logprob, top=chosen.top
        )
        tokens.append(token)
        if (first := begun.get(each.number)) is not None:
            reused.append((own, first.reused))
            firsts.append(structs.replace(first.told, number=own))
    return m.Tokens(tokens=tokens, reused=reused, firsts=firsts)
