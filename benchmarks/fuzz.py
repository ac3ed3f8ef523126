"""Broken frames of real programs against a real executor, beside a neighbour whose answers are checked.

    python -m benchmarks.fuzz --frames 1000000 --jobs 2

An *episode* is one lease: valid frames of a recording up to a point, a broken one or two, an END. Episodes are sent a
batch at a time, and then the neighbour is looked at. What kills or hangs the executor is looked for among the batch's
episodes, one at a time; episode N of a seed is always the same, and `--only N` runs it alone. Each job has a seed and
an executor of its own.
"""

import multiprocessing
import random
import reprlib
import struct
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Final

import msgpack

from benchmarks import fuzz_mutate as mutating
from benchmarks.fuzz_record import Recording, record_all
from benchmarks.fuzz_world import ExecutorDied, ExecutorHung, Peer, World
from benchmarks.report import Goal, arguments, report
from dormouse.schemas import stream as wire

BATCH: Final = 32
"""Episodes under way at a time, and between two looks at the neighbour."""

EARLY: Final = 4
"""Power of the random number that says where in a recording the broken frame stands: what comes before it costs."""

PROGRESS_S: Final = 10.0
MAX_TROUBLES: Final = 20
"""Deaths and hangs after which a run ends: the next would be the same."""

AT_LEAST: Final = 100
"""Times that every kind of command, operand and definition is to be broken."""

_F32: Final = ["float32", [64], [1], 0, 0]
_DOUBLE: Final[list[Any]] = [
    "aten::mul.Scalar",
    [[wire.TENSOR, 0], [wire.SCALAR]],
    [],
    [[[wire.FRESH, 0, 0]], [], False],
    "float32",
]
ENDS: Final = (wire.END_ACK, wire.END_WAIT, wire.END_QUIET)
OWN: Final = 1
"""The neighbour's own storage; those that it shares with victims follow."""

_CONTENT: Final = struct.pack("64f", *range(64))


_SHORT: Final = reprlib.Repr()
_SHORT.maxlist = _SHORT.maxlevel = 200


@dataclass
class Result:
    """What happened; a failure names its episode."""

    frames: int = 0
    past_gate: int = 0
    episodes: int = 0
    looks: int = 0
    deaths: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    escaped: Counter[str] = field(default_factory=Counter)  # by text: caught in the outermost frame
    kinds: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    reopen_ms: float = 0.0

    @property
    def sound(self) -> bool:
        return not (self.deaths or self.hung or self.wrong or self.escaped)

    def __add__(self, other: "Result") -> "Result":
        """Of two runs; the slower of their times."""
        names = ("frames", "past_gate", "episodes", "looks", "deaths", "hung", "wrong")
        both = {name: getattr(self, name) + getattr(other, name) for name in names}
        counts = {name: getattr(self, name) + getattr(other, name) for name in ("escaped", "kinds", "outcomes")}
        return Result(**both, **counts, reopen_ms=max(self.reopen_ms, other.reopen_ms))


