"""Times of a language model's steps: pure. Owns the formula, and its sum over equal steps in a row.

    step = fixed + per_sequence * B + per_context * sum of contexts + per_prompt * (prompt tokens that are not free)

A few tokens are free: they are computed while the weights are read, which takes longer. The sequences' own are the
first of these, so that prompts have the others.
B sequences get one token each, and each looks back at its context. While nobody joins and nobody ends, B stays and
the sum grows by B with each step: so the time of k steps is a polynomial of k, and nothing has to be done for each.
"""

from math import sqrt

import msgspec

ROUNDING_S = 1e-12
"""Of sums of times: so much too early is not early."""


def prompt_tokens(prompt: int, sequences: int, free: int) -> int:
    """Of so many tokens of prompts those that take time, in a step that also makes one for each of the sequences."""
    return max(0, prompt - max(0, free - sequences))


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """The coefficients, in seconds; all are at least 0, and one is more. ``benchmarks/llm_fit.py`` finds them."""

    fixed_s: float
    per_sequence_s: float = 0.0
    per_context_s: float = 0.0
    per_prompt_s: float = 0.0
    free_tokens: int = 0

    def step_s(self, sequences: int, context: int, prompt: int) -> float:
        prompt_s = self.per_prompt_s * prompt_tokens(prompt, sequences, self.free_tokens) if prompt else 0.0
        # added in this order: rotation.py adds the first two once, and comes to the same bits
        return self.fixed_s + self.per_sequence_s * sequences + self.per_context_s * context + prompt_s

    def prompts_s(self, tokens: int, step_tokens: int) -> float:
        """Of so many tokens of prompts and nothing else, in as few steps as can be."""
        whole, rest = divmod(tokens, step_tokens)
        return whole * self.step_s(0, 0, step_tokens) + (self.step_s(0, 0, rest) if rest else 0.0)

    def steps(self, count: int, sequences: int, context: int, prompt: int, growing: int) -> "EqualSteps":
        """``count`` steps in a row, of which the first has this ``context``; each has ``growing`` more of it than the
        one before.
        """
        return EqualSteps(count, self.step_s(sequences, context, prompt), self.per_context_s * growing)

    def stream_s(self, prompt: int, output: int, step_tokens: int) -> float:
        """A stream from its first step to its last token, alone."""
        prefill_s = self.prompts_s(prompt, step_tokens)
        return prefill_s + self.steps(output - 1, 1, prompt + 1, 0, 1).seconds(output - 1)


class EqualSteps(msgspec.Struct, frozen=True, gc=False):
    """``count`` steps: the first takes ``first_s``, each ``more_s`` longer than the one before."""

    count: int
    first_s: float
    more_s: float

    def seconds(self, count: int) -> float:
        """Of the first so many."""
        return count * self.first_s + self.more_s * (count * (count - 1) / 2)

    def done(self, seconds: float) -> int:
        """Whole steps after so long."""
        if seconds <= 0.0:
            return 0
        linear = self.first_s - self.more_s / 2
        root = sqrt(linear * linear + 2 * self.more_s * seconds)
        found = int(2 * seconds / (linear + root)) if linear + root > 0.0 else self.count  # stable where more_s is 0
        while found and self.seconds(found) > seconds + ROUNDING_S:
            found -= 1
        while found < self.count and self.seconds(found + 1) <= seconds + ROUNDING_S:
            found += 1
        return min(found, self.count)

    def until(self, seconds: float) -> int:
        """EqualSteps until the next boundary after so long: the one that is under way is done, too."""
        done = self.done(seconds)
        return done if done and self.seconds(done) >= seconds - ROUNDING_S else min(done + 1, self.count)
