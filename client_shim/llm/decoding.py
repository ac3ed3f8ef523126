"""Decodes tokens to text one by one: the joined parts equal the tokenizer's text of all tokens at once.

The text that a token adds depends on the tokenizer's decoder, which is of one of these kinds::

    bytes    ByteLevel: tokens are bytes, text is UTF-8                      held: the bytes of half a character
    pieces   Metaspace, ByteFallback, Strip and others, each token for       held: a run of byte tokens, of which one
             itself; the first one may lose a blank                          that is no UTF-8 spoils all
    whole    anything else, also tokenizers without a decoder in Rust        held: all, until the end

Pure, but for the tokenizer's library.
"""

import codecs
import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, Protocol

BYTE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""Tokens that ByteFallback takes for a byte."""

_ANCHOR: Final = "a"
"""A token that is its own text, before others that are not the first ones of a text."""

_WORD_END: Final = re.compile(r"(?<=\w) ")

_EACH: Final = frozenset(("Replace", "ByteFallback", "Metaspace", "WordPiece", "Strip"))
"""Decoders that look at each token alone, or at a run of bytes."""


class UnreadableTokens(Exception):
    """The tokenizer fails to make text of them."""


class Pieces(Protocol):
    """The text of one sequence of tokens, by their names."""

    def put(self, names: list[str], last: bool) -> str:
        """The text that is certain now; with ``last`` all of it."""

    def bytes_of(self, name: str) -> bytes:
        """The bytes that this token would add next."""


class _Bytes:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def put(self, names: list[str], last: bool) -> str:
        return self._decoder.decode(b"".join(map(self.bytes_of, names)), last)

    def bytes_of(self, name: str) -> bytes:
        try:
            return bytes(map(_BYTES.__getitem__, name))
        except KeyError:  # an added token with other characters
            return name.encode()


class _Pieces:
    def __init__(self, decode: Callable[[list[str]], str], runs: bool) -> None:
        self._decode, self._runs = decode, runs
        self._start: list[str] = []  # as long as there is no text, all before `_open`; then _ANCHOR
        self._open: list[str] = []  # bytes, of which more may come

    def put(self, names: list[str], last: bool) -> str:
        end = len(names)
        while end and not last and self._is_byte(names[end - 1]):
            end -= 1
        if not end and not last:
            self._open += names
            return ""
        closed, self._open = self._open + names[:end], names[end:]
        text = self._after_start(closed)
        if text:
            self._start = [_ANCHOR]
        elif self._start != [_ANCHOR]:
            self._start += closed
        return text

    def bytes_of(self, name: str) -> bytes:
        if self._is_byte(name):
            return bytes([int(name[3:5], 16)])
        return (self._after_start([name]) if not self._open else self._decode([_ANCHOR, name])[1:]).encode()

    def _after_start(self, names: list[str]) -> str:
        text = self._decode(self._start + names)
        return text[1:] if self._start == [_ANCHOR] else text

    def _is_byte(self, name: str) -> bool:
        return self._runs and BYTE.fullmatch(name) is not None


class _Whole:
    def __init__(self, decode: Callable[[list[str]], str]) -> None:
        self._decode, self._names, self._given = decode, list[str](), 0

    def put(self, names: list[str], last: bool) -> str:
        self._names += names
        if not last:
            return ""
        text = self._decode(self._names) if self._names else ""  # some decoders panic for nothing
        given, self._given = text[self._given :], len(text)
        return given

    def bytes_of(self, name: str) -> bytes:
        return self._decode([name]).encode()


class _Cleaned:
    """Without blanks before signs, as some tokenizers want all of their text. Neither such a blank nor the sign that it
    goes with is on both sides of a blank that follows a letter.
    """

    def __init__(self, pieces: Pieces, clean: Callable[[str], str]) -> None:
        self._pieces, self._clean, self._text = pieces, clean, ""
        self.bytes_of = pieces.bytes_of

    def put(self, names: list[str], last: bool) -> str:
        self._text += self._pieces.put(names, last)
        end = len(self._text) if last else max((found.start() for found in _WORD_END.finditer(self._text)), default=0)
        given, self._text = self._text[:end], self._text[end:]
        return self._clean(given)


class TextOfTokens:
    """The text of one sequence. ``shown``: special tokens that it has none the less. All raise UnreadableTokens."""

    def __init__(self, decoding: "Decoding", pieces: Pieces, shown: Collection[int]) -> None:
        self._decoding, self._pieces, self._shown = decoding, pieces, shown

    def put(self, tokens: Sequence[int], last: bool = False) -> str:
        """The text that is certain now; with ``last``, all of it."""
        with _readable():
            names = [self._decoding.name(token) for token in tokens if not self.hides(token)]
            return self._pieces.put([name for name in names if name is not None], last)

    def hides(self, token: int) -> bool:
        return token not in self._shown and self._decoding.name(token) in self._decoding.special

    def told(self, token: int) -> tuple[str, bytes | None]:
        """A token that might come next: its name, and the bytes that it would add to the text, if it is text."""
        with _readable():
            name = self._decoding.name(token)
            return name or "", None if name is None or self.hides(token) else self._pieces.bytes_of(name)


class Decoding:
    """Of one tokenizer, of `transformers`. ``special``: by their names, the tokens that it leaves out of texts."""

    def __init__(self, tokenizer: Any) -> None:
        self._clean = _clean_of(tokenizer)
        if not tokenizer.is_fast:
            self._name: Callable[[int], str | None] = tokenizer.convert_ids_to_tokens
            self._decode: Callable[[list[str]], str] = tokenizer.convert_tokens_to_string
            self.special = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
            self._made: Callable[[], Pieces] = partial(_Whole, self._decode)
            return
        backend = tokenizer.backend_tokenizer
        self._name = backend.id_to_token
        self._decode = " ".join if backend.decoder is None else backend.decoder.decode
        added = backend.get_added_tokens_decoder().items()
        self.special = {known.content: token for token, known in added if known.special}
        self._made = self._kind(_stages(backend.decoder))

    def _kind(self, stages: list[dict[str, Any]]) -> Callable[[], Pieces]:
        kinds = [stage["type"] for stage in stages]
        if kinds[:1] == ["ByteLevel"] and set(kinds[1:]) <= {"Fuse"}:
            return _Bytes
        each = kinds.index("Fuse") if "Fuse" in kinds else len(kinds)
        begins = all(stage["type"] == "Strip" and not stage["stop"] for stage in stages[each + 1 :])
        if begins and set(kinds[:each]) <= _EACH and self._decode([_ANCHOR]) == _ANCHOR:
            return partial(_Pieces, self._decode, "ByteFallback" in kinds)
        return partial(_Whole, self._decode)

    def text(self, shown: Collection[int] = ()) -> TextOfTokens:
        pieces = self._made()
        return TextOfTokens(self, pieces if self._clean is None else _Cleaned(pieces, self._clean), shown)

    def name(self, token: int) -> str | None:
        return self._name(token)


def _stages(decoder: Any) -> list[dict[str, Any]]:
    """The decoder's stages, in order."""

    def flat(stage: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if stage["type"] == "Sequence":
            for each in stage["decoders"]:
                yield from flat(each)
        else:
            yield stage

    return [] if decoder is None else list(flat(json.loads(decoder.__getstate__())))


def _clean_of(tokenizer: Any) -> Callable[[str], str] | None:
    """As `transformers` does it: not for BPE, whose blanks are those of the text, unless it is told to."""
    if not tokenizer.clean_up_tokenization_spaces:
        return None
    bpe = tokenizer.is_fast and type(tokenizer.backend_tokenizer.model).__name__ == "BPE"
    if bpe and not getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False):
        return None
    clean: Callable[[str], str] = tokenizer.clean_up_tokenization
    return clean


def of_library(error: BaseException) -> bool:
    """Of Python, or a panic of a library in Rust, which is no Exception and can be recognized by its name only."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


@contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        if not of_library(error):
            raise
        raise UnreadableTokens(f"the model's tokenizer fails for an answer's tokens: {error}") from error


def _byte_level() -> dict[str, int]:
    """The characters that stand for bytes in a byte-level vocabulary: printable ones for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


_BYTES: Final = _byte_level()