class Neighbour:
    """A healthy instance: a storage of its own, and all that the victims have, in the same segments: a write of theirs
    must not be seen here.
    """

    def __init__(self, world: World, programs: "list[Program]") -> None:
        self.world = world
        self.segments = world.model({OWN: _CONTENT})
        self.contents = {OWN: _CONTENT}
        for program in programs:
            for storage, segment in program.segments.items():
                number = len(self.contents) + 1
                self.segments[number], self.contents[number] = segment, program.storages[storage]
        self.peer = world.instance(self.segments)
        self.told = False

    def ask(self) -> None:
        """Send a lease whose answers :meth:`look` checks."""
        peer = self.peer
        sizes = sorted({len(content) for content in self.contents.values()})
        metas: list[Any] = [0, _F32]
        for number, size in enumerate(sizes, 1):
            metas += [number, ["uint8", [size], [1], 0, 0]]
        commands: list[Any] = [0, OWN, 2.0, 9000, 0, 9000, 0.5, 9001, wire.DOWNLOAD, OWN, 9001, 0, -1]
        for number, content in self.contents.items():
            if number != OWN:
                commands += [wire.DOWNLOAD, number, number, 1 + sizes.index(len(content)), -1]
        peer.lease()
        peer.say([[], []] if self.told else [metas, [0, _DOUBLE]], commands)
        peer.say([[], []], [wire.END, 1, 0])
        self.told = True

    def look(self) -> str:
        """What is wrong with its answers, if anything."""
        peer = self.peer
        self.world.wait(lambda: peer.ended and peer.answered, peer)
        self.world.forget(peer)
        answers = {reply[1]: reply[2] for reply in peer.replies if reply[0] == wire.VALUE}
        trouble = self.world.violations.get(peer.name, "")
        wrong = [number for number, content in self.contents.items() if answers.get(number) != content]
        return f"the neighbour's answers {wrong} are wrong: {trouble} {answers}" if trouble or wrong else ""


class Program:
    """A recording, ready to be broken."""

    def __init__(self, recording: Recording, world: World) -> None:
        self.name = recording.name
        self.storages = recording.storages
        self.segments = world.model(recording.storages)
        self.frames = [frame[3:] for frame in recording.frames]
        keys = mutating.Keys()
        for frame in recording.frames:
            keys.define(frame[3][1])
        self.templates = [mutating.Template(frame, keys) for frame in recording.frames]
        self.idle: list[Peer] = []


def weigh(programs: list[Program]) -> None:
    """So that what is seldom is broken about as often as what is frequent."""
    chances: defaultdict[str, float] = defaultdict(
        float
    )  # by kind: that a frame which has it is chosen, times a constant
    for program in programs:
        count = len(program.templates)
        for index, template in enumerate(program.templates):
            chance = ((index + 1) / count) ** (1 / EARLY) - (index / count) ** (1 / EARLY)
            for kind in template.spots:
                chances[kind] += chance
    weights = {kind: (0.5 if kind in mutating.HEADER else 1.0) / chance for kind, chance in chances.items()}
    for program in programs:
        for template in program.templates:
            template.weigh(weights)


@dataclass
class Episode:
    """One lease of a victim."""

    number: int
    rng: random.Random
    program: Program
    peer: Peer
    fresh: bool
    broken: list[tuple[bytes, list[str], bool]] = field(default_factory=list)  # frame, kinds, whether past the gate

    def send(self) -> None:
        rng, program, peer = self.rng, self.program, self.peer
        peer.lease()
        if not self.fresh:
            peer.say([[], []], [wire.FORGET_DEFS])
        first = int(len(program.frames) * rng.random() ** EARLY)
        for definitions, commands in program.frames[:first]:
            peer.say(definitions, commands)
        for template in program.templates[first : first + rng.choice((1, 1, 1, 2))]:
            if rng.random() < 0.05:
                template = rng.choice(program.templates)  # out of order
            data, kinds = template.mutate(peer.header, rng)
            self.broken.append((data, kinds, peer.push(data)))
        peer.say([[], []], [wire.END, 1, rng.choices(ENDS, (5, 3, 2))[0]])

    def __str__(self) -> str:
        sent = []
        for data, _, _ in self.broken:
            try:
                sent.append(_SHORT.repr(msgpack.unpackb(data, strict_map_key=False)))
            except Exception:  # that may have been the point
                sent.append(repr(data[:200]))
        return f"episode {self.number}, {self.program.name}: {' then '.join(sent)}"


