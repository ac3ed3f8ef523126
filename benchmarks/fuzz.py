"""Broken frames of real programs against a real executor, beside a neighbour whose answers are checked.

    python -m benchmarks.fuzz --frames 1000000

An *episode* is one lease: valid frames of a recording up to a point, then broken ones until the instance is ended or
the recording is. Episode N of a seed is always the same: `--only N` runs it alone, which is how a death is looked at.
"""

import random
import reprlib
import struct
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

import msgpack

from benchmarks import fuzz_mutate as mutating
from benchmarks.fuzz_record import Recording, record_all
from benchmarks.fuzz_world import ExecutorDied, ExecutorHung, Peer, World
from benchmarks.report import Goal, arguments, report
from dormouse.gpuserver.gate import Malformed, read_header
from dormouse.schemas import stream as wire

NEIGHBOUR_EVERY: Final = 25
"""Episodes between two looks at the neighbour."""

KEPT_REOPENS: Final = 100_000
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
OWN: Final = 1
"""The neighbour's own storage; those that it shares with victims follow."""

_CONTENT: Final = struct.pack("64f", *range(64))


_SHORT: Final = reprlib.Repr()
_SHORT.maxlist = _SHORT.maxlevel = 200
FORGET: Final = bytes(msgpack.packb([0, 0, 0, [[], []], [wire.FORGET_DEFS]]))


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
    reopened_s: list[float] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        return not (self.deaths or self.hung or self.wrong or self.escaped)


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

    def look(self) -> str:
        """What is wrong with its answers, if anything."""
        peer = self.peer
        peer.wake()
        sizes = sorted({len(content) for content in self.contents.values()})
        metas: list[Any] = [0, _F32]
        for number, size in enumerate(sizes, 1):
            metas += [number, ["uint8", [size], [1], 0, 0]]
        commands: list[Any] = [0, OWN, 2.0, 9000, 0, 9000, 0.5, 9001, wire.DOWNLOAD, OWN, 9001, 0, -1]
        for number, content in self.contents.items():
            if number != OWN:
                commands += [wire.DOWNLOAD, number, number, 1 + sizes.index(len(content)), -1]
        peer.send(commands, *([], []) if self.told else (metas, [0, _DOUBLE]))
        self.told = True
        answers = {reply[1]: reply[2] for reply in peer.replies if reply[0] == wire.VALUE}
        trouble = self.world.violations.get(peer.name, "")
        peer.end()
        wrong = [number for number, content in self.contents.items() if answers.get(number) != content]
        return f"the neighbour's answers {wrong} are wrong: {trouble} {answers}" if trouble or wrong else ""


class Program:
    """A recording, ready to be broken."""

    def __init__(self, recording: Recording, world: World) -> None:
        self.name = recording.name
        self.storages = recording.storages
        self.segments = world.model(recording.storages)
        self.frames = [bytes(msgpack.packb(frame)) for frame in recording.frames]
        self.keys: list[mutating.Keys] = []
        known = mutating.Keys()
        for frame in recording.frames:
            known.define(frame[3][1])
            self.keys.append(known)


def weights(programs: list[Program]) -> dict[str, float]:
    """So that what is seldom is broken about as often as what is frequent."""
    counts: Counter[str] = Counter()
    for program in programs:
        for frame, keys in zip(program.frames, program.keys, strict=True):
            counts.update({spot.kind for spot in mutating.spots(msgpack.unpackb(frame), keys)})
    return {kind: (0.5 if kind in mutating.HEADER else 1.0) / count for kind, count in counts.items()}


