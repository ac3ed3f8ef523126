"""Grammars of answers: they decide which tokens may come next. The grammar and its library stay in the sandbox.

The library's fuel and a time limit bound the cost of a schema. Workers compile grammars and compute masks while other
answers go on. Work over the time limit is given up: it goes on in its thread, and its result is ignored.
"""

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from dormouse.client_shim.llm.requests import RefusedRequest
from dormouse.client_shim.llm.workers import Work, Workers

COMPILE_S: Final = 3.0
COMPILERS: Final = 2

MASKS_S: Final = 3.0
"""For the slow masks of one answer, together: as for the compilation, which has the first one."""

SLOW_S: Final = 0.1
"""A mask takes less than a millisecond, and a few of a large vocabulary some more."""

MASKERS: Final = 8

KEPT: Final = 16
"""Grammars that are kept compiled: clients send the same schema again and again."""

REASON_CHARS: Final = 500

VOCABULARY: Final = 480_000
"""The largest whose masks fit the packets in which they travel."""


class BrokenGrammar(Exception):
    """It cannot go on: the text says why."""


class Grammar:
    """The position of one answer in its grammar. ``bits``: one for each token that may come next, of those of the
    model's vocabulary.
    """

    def __init__(self, matcher: Any, bits: bytes) -> None:
        self._matcher, self.bits = matcher, bits
        self.complete = False
        """Nothing can follow."""

    def fresh(self) -> "Grammar":
        """Another answer's, of one at its beginning."""
        return Grammar(self._matcher.deep_copy(), self.bits)

    def take(self, token: int) -> None:
        """The token that has come. It may take long. Raises BrokenGrammar."""
        self._matcher.consume_token(token)
        _check(self._matcher)
        self.complete = self._matcher.is_stopped()
        _check(self._matcher)
        if not self.complete:
            self.bits = self._matcher.compute_bitmask()[: len(self.bits)]


def _check(matcher: Any) -> None:
    if matcher.is_error():
        raise BrokenGrammar(_reason(str(matcher.get_error())))


def _reason(text: str) -> str:
    """The library's message, without the grammar that it shows below."""
    text = text.partition("\n   1 |")[0].replace("<non-verbose/>", "")
    return (text.rpartition("failed to compile JSON schema: ")[2] or text).strip()[:REASON_CHARS]


class Wanted(NamedTuple):
    """A grammar that a request wants, in the library's dialect of Lark, for its field ``param``."""

    text: str
    param: str
    work: Work[Grammar]


class Grammars:
    """Compiles them for one tokenizer, a model's with ``vocabulary`` tokens. ``ends``: tokens that end an answer."""

    def __init__(self, tokenizer: Any, vocabulary: int, ends: Sequence[int]) -> None:
        self._tokenizer, self._vocabulary, self._ends = tokenizer, vocabulary, list(ends)
        self._words: Any = None  # built with the first grammar: it takes about a second for a large vocabulary
        self._kept: OrderedDict[str, Work[Grammar]] = OrderedDict()
        self.compilers, self.maskers = Workers(COMPILERS), Workers(MASKERS)

    def wanted(self, text: str, param: str) -> Wanted:
        """It is compiled, if it is not already."""
        work = self._kept.get(text)
        if work is None:
            work = self._kept[text] = self.compilers.give(partial(self._made, text))
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(text)
        return Wanted(text, param, work)

    def compiled(self, wanted: Wanted, now_s: float) -> Grammar | None:
        """At its beginning; None as long as it is not there yet. Raises RefusedRequest."""
        work = wanted.work
        if not work.done and now_s < work.given_s + COMPILE_S:
            return None
        try:
            if work.done:
                return work.result
        except BrokenGrammar as error:
            self.drop(wanted)
            raise RefusedRequest(f"the schema cannot be used: {error}", wanted.param) from error
        self.drop(wanted)
        if not work.begun_s:
            raise RefusedRequest("schemas that take too long are being given up: send it again later", wanted.param)
        raise RefusedRequest(f"the schema took more than {COMPILE_S:g} s: make it simpler", wanted.param)

    def drop(self, wanted: Wanted) -> None:
        """It is no good."""
        wanted.work.given_up = True
        if self._kept.get(wanted.text) is wanted.work:
            del self._kept[wanted.text]

    def _made(self, text: str) -> Grammar:
        """Raises BrokenGrammar."""
        words = self._library_words()
        import llguidance

        limits = llguidance.LLParserLimits(verbose_errors=False)
        matcher = llguidance.LLMatcher(words, text, limits=limits, log_level=0)
        _check(matcher)
        bits = b""
        for _ in range(2):  # some that were compiled cannot begin: their lexer, which all share, is broken by the first
            answer = matcher.deep_copy()
            bits = answer.compute_bitmask()
            _check(answer)
        return Grammar(matcher, bits[: -(-self._vocabulary // 8)])

    def marks(self, names: Sequence[str]) -> dict[str, int]:
        """Those that are a token which is no text to the library: some that only look so are text to the tokenizer."""
        try:
            words = self._library_words()
        except BrokenGrammar:
            return {}  # which is said when the grammar is compiled
        found = {name: self._tokenizer.convert_tokens_to_ids(name) for name in names}
        return {name: token for name, token in found.items() if token is not None and words.is_special_token(token)}

    def _library_words(self) -> Any:
        """Raises BrokenGrammar."""
        try:
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise BrokenGrammar("the node's environment lacks llguidance: pip install 'dormouse[llm]'") from error
        if self._vocabulary > VOCABULARY:
            raise BrokenGrammar(f"the model has {self._vocabulary:,} tokens; at most {VOCABULARY:,} can have a mask")
        if self._words is None:
            try:
                self._words = from_tokenizer(self._tokenizer, n_vocab=self._vocabulary, eos_token=self._ends or None)
            except ValueError as error:
                raise BrokenGrammar(f"this model's tokenizer has no form that grammars need: {error}") from error
        return self._words