class Fuzz:
    """Episodes against one world. After a death there is another world, and the next episode."""

    def __init__(self, seed: int, environment: dict[str, str] | None = None) -> None:
        self.seed = seed
        self.recordings = record_all()
        self.environment = environment
        self.result = Result()
        self._world: World | None = None

    @property
    def world(self) -> World:
        if self._world is None:
            self._world = world = World(self.environment)
            self.programs = [Program(recording, world) for recording in self.recordings]
            self.neighbour = Neighbour(world, self.programs)
            weigh(self.programs)
        return self._world

    def close(self) -> int:
        world, self._world = self._world, None
        return world.close() if world is not None else 0

    def batch(self, numbers: Iterable[int]) -> None:
        """These episodes, and a look at the neighbour."""
        world, result = self.world, self.result
        episodes = [self._episode(number) for number in numbers]
        try:
            waiting = episodes[::-1]  # what was attached last can run when all others have an endpoint
            for episode in waiting:
                episode.send()
                if episode is waiting[0]:
                    world.wait(lambda: episode.peer.serial in world.awake or episode.peer.ended)  # noqa: B023
            self.neighbour.ask()
            peers = [self.neighbour.peer, *(episode.peer for episode in waiting)]
            world.wait(lambda: all(peer.ended for peer in peers))
            while waiting:
                self._judge(waiting[0])
                del waiting[0]
            result.looks += 1
            result.wrong += [f"seed {self.seed}, {episodes[0].number} and on: said {text}" for text in world.nonsense]
            world.nonsense.clear()
            if trouble := self.neighbour.look():
                result.wrong.append(f"seed {self.seed}, episodes {episodes[0].number} and on: {trouble}")
        except (ExecutorDied, ExecutorHung) as error:
            if isinstance(error, ExecutorHung):
                world.process.kill()
            self.close()
            if len(episodes) > 1:
                for episode in waiting:
                    self.batch([episode.number])
                if result.deaths or result.hung:
                    return
            troubles = result.deaths if isinstance(error, ExecutorDied) else result.hung
            troubles.append("\n".join([f"seed {self.seed}", *map(str, episodes), str(error)]))

    def _episode(self, number: int) -> Episode:
        rng = random.Random(f"{self.seed}:{number}")
        program = rng.choice(self.programs)
        while program.idle:
            peer = program.idle.pop()
            if peer.name not in self.world.violations:
                return Episode(number, rng, program, peer, fresh=False)
            peer.close()
        return Episode(number, rng, program, self.world.instance(program.segments), fresh=True)

    def _judge(self, episode: Episode) -> None:
        """Its lease is over."""
        world, result, peer = self.world, self.result, episode.peer
        outcome = world.forget(peer)
        text = world.violations.get(peer.name, "")
        # Of two frames the first may have ended it: then nobody has looked at the second.
        for _, kinds, passed in episode.broken[: 1 if text else None]:
            result.frames += 1
            result.kinds.update(kinds)
            result.past_gate += passed
            result.outcomes["violation" if text else outcome] += 1
        result.episodes += 1
        if " raised " in text:
            result.escaped[text] += 1
        if text or outcome != "ended" or world.models[peer.name][0] > 1:
            peer.close()
        else:
            episode.program.idle.append(peer)

    def reopen_ms(self, times: int = 50) -> float:
        """Median time from an instance's death until another of its kind has had a lease."""
        world, taken_s = self.world, []
        for _ in range(times):
            began_s = time.perf_counter()
            peer = world.instance(self.programs[0].segments)
            peer.lease()
            peer.say([[], []], [wire.END, 1, 0])
            world.wait(lambda: peer.ended)  # noqa: B023
            taken_s.append(time.perf_counter() - began_s)
            world.forget(peer)
            peer.close()
        return 1000 * sorted(taken_s)[times // 2]


def run(
    frames: int,
    seed: int,
    environment: dict[str, str] | None = None,
    stop_early: bool = False,
    progress: Callable[[Result], None] = lambda result: None,
) -> Result:
    """At least so many broken frames; with ``stop_early`` until something is noticed."""
    fuzz = Fuzz(seed, environment)
    result, number = fuzz.result, 0
    try:
        while result.frames < frames and not (stop_early and not result.sound):
            fuzz.batch(range(number, number + BATCH))
            number += BATCH
            progress(result)
            if len(result.deaths) + len(result.hung) >= MAX_TROUBLES:
                break
        if result.sound:
            result.reopen_ms = fuzz.reopen_ms()
    finally:
        fuzz.close()
    return result


def rare_kinds(result: Result) -> dict[str, int]:
    """What was broken too seldom."""
    return {kind: count for kind, count in sorted(result.kinds.items()) if count < AT_LEAST}


class Progress:
    """A line on stderr now and then."""

    def __init__(self, frames: int, seed: int) -> None:
        self.frames, self.seed = frames, seed
        self.began_s = self.told_s = time.monotonic()

    def __call__(self, result: Result) -> None:
        now_s = time.monotonic()
        if now_s - self.told_s < PROGRESS_S:
            return
        self.told_s = now_s
        rate = result.frames / (now_s - self.began_s)
        troubles = len(result.deaths) + len(result.hung) + len(result.wrong) + sum(result.escaped.values())
        print(
            f"seed {self.seed}: {result.frames:,} of {self.frames:,} frames, {rate:,.0f}/s, {troubles} troubles",
            file=sys.stderr,
            flush=True,
        )


def run_all(frames: int, seed: int, jobs: int) -> Result:
    """``jobs`` runs beside each other, of the seeds from ``seed`` on, with so many frames together."""
    each = -(-frames // jobs)
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        started = [pool.submit(run, each, k, progress=Progress(each, k)) for k in range(seed, seed + jobs)]
        return reduce(Result.__add__, [job.result() for job in started])


def main() -> None:
    parser = arguments("Broken frames against a real executor with a healthy neighbour.")
    parser.add_argument("--frames", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="executors beside each other, each with a seed of its own")
    parser.add_argument("--only", type=int, help="run this episode alone")
    args = parser.parse_args()
    if args.only is not None:
        fuzz = Fuzz(args.seed)
        fuzz.batch([args.only])
        fuzz.close()
        print(fuzz.result)
        return
    began_s = time.perf_counter()
    frames = 2_000 if args.quick else args.frames
    result = run_all(frames, args.seed, args.jobs)
    seconds = time.perf_counter() - began_s
    for kind, count in sorted(result.kinds.items()):
        print(f"{count:9,}  {kind}")
    for problem in (*result.deaths, *result.hung, *result.wrong):
        print(problem)
    for text, count in result.escaped.most_common():
        print(f"{count:9,}  {text}")
    goals = [
        Goal(name="executors that died", goal="0", measured=len(result.deaths), met=not result.deaths),
        Goal(name="frames that did not end", goal="0", measured=len(result.hung), met=not result.hung),
        Goal(name="wrong answers of the neighbour", goal="0", measured=len(result.wrong), met=not result.wrong),
        Goal(
            name="share of the frames past the gate",
            goal=">= 0.5",
            measured=round(result.past_gate / result.frames, 3),
            met=result.past_gate >= result.frames / 2,
        ),
        Goal(
            name="kinds broken less than 100 times",
            goal="0",
            measured=len(rare_kinds(result)),
            met=not rare_kinds(result) or result.frames < 20_000,
        ),
        Goal(
            name="median time to open an endpoint anew, ms",
            goal="<= 5",
            measured=round(result.reopen_ms, 2),
            met=0 < result.reopen_ms <= 5,
        ),
    ]
    extra = {
        "frames": result.frames,
        "seed": args.seed,
        "jobs": args.jobs,
        "frames_per_s": round(result.frames / seconds, 1),
        "episodes": result.episodes,
        "looks_at_the_neighbour": result.looks,
        "outcomes": dict(result.outcomes),
        "escaped": sum(result.escaped.values()),
    }
    report(goals, args, extra)


if __name__ == "__main__":
    main()