class Fuzz:
    """Episodes against one world. After a death there is another world, and the next episode."""

    def __init__(self, seed: int, environment: dict[str, str] | None = None) -> None:
        self.seed = seed
        self.recordings = record_all()
        self.environment = environment
        self.result = Result()
        self.world: World | None = None

    def _open(self) -> None:
        self.world = world = World(self.environment)
        self.programs = [Program(recording, world) for recording in self.recordings]
        self.neighbour = Neighbour(world, self.programs)
        self.weights = weights(self.programs)
        self.victims: dict[str, Peer] = {}  # by program

    def close(self) -> int:
        return self.world.close() if self.world is not None else 0

    def episode(self, number: int, frames: int = sys.maxsize) -> None:
        """One lease of a victim; at most so many broken frames."""
        if self.world is None:
            self._open()
        assert self.world is not None
        result = self.result
        result.episodes += 1
        rng = random.Random(f"{self.seed}:{number}")
        program = rng.choice(self.programs)
        try:
            self._episode(rng, program, frames)
            if result.episodes % NEIGHBOUR_EVERY == 0:
                result.looks += 1
                if trouble := self.neighbour.look():
                    result.wrong.append(f"episode {number}: {trouble}")
        except ExecutorDied as error:
            result.deaths.append(self._where(number, program, error))
            self._lost()
        except ExecutorHung as error:
            result.hung.append(self._where(number, program, error))
            self.world.process.kill()
            self._lost()

    def _where(self, number: int, program: Program, error: Exception) -> str:
        assert self.world is not None
        try:
            sent = _SHORT.repr(msgpack.unpackb(self.world.sent, strict_map_key=False))
        except Exception:  # that may have been the point
            sent = repr(self.world.sent[:200])
        return f"episode {number} of seed {self.seed}, frame {self.result.frames}, {program.name}: {sent}\n{error}"

    def _lost(self) -> None:
        self.close()
        self.world = None

    def _episode(self, rng: random.Random, program: Program, limit: int) -> None:
        world, result = self.world, self.result
        assert world is not None
        began_s = time.perf_counter()
        peer = self.victims.get(program.name)
        if peer is None:
            peer = self.victims[program.name] = world.instance(program.segments)
            peer.wake()
            if len(result.reopened_s) < KEPT_REOPENS:
                result.reopened_s.append(time.perf_counter() - began_s)
        else:
            peer.wake()
            peer.play([self._addressed(FORGET, peer, 1)])
        first = int(len(program.frames) * rng.random() ** 2)
        before = [self._addressed(frame, peer, index + 1) for index, frame in enumerate(program.frames[:first])]
        peer.play(before)
        for index, frame in enumerate(program.frames[first:], first):
            if peer.ended or limit <= 0:
                break
            if rng.random() < 0.05:
                frame = rng.choice(program.frames)  # out of order
            data, kinds = mutating.mutate(self._addressed(frame, peer, 1), program.keys[index], self.weights, rng)
            result.frames += 1
            limit -= 1
            result.kinds.update(kinds)
            result.past_gate += _passes(data, peer)
            outcome = peer.exchange(data)
            result.outcomes[outcome] += 1
            if outcome in ("refused", "over"):
                break
        version, _ = world.models[peer.name]
        if peer.name not in world.violations:
            peer.end()
        text = world.violations.get(peer.name, "")
        if " raised " in text:
            result.escaped[text] += 1
        if text or version > 1 or (peer.serial in world.done and world.done[peer.serial].outcome != "ended"):
            peer.close()
            del self.victims[program.name]
            world.violations.pop(peer.name, None)

    @staticmethod
    def _addressed(frame: bytes, peer: Peer, ahead: int) -> bytes:
        """For the peer's lease, as the frame so many after the last."""
        fields = msgpack.unpackb(frame)
        fields[:3] = [peer.serial, peer.secret, peer.number + ahead]
        return bytes(msgpack.packb(fields))


def _passes(data: bytes, peer: Peer) -> bool:
    """Whether the gate lets it through to the interpreter."""
    try:
        header = read_header(data)
    except Malformed:
        return False
    passing = (header.serial, header.secret, header.number) == (peer.serial, peer.secret, peer.number + 1)
    return passing and len(data) <= wire.MAX_FRAME_NBYTES


def run(frames: int, seed: int, environment: dict[str, str] | None = None, stop_early: bool = False) -> Result:
    """So many broken frames; with ``stop_early`` until something is noticed."""
    fuzz = Fuzz(seed, environment)
    result, number = fuzz.result, 0
    try:
        while result.frames < frames and not (stop_early and not result.sound):
            fuzz.episode(number, frames - result.frames)
            number += 1
    finally:
        fuzz.close()
    return result


def rare_kinds(result: Result) -> dict[str, int]:
    """What was broken too seldom."""
    return {kind: count for kind, count in sorted(result.kinds.items()) if count < AT_LEAST}


def main() -> None:
    parser = arguments("Broken frames against a real executor with a healthy neighbour.")
    parser.add_argument("--frames", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="run this episode alone")
    args = parser.parse_args()
    if args.only is not None:
        fuzz = Fuzz(args.seed)
        fuzz.episode(args.only)
        fuzz.close()
        print(fuzz.result)
        return
    began_s = time.perf_counter()
    result = run(2_000 if args.quick else args.frames, args.seed)
    seconds = time.perf_counter() - began_s
    reopened_ms = sorted(1000 * value for value in result.reopened_s)
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
            measured=round(reopened_ms[len(reopened_ms) // 2], 2),
            met=reopened_ms[len(reopened_ms) // 2] <= 5,
        ),
    ]
    extra = {
        "frames": result.frames,
        "seed": args.seed,
        "frames_per_s": round(result.frames / seconds, 1),
        "episodes": result.episodes,
        "looks_at_the_neighbour": result.looks,
        "outcomes": dict(result.outcomes),
        "escaped": sum(result.escaped.values()),
    }
    report(goals, args, extra)


if __name__ == "__main__":
    main()
