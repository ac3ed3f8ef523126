"""The next steps of a simulated runtime: the rules of decisions/batches/batch.py, for many equal steps at once. Pure.

A step takes one token of every sequence that has its prompt behind it, then prompt tokens up to a budget: of those that
have begun, oldest first, then of others (core/decisions/rules/joins.py).
When memory for KV is short, the youngest sequence is preempted. Changes from step to step are counted, not made: a
sequence that gets a token with each step is a number of steps until its end. So work is done for joins, the ends of
prompts, and the ends of streams, and none for a token. Equal beginnings of prompts are not known here.
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Final

from dormouse.controller.simulator.streams.cost import EqualSteps, StepCost
from dormouse.controller.simulator.streams.learning import StepsLearned
from dormouse.controller.simulator.streams.stream import DECODING, OVER, PREFILL, WAITING, Advanced, Stream
from dormouse.core.decisions.rules.joins import IN_TURN, JoinQueue

BLOCK_TOKENS: Final = 16
STEP_TOKENS: Final = 256
STEP_SEQUENCES: Final = 128
"""As real runtimes have them (gpuserver/runtime): a test compares."""

Grow = Callable[[int, bool], bool]
"""Asks for so many blocks; gently: nobody is to leave for them. If it is true, they were added to ``blocks``."""


class StreamBatch:
    """The sequences of one runtime, ``count`` with those that wait, in ``blocks`` blocks of memory. `plan`, then
    `advance`.
    """

    def __init__(
        self, cost: StepCost, block_tokens: int = BLOCK_TOKENS, step_tokens: int = STEP_TOKENS,
        sequences: int = STEP_SEQUENCES, closed: bool = False, learned: StepsLearned | None = None,
    ) -> None:  # fmt: skip
        self.count = self.blocks = self._used = 0
        self._learned, self.brief = learned, False  # functions wait for the GPU, or are likely to
        self.waiting: JoinQueue[Stream] = JoinQueue()
        self._run: defaultdict[int, int] = defaultdict(int)  # by function, sequences that have begun
        self._cost, self._size, self._budget, self._most = cost, block_tokens, step_tokens, sequences
        self._closed, self._admits = closed, 0  # who of those that wait belong to the batch
        self._prefilling: list[Stream] = []  # as they began
        self._decoding: dict[int, Stream] = {}  # by number
        self._ends: list[tuple[int, int, Stream]] = []  # a heap, by step; of preempted ones, too
        self._step = 0
        self._context = 0  # tokens that those which decode look at in the next step
        # how many of those which decode have (computed - step) mod block_tokens up to each
        self._phases = [0] * block_tokens
        self._takes: list[tuple[Stream, int]] = []  # of the plan: prompt tokens, in each step
        self._singles: list[Stream] = []  # of the plan: the last token of a prompt, which waits for no budget
        self._spare = 0  # of the plan: prompt tokens that it could still take
        self._paced = False  # in the plan: how many there are, depends on what steps have taken
        self.prompt_tokens = self.sequences = 0  # of the plan: prompt tokens, and sequences that get one

    @property
    def begins(self) -> list[Stream]:
        """Those that have no token yet."""
        if not (self._prefilling or self.waiting.count):
            return []
        return [stream for stream in (*self._prefilling, *self.waiting) if stream.tokens == stream.prompt]

    @property
    def has_prompts(self) -> bool:
        return bool(self._prefilling or self.waiting.count)

    @property
    def running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def one_needs(self) -> int:
        """Blocks of the oldest sequence, until its end."""
        streams = [*self._prefilling, *self._decoding.values()] or list(self.waiting)[:1]
        return self._of(min(streams, key=lambda each: each.number).limit) if streams else 0

    @property
    def most_needed(self) -> int:
        """Blocks that its next step can need beside those that it has, at most."""
        pieces = self._of(self._budget) + len(self.waiting) if self.has_prompts else 0
        return max(0, self.running + pieces - (self.blocks - self._used))

    @property
    def takes_more(self) -> bool:
        """Whether one that joins now would be in the next step."""
        return self._spare > 0 and not self.waiting and self.running < self._most and not self._closed

    def add(self, stream: Stream, latest_s: float = IN_TURN) -> None:
        """It has to begin then at latest, to be in time."""
        self.count += 1
        self.waiting.add(stream, latest_s)

    def remove_first(self, now_s: float = 0.0) -> Stream:
        """The one that comes next: it never fits."""
        first = self._next(now_s)
        self.waiting.remove(first)
        self.count -= 1
        return first

    def drop(self, stream: Stream) -> None:
        """It goes on elsewhere, and has no token yet."""
        assert stream.state in (WAITING, PREFILL), "it decodes"
        if stream.state == PREFILL:
            self._preempt(stream)
            self._admits -= 1
        self.waiting.remove(stream)
        self.count -= 1

    def _next(self, now_s: float) -> Stream:
        first = self.waiting.next(now_s, self._run)
        assert first is not None
        return first

    # --- blocks

    def _of(self, tokens: int) -> int:
        return -(-tokens // self._size)

    def _decoding_needs(self, steps: int) -> int:
        """Blocks that those which decode need for so many steps more: each one for every ``block_tokens`` steps, and
        one more if what is left of its last block is less than the rest of them.
        """
        rounds, rest = steps // self._size, steps % self._size
        last, phases = -self._step % self._size, self._phases
        rounds += rest > last  # phases are a circle
        return rounds * len(self._decoding) + phases[last] - phases[last - rest]

    def _in_phase(self, at: int, more: int) -> None:
        """So many more of those which decode are."""
        at %= self._size
        self._phases[at:] = [each + more for each in self._phases[at:]]

    def _needs(self, steps: int) -> int:
        """Blocks that the plan needs for so many."""
        found = self._decoding_needs(steps)
        if not (self._takes or self._singles):
            return found
        for stream, tokens in self._takes:
            found += self._of(stream.computed + tokens * steps) - self._of(stream.computed)
        for stream in self._singles:
            found += self._of(stream.computed + 1) - self._of(stream.computed)
        return found

    def _room(self, more: int, grow: Grow) -> bool:
        """Whether there is room for a step of the plan and so many blocks."""
        short = self._needs(1) + more - (self.blocks - self._used)
        return short <= 0 or grow(short, False)

    # --- steps

    def plan(self, grow: Grow, now_s: float = 0.0) -> EqualSteps | None:
        """As many steps as are equal but for their contexts; None if nothing can be computed."""
        self._takes, self._singles = [], []
        if self._prefilling:
            self._singles = [each for each in self._prefilling if each.left == 1]
        while not self._room(0, grow):
            if self._preempt_youngest() is None:
                return None
        budget, going_on = self._budget, bool(self._decoding or self._singles)
        self._paced = self.brief and self._learned is not None
        if self._learned is not None and self.brief:
            budget = self._learned.pieces(budget)
        for stream in list(self._prefilling):
            if budget and stream.left > 1 and stream.state == PREFILL:
                tokens = self._take(stream, self._share(stream, budget, going_on), grow)
                if not self.running:
                    return None
                budget -= tokens
        running = self.running
        if not self._closed or not running:
            waits, places = self.waiting.count, self._most - running
            self._admits = waits if waits < places else places
        while budget and self._admits:
            stream = self._next(now_s)
            tokens = self._share(stream, budget, going_on)
            if not self._room(self._of(tokens), grow):
                break  # nobody is preempted for one that has not begun
            self.waiting.begins(stream, now_s)
            self._run[stream.owner] += 1
            self._admits -= 1
            stream.state = PREFILL
            self._prefilling.append(stream)
            self._takes.append((stream, tokens))
            budget -= tokens
        if not (self._decoding or self._prefilling):
            return None
        self._spare = budget
        return self._steps(self._equal(grow))

    def _share(self, stream: Stream, budget: int, going_on: bool) -> int:
        """Of its prompt in a step: as in core/decisions/batches/batch.py."""
        if self._learned is not None and going_on and stream.tokens > self._budget:
            budget, self._paced = self._learned.pieces(budget), True
        return min(budget, stream.left)

    def _take(self, stream: Stream, tokens: int, grow: Grow) -> int:
        """Of a prompt that has begun; younger sequences are preempted for it, at last itself."""
        while not self._room(self._of(stream.computed + tokens) - self._of(stream.computed), grow):
            youngest = self._preempt_youngest()
            if youngest is None or youngest is stream:
                return 0
        self._takes.append((stream, tokens))
        return tokens

    def _equal(self, grow: Grow) -> int:
        """How many steps are like the next one: until somebody ends, a prompt does, or memory does."""
        if self._singles or len(self._takes) > 1:
            return 1
        count = self._first_end() - self._step
        if self._takes:
            stream, tokens = self._takes[0]
            if tokens < self._budget or self._paced:
                return 1
            count = min(count, stream.left // tokens)
        if count == 1:
            return 1
        short = self._needs(count) - (self.blocks - self._used)
        if short <= 0 or grow(short, True):
            return count
        fits, more = 1, count  # the first was made room for
        while more - fits > 1:
            middle = (fits + more) // 2
            if self._needs(middle) <= self.blocks - self._used:
                fits = middle
            else:
                more = middle
        return fits

    def alike(self) -> int:
        """How many steps are like the next one, if all sequences decode; else 0."""
        if self.waiting.count or self._prefilling or not self._decoding:
            return 0
        return self._first_end() - self._step

    def short(self, steps: int) -> int:
        """Blocks that are missing for so many steps in which all sequences decode; at most 0 if none are."""
        return self._decoding_needs(steps) - (self.blocks - self._used)

    def growing(self) -> tuple[float, float, int, int]:
        """Of steps in which all sequences decode: what one takes without their contexts and for each token of these,
        how many tokens of contexts the next one has, and how many more each further one: one for each sequence.
        """
        cost, count = self._cost, len(self._decoding)
        return cost.fixed_s + cost.per_sequence_s * count, cost.per_context_s, self._context, count

    def _first_end(self) -> int:
        """The step in which the next one that decodes has its last token."""
        ends = self._ends
        while ends:
            end, _, stream = ends[0]
            if stream.state == DECODING and stream.end == end:
                return end
            heappop(ends)  # it was preempted
        return 1 << 60

    def _steps(self, count: int) -> EqualSteps:
        decoding, context, prompt = len(self._decoding), self._context, 0
        for stream in self._singles:
            context += stream.computed + 1
        for _, tokens in self._takes:
            prompt += tokens
        self.prompt_tokens, self.sequences = prompt, decoding + len(self._singles)
        return self._cost.steps(count, self.sequences, context, prompt, decoding)

    def advance(self, steps: int) -> Advanced:
        """So many steps of the plan are done."""
        first: list[Stream] = []
        over: list[Stream] = []
        self._used += self._needs(steps)
        self._step += steps
        self._context += len(self._decoding) * steps
        ends = self._ends
        while ends and ends[0][0] <= self._step:
            end, _, stream = heappop(ends)
            if stream.state == DECODING and stream.end == end:
                self._stop(stream)
                self._release(stream, OVER)
                over.append(stream)
        takes = [*[(single, 1) for single in self._singles], *self._takes] if self._singles else self._takes
        for stream, tokens in takes:
            stream.computed += tokens * steps
            if stream.left:
                continue
            if stream.tokens == stream.prompt:
                first.append(stream)
            stream.tokens += 1
            self._prefilling.remove(stream)
            if stream.tokens >= stream.limit:
                self._release(stream, OVER)
                over.append(stream)
            else:
                self._decode(stream)
        self._takes, self._singles = [], []
        return Advanced(first, over)

    def _decode(self, stream: Stream) -> None:
        stream.state, stream.since, stream.end = DECODING, self._step, self._step + stream.limit - stream.tokens
        self._decoding[stream.number] = stream
        self._context += stream.computed + 1
        self._in_phase(stream.computed - self._step, 1)
        heappush(self._ends, (stream.end, stream.number, stream))

    def _stop(self, stream: Stream) -> None:
        """It does not decode any more: its tokens are known again."""
        self._in_phase(stream.computed - stream.since, -1)
        done = self._step - stream.since
        stream.computed += done
        stream.tokens += done
        self._context -= stream.computed + 1
        del self._decoding[stream.number]

    def _release(self, stream: Stream, state: int) -> None:
        self._used -= self._of(stream.computed)
        self._run[stream.owner] -= 1
        self.count -= state == OVER
        stream.state, stream.computed = state, 0

    # --- memory is short

    def _preempt_youngest(self) -> Stream | None:
        """None: it was the only one, so it never fits."""
        youngest = max([*self._prefilling, *self._decoding.values()], key=lambda stream: stream.number)
        self._preempt(youngest)
        return youngest if self.running else None

    def _preempt(self, stream: Stream) -> None:
        """It is the first to begin again, with all of its tokens."""
        if stream.state == DECODING:
            self._stop(stream)
        else:
            self._prefilling.remove(stream)
            self._takes = [take for take in self._takes if take[0] is not stream]
            self._singles = [single for single in self._singles if single is not stream]
        self._release(stream, WAITING)
        self._admits += 1
        stream.preempted += 1
        self.waiting.again(stream)

    def give_up(self, counts: bool = True) -> list[Stream]:
        """All memory is gone. All sequences; those that had begun will begin again, which ``counts`` as preempted."""
        for stream in sorted([*self._prefilling, *self._decoding.values()], key=lambda each: -each.number):
            self._preempt(stream)
            stream.preempted -= not counts
        self.blocks = 0
        return list(self.waiting)

    def check(self) -> None:
        """Assert that the state is consistent."""
        running = [*self._prefilling, *self._decoding.values()]
        done = [self._step - each.since if each.state == DECODING else 0 for each in running]
        used = sum(self._of(each.computed + more) for each, more in zip(running, done, strict=True))
        assert used == self._used <= self.blocks
        decoding = self._decoding.values()
        assert self._context == sum(each.computed + self._step - each.since + 1 for each in decoding)
        assert self._phases[-1] == len(self._decoding)
        assert self.count == len(running) + len(self.waiting)
        assert +Counter(self._run) == Counter(each.owner for each in running)
        assert all(not each.computed and each.state == WAITING for each in self.waiting)
