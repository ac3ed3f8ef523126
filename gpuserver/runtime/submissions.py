"""Puts together and checks the sequences that an instance asks its runtime for."""

from dormouse.core.decisions.batches.batch import Sequence
from dormouse.gpuserver.runtime.engine import Generation
from dormouse.gpuserver.runtime.sampling import Sampling
from dormouse.schemas import messages as m
from dormouse.schemas.llm import MAX_LOGPROBS


class Submissions:
    """Tokens of sequences whose Submit is not whole."""

    def __init__(self) -> None:
        self._parts: dict[int, list[int]] = {}

    def whole(self, submit: m.Submit) -> list[int] | None:
        """All tokens, if this was the last part."""
        tokens = self._parts.pop(submit.number, [])
        tokens += submit.tokens
        if submit.more:
            self._parts[submit.number] = tokens
            return None
        return tokens

    def forget(self, number: int) -> None:
        self._parts.pop(number, None)


def generation_of(number: int, submit: m.Submit, tokens: list[int], vocabulary: int) -> Generation | None:
    """Of the engine's number; None if it cannot be computed."""
    if not tokens or min(tokens) < 0 or max(tokens) >= vocabulary or submit.limit <= len(tokens):
        return None
    if submit.logprobs > MAX_LOGPROBS:  # a whole vocabulary with each token would be megabytes a step
        return None
    sampling = Sampling(
        temperature=submit.temperature,
        top_p=submit.top_p,
        top_k=submit.top_k,
        min_p=submit.min_p,
        presence_penalty=submit.presence_penalty,
        frequency_penalty=submit.frequency_penalty,
        repetition_penalty=submit.repetition_penalty,
        bias={token: bias for token, bias in submit.bias if 0 <= token < vocabulary},
        seed=submit.seed,
        logprobs=submit.logprobs,
    )
    sequence = Sequence(number, tokens, submit.prompt, submit.limit, waited_s=submit.waited_us / 1e6)
    return Generation(sequence, sampling, frozenset(submit.stops), submit.masked)
