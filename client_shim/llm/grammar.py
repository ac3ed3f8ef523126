"""Answers that keep to a grammar: which tokens may come next. The grammar and its library stay in the sandbox.

What a schema may cost is bounded by the library's fuel, and by a time limit on top: a compilation that takes longer
goes on in its thread, without a say, and while ``MOST_LOST`` of those run no further schema is taken.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final

from dormouse.client_shim.llm.requests import RefusedRequest

COMPILE_S: Final = 3.0
MOST_LOST: Final = 2

KEPT: Final = 16
"""Grammars that are kept compiled: clients send the same schema again and again."""

REASON_CHARS: Final = 500

VOCABULARY: Final = 480_000
"""The largest whose masks fit the packets in which they travel."""


class BrokenGrammar(Exception):
    """It cannot go on: the text says why."""


class Grammar:
    """Where one answer is in its grammar."""

    def __init__(self, matcher: Any, mask_nbytes: int) -> None:
        self._matcher, self._mask_nbytes = matcher, mask_nbytes

    def fresh(self) -> "Grammar":
        """Another answer's, at its beginning."""
        return Grammar(self._matcher.deep_copy(), self._mask_nbytes)

    @property
    def complete(self) -> bool:
        """Whether nothing can follow. Raises BrokenGrammar."""
        stopped: bool = self._matcher.is_stopped()
        self._check()
        return stopped

    def mask(self) -> bytes:
        """A bit for each token that may come next, of those of the model's vocabulary. Raises BrokenGrammar."""
        bits: bytes = self._matcher.compute_bitmask()
        self._check()
        return bits[: self._mask_nbytes]

    def take(self, token: int) -> None:
        """The token that has come. Raises BrokenGrammar."""
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise BrokenGrammar(_reason(str(self._matcher.get_error())))


def _reason(text: str) -> str:
    """What the library says, without the grammar that it shows below."""
    text = text.partition("\n   1 |")[0].replace("<non-verbose/>", "")
    return (text.rpartition("failed to compile JSON schema: ")[2] or text).strip()[:REASON_CHARS]


class Grammars:
    """Compiles them for one tokenizer, a model's with ``vocabulary`` tokens. ``ends``: tokens that end an answer."""

    def __init__(self, tokenizer: Any, vocabulary: int, ends: Sequence[int]) -> None:
        self._tokenizer, self._vocabulary, self._ends = tokenizer, vocabulary, list(ends)
        self._words: Any = None  # built with the first grammar: it takes about a second for a large vocabulary
        self._kept: OrderedDict[str, Grammar] = OrderedDict()
        self._lost: list[threading.Thread] = []

    def compiled(self, text: str, param: str) -> Grammar:
        """Of a grammar in the library's dialect of Lark. Raises RefusedRequest, which names ``param``."""
        if (known := self._kept.get(text)) is not None:
            self._kept.move_to_end(text)
            return known.fresh()
        self._lost = [thread for thread in self._lost if thread.is_alive()]
        if len(self._lost) >= MOST_LOST:
            raise RefusedRequest("schemas that take too long are being given up: send it again later", param)
        found: list[Grammar | Exception] = []
        thread = threading.Thread(target=self._compile, args=(text, found), daemon=True)
        thread.start()
        thread.join(COMPILE_S)
        if thread.is_alive():
            self._lost.append(thread)
            raise RefusedRequest(f"the schema took more than {COMPILE_S:g} s: make it simpler", param)
        grammar = found[0]
        if isinstance(grammar, BrokenGrammar):
            raise RefusedRequest(f"the schema cannot be used: {grammar}", param) from grammar
        if isinstance(grammar, Exception):
            raise grammar
        self._kept[text] = grammar
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return grammar.fresh()

    def _compile(self, text: str, found: list[Grammar | Exception]) -> None:
        try:
            found.append(self._made(text))
        except Exception as error:  # the outermost frame of this thread; who waits raises it
            found.append(error)

    def _made(self, text: str) -> Grammar:
        """Raises BrokenGrammar."""
        words = self._library_words()
        import llguidance

        limits = llguidance.LLParserLimits(verbose_errors=False)
        matcher = llguidance.LLMatcher(words, text, limits=limits, log_level=0)
        grammar = Grammar(matcher, -(-self._vocabulary // 8))
        grammar.fresh().mask()  # some that were compiled cannot begin
        return grammar

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
