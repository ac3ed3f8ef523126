"""The template that an instance follows, and computation ahead of its program.

A program mostly repeats itself. Its instance sends such a sequence of commands once, as a template (template.py), and
later only how far its program has come in it: the program still runs, so nothing is guessed about its behaviour.
Operations ahead of it are computed early where that cannot be noticed: those whose operands are there, that draw no
random numbers and write nothing but the lease's own. Their results stay apart (`StorageTable.ahead`) until the program
has come there, and overwritten bytes are saved; if the program goes elsewhere, the results are dropped and the bytes
restored. A section that the GPU has captured (captures.py) is computed as a whole, and becomes the lease's as a whole;
if the program looks within it, its commands are run up to there instead.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, Final

import torch
from msgspec import Struct

from dormouse.gpuserver.commands.captures import FAILURES, Captures, Computing, Waits
from dormouse.gpuserver.commands.control import count
from dormouse.gpuserver.commands.definitions import Kernel, ProtocolViolation, brief
from dormouse.gpuserver.commands.fast_path import AHEAD_NBYTES
from dormouse.gpuserver.commands.running import OperationRunner
from dormouse.gpuserver.commands.sections import TemplateSection
from dormouse.gpuserver.commands.storages import CommandFailed, HeldStorage, StorageTable, whole
from dormouse.gpuserver.commands.template import Template, read
from dormouse.schemas import stream as wire

AHEAD_NS: Final = 200_000
"""Time of computation ahead between two checks for a new frame."""

MAX_FREES: Final = 1024
"""FREE commands that wait until the program has come through a section."""


class Followed(Struct):
    """A template on its way: the program has come to ``validated``, and computation to ``reached``. Up to ``confirmed``
    results are the lease's own: where the program is, but while an answer is on its way, and within a section that was
    computed as a whole.
    """

    template: Template
    commands: list[Any]
    start: int
    confirmed: int
    validated: int
    reached: int
    limit: int  # where it waits
    stalled: bool = False  # by a command that cannot be computed ahead, or not yet
    computing: tuple[TemplateSection, Computing] | None = None  # the section that begins at ``reached``
    sections: list[TemplateSection] = []  # computed as a whole, and not confirmed
    frees: list[list[Any]] = []  # for results that are not confirmed


class Templates:
    """Those of one instance. ``run`` runs commands; ``free`` runs a FREE, given the place after its code; ``counted``
    is called for operations that have run."""

    def __init__(
        self,
        table: StorageTable,
        keys: dict[int, Kernel],
        runner: OperationRunner,
        run: Callable[[list[Any]], None],
        free: Callable[[list[Any], int], int],
        counted: Callable[[int], None],
        captures: Captures,
    ) -> None:
        self._steps: Any = None  # the library's, once there is one
        self._undo: list[tuple[int, HeldStorage, torch.Tensor]] = []  # of writes ahead: the storage, and its old bytes
        self.guessing = False  # commands computed now were not asked for
        self.news: list[list[Any]] = []  # replies of no frame
        self.compared = 0  # results, ever, see CHECK
        self._runner, self._captures = runner, captures
        self._table, self._keys, self._run, self._free, self._counted = table, keys, run, free, counted
        table.written, table.settled = self.written, self.drop
        self._known: dict[int, Template] = {}
        self._words = 0  # in all of them
        self._allowed = 0  # of words, for the rest of the frame
        self._followed: Followed | None = None
        self.handlers: Final[dict[int, Callable[[list[Any], int], int]]] = {
            wire.TEMPLATE: self._define,
            wire.FOLLOW: self._follow,
            wire.VALIDATED: self._validated,
            wire.LEAVE: self._leave,
            wire.CHECK: self._check,
        }

    def compute_by(self, steps: Any) -> None:
        self._steps, self._undo = steps, steps.undo

    def forget(self) -> None:
        """Definitions are void."""
        self.leave()
        self._known.clear()
        self._words = 0

    def abandon(self) -> None:
        """The lease is over, and nobody asks for anything any more."""
        self._table.ahead.clear()
        self._undo.clear()
        self._table.owed = {}
        if self._followed is not None:
            self._computes(self._followed, None)
        self._followed = None

    def leave(self) -> None:
        """The instance follows none."""
        self.drop()
        self.abandon()

    def confirm(self) -> None:
        """Results that were asked for are the lease's own, except for part of a section."""
        if self.owes:
            assert self._followed is not None
            self._confirm(self._followed)

    def settle(self) -> None:
        """Bring the state to where the program is, before any command but VALIDATED reads it. Bytes written ahead are
        restored, and nothing that was computed since is kept.
        """
        self.confirm()
        if (followed := self._followed) is not None:
            self._computes(followed, None)
            if self.unsettled:
                self._drop(followed)

    def drop(self) -> bool:
        """Drop results computed ahead; they are computed again if asked for. Returns whether there were any."""
        self.confirm()
        with torch.inference_mode():
            return self._followed is not None and self._drop(self._followed)

    def _drop(self, followed: Followed) -> bool:
        self._table.ahead.clear()
        followed.sections.clear()
        computing = followed.computing
        self._computes(followed, None)
        while self._undo:
            _, stored, before = self._undo.pop()
            whole(stored.bytes()).copy_(before)
        dropped = followed.reached > followed.confirmed or computing is not None
        followed.reached = followed.confirmed
        if followed.confirmed < followed.validated:
            self._captures.looked(followed.template, followed.validated)
            self._run_to(followed, followed.validated)
        return dropped

    def _run_to(self, followed: Followed, at: int) -> None:
        """Where nothing is computed ahead: command by command."""
        rest = followed.commands[followed.confirmed : at]
        followed.confirmed = followed.validated = followed.reached = at
        self._run(rest)
        self._free_all(followed)

    def written(self) -> None:
        """Something is written that computation ahead may have read."""
        if self.drop():
            assert self._followed is not None
            template, at = self._followed.template, self._followed.validated
            template.waits.add(at)
            self._captures.looked(template, at)

    @property
    def expecting(self) -> bool:
        """Whether the program is within a template."""
        return (followed := self._followed) is not None and followed.validated < len(followed.commands)

    @property
    def unsettled(self) -> bool:
        """Whether any visible state differs from the program's."""
        return bool(self._undo) or self.owes

    @property
    def owes(self) -> bool:
        """Whether the program has come to where nothing is confirmed yet."""
        return self._followed is not None and self._followed.confirmed < self._followed.validated

    def free(self, commands: list[Any], position: int) -> int:
        """A FREE while something is not settled: it looks at nothing."""
        if not self.owes:
            return self._free(commands, position)
        assert self._followed is not None
        end = position + 1 + count(commands[position])
        if len(self._followed.frees) >= MAX_FREES:
            self.settle()
            return self._free(commands, position)
        self._followed.frees.append(commands[position:end])
        return end

    # --- ahead of the program

    def ahead(self) -> bool:
        """Compute a few commands ahead; whether there may be more to do. Under inference mode."""
        followed = self._followed
        if followed is None or self._steps is None:
            return False
        self.confirm()
        if followed.stalled or followed.reached >= followed.limit:
            return False
        if (waits := self._section(followed, followed.limit)) is None:
            self._compute(followed, AHEAD_NS)
            return followed.reached < followed.limit
        if waits is not Waits.NO:
            followed.stalled = True
            if waits is Waits.NOT_YET:
                self._tell(followed)
            return False
        limit = self._captures.next_start(followed.template, followed.reached, followed.limit)
        followed.reached = self._steps.ahead(followed.commands, followed.reached, limit, AHEAD_NS)
        followed.stalled = self._steps.stalled
        if self._steps.spoiled:
            self.drop()
        elif followed.stalled and self._steps.roomy and followed.reached < limit:
            self._by_python(followed)
            if followed.stalled:
                self._tell(followed)
        return not followed.stalled and followed.reached < followed.limit

    def _section(self, followed: Followed, limit: int) -> Waits | None:
        """Begin with the section that begins here, or go on: None; or why not."""
        if followed.computing is not None:
            return None
        section = self._captures.at(followed.template, followed.reached)
        if section is None or section.end > limit:
            return Waits.NO
        if not self._table.ahead and not self._undo:
            self._steps.ahead_nbytes = 0
        room = AHEAD_NBYTES - self._steps.ahead_nbytes
        begun = self._captures.begin(followed.template, section, followed.commands, room)
        if isinstance(begun, Waits):
            return begun
        self._computes(followed, (section, begun))
        return None

    def _computes(self, followed: Followed, computing: tuple[TemplateSection, Computing] | None) -> None:
        followed.computing = computing
        if self._steps is not None:
            self._steps.computing = computing is not None

    def _compute(self, followed: Followed, nanoseconds: int) -> bool:
        """Some of the section with which was begun; False if it could not be."""
        assert followed.computing is not None
        section, computing = followed.computing
        try:
            if not computing.go(nanoseconds):
                return True
            results = computing.results()
        except FAILURES:
            self._computes(followed, None)
            self._captures.failed(followed.template)
            return False
        self._computes(followed, None)
        fresh = (followed.commands[place] for place in section.results.values())
        self._table.ahead |= zip(fresh, results, strict=True)
        self._steps.ahead_nbytes += sum(each.nbytes for each in results)
        followed.sections.append(section)
        followed.reached = section.end
        self._captures.computed(followed.template)
        return True

    def _catch_up(self, followed: Followed, at: int) -> None:
        """The program has come to ``at``, beyond what is computed: compute that, but for a section that it has not come
        through.
        """
        limit = max(at, self._limit(followed))
        frees, followed.frees = followed.frees, []  # commands not computed yet may read them
        while followed.reached < at:
            if self._steps is not None and self._section(followed, limit) is None:
                assert followed.computing is not None
                if followed.computing[0].end > at:
                    break
                if self._compute(followed, -1):
                    continue
            next_at = self._captures.next_start(followed.template, followed.reached, at)
            followed.validated = followed.reached
            self._confirm(followed)
            self._run_to(followed, next_at)
        followed.validated, followed.frees = at, frees
        if followed.confirmed == at:
            self._free_all(followed)

    def _tell(self, followed: Followed) -> None:
        """Report to the instance a command at which the GPU waits for it."""
        template, at = followed.template, followed.reached
        if at not in template.stalls and len(template.stalls) < wire.MAX_STALLS:
            template.stalls.add(at)
            self.news.append([wire.STALLED, template.number, at])

    def _confirm(self, followed: Followed) -> None:
        """Results computed ahead have been asked for."""
        end = min(followed.validated, followed.reached)
        self._table.owed = {}
        while followed.sections and followed.sections[0].start < end:
            section = followed.sections[0]
            self._confirm_to(followed, section.start)
            if section.end > end:
                break
            self._enter(followed.sections.pop(0), followed.commands)
            followed.confirmed = section.end
        else:
            self._confirm_to(followed, end)
            if end == followed.validated:
                self._free_all(followed)
        if self._undo:
            at = followed.confirmed
            self._steps.ahead_nbytes -= sum(before.nbytes for place, _, before in self._undo if place < at)
            self._undo[:] = [each for each in self._undo if each[0] >= at]

    def _confirm_to(self, followed: Followed, end: int) -> None:
        at = followed.confirmed
        while at < end:
            at = self._steps.confirm(followed.commands, at, end)
            self._counted(self._steps.ran)
            if at < end:
                at = self._confirm_by_python(followed.commands, at)
        followed.confirmed = at

    def _free_all(self, followed: Followed) -> None:
        for numbers in followed.frees:
            self._free(numbers, 0)
        followed.frees = []

    def _confirm_by_python(self, commands: list[Any], at: int) -> int:
        if commands[at] == wire.FREE:
            return self._free(commands, at + 1)
        kernel = self._keys[commands[at]]
        end = at + 1 + kernel.n_operands + kernel.n_fresh
        self._own(commands[end - kernel.n_fresh : end])
        self._counted(1)
        return end

    def _enter(self, section: TemplateSection, commands: list[Any]) -> None:
        self._own([commands[place] for place in section.results.values()])
        freed = [commands[place] for place in section.frees]
        self._free([len(freed), *freed], 0)
        self._counted(section.operations)

    def _own(self, fresh: list[Any]) -> None:
        self._table.check_fresh(fresh)
        for number in fresh:
            stored = self._table.by_id[number] = self._table.ahead.pop(number)
            self._steps.ahead_nbytes -= stored.nbytes

    def _by_python(self, followed: Followed) -> None:
        """Compute one operation ahead that C++ leaves to Python."""
        commands, table, at = followed.commands, self._table, followed.reached
        kernel = self._keys.get(commands[at])
        if kernel is None or not self._runner.may_guess(kernel):
            return
        middle = at + 1 + kernel.n_operands
        operands, fresh = commands[at + 1 : middle], commands[middle : middle + kernel.n_fresh]
        numbers = [operands[place] for place in kernel.tensors]
        lent = {n: table.ahead[n] for n in numbers if n not in table.by_id and n in table.ahead}
        if not all(n in table.by_id or n in lent for n in numbers) or any(n in table.ahead for n in fresh):
            return
        table.by_id |= lent
        self.guessing, ran = True, self._runner.ran
        try:
            table.check_fresh(fresh)
            self._runner.run(kernel, operands, fresh)
        except (CommandFailed, ProtocolViolation, torch.OutOfMemoryError):  # they are met again when it is asked for
            return
        finally:
            self.guessing, self._runner.ran = False, ran
            for number in lent:
                del table.by_id[number]
        self._steps.ahead_nbytes += sum(table.by_id[number].nbytes for number in fresh)
        table.ahead |= {number: table.by_id.pop(number) for number in fresh}
        followed.reached, followed.stalled = middle + kernel.n_fresh, False

    def begin_frame(self) -> None:
        """Requests of the last frame do not count for the next."""
        self.confirm()
        self._allowed = wire.MAX_FOLLOWED_WORDS

    def heard(self) -> None:
        """A frame has been run: missing operands may be there now."""
        if (followed := self._followed) is not None:
            followed.stalled = False
            followed.limit = self._limit(followed)

    def _limit(self, followed: Followed) -> int:
        waits = (place for place in followed.template.waits if place > followed.validated)
        return min(waits, default=len(followed.commands))

    # --- commands, as in control.py

    def _define(self, commands: list[Any], position: int) -> int:
        number, words = commands[position : position + 2]
        if type(number) is not int or number in self._known or type(words) is not list:
            raise ProtocolViolation(f"template {brief(number)} is not a new number, or no list")
        self._words += len(words)
        most = wire.MAX_TEMPLATE_WORDS
        if len(words) > most or len(self._known) >= wire.MAX_TEMPLATES or self._words > wire.MAX_TEMPLATES_WORDS:
            raise ProtocolViolation("templates are too long or too many")
        self._known[number] = read(number, words, self._keys)
        return position + 2

    def _follow(self, commands: list[Any], position: int) -> int:
        number, base, at, olds = commands[position : position + 4]
        template = self._known.get(number)
        if template is None or type(at) is not int or at not in template.starts:
            raise ProtocolViolation(f"template {brief(number)} was not defined, or does not begin there")
        if type(olds) is not list or any(count(old) > count(base) for old in olds):
            raise ProtocolViolation("storages that the lease had before are not from before")
        self.leave()
        self._spend(len(template.words))
        instance = template.instance(base, olds, self._steps)
        self._followed = Followed(template, instance, at, at, at, at, at)
        return position + 4

    def _come(self, at: Any) -> Followed:
        """The program has come to this place."""
        followed = self._followed
        if followed is None or type(at) is not int or at not in followed.template.starts or at < followed.validated:
            raise ProtocolViolation(f"{brief(at)} is no place that the instance can have come to")
        self._spend(at - followed.validated)
        return followed

    def _spend(self, words: int) -> None:
        self._allowed -= words
        if self._allowed < 0:
            raise ProtocolViolation("a frame stands for more commands than a frame may")

    def _validated(self, commands: list[Any], position: int) -> int:
        at = commands[position]
        followed = self._come(at)
        self._catch_up(followed, at)
        self._table.owed = self._table.ahead if followed.confirmed < at == followed.reached else {}
        self._through(followed)
        return position + 1

    def _through(self, followed: Followed) -> None:
        if followed.validated == len(followed.commands):
            self._captures.came(followed.template, followed.commands, followed.start)

    def _check(self, commands: list[Any], position: int) -> int:
        """Run the commands that the instance sends, and compare: commands with those of the template, and results with
        those that were computed ahead.
        """
        at, said = commands[position : position + 2]
        followed = self._come(at)
        if said != followed.commands[followed.validated : at]:
            raise ProtocolViolation("the instance's commands are not those of the template that it follows")
        self.confirm()
        middle = min(at, followed.reached)
        written = any(place >= middle for place, _, _ in self._undo)
        beyond = {
            followed.commands[place]
            for section in followed.sections
            if section.end > middle  # it may write them once more
            for place in section.results.values()
        }
        ahead = {} if written else {n: stored for n, stored in self._table.ahead.items() if n not in beyond}
        try:
            kept = {number: whole(stored.bytes()).clone() for number, stored in ahead.items()}
        except torch.OutOfMemoryError:  # nothing to compare with
            kept = {}
        self._drop(followed)
        starts = sorted(start for start in followed.template.starts if followed.confirmed <= start <= middle)
        followed.confirmed = followed.validated = followed.reached = at
        for start, end in pairwise(starts):
            command = followed.commands[start:end]
            if command[0] == wire.FREE:
                self._compare({number: kept.pop(number) for number in command[2:] if number in kept})
            self._run(command)
        self._compare({number: stored for number, stored in kept.items() if number in self._table.by_id})
        self._run(followed.commands[middle:at])
        self._through(followed)
        return position + 2

    def _compare(self, ahead: dict[int, torch.Tensor]) -> None:
        for number, before in ahead.items():
            stored = self._table.by_id[number]
            self.compared += 1
            if stored.error is not None or not torch.equal(before, whole(stored.bytes())):
                raise ProtocolViolation(f"storage {number} was computed ahead, and is something else")

    def _leave(self, commands: list[Any], position: int) -> int:
        self.leave()
        return position
