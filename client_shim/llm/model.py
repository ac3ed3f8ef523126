"""A model's words: its tokenizer, its template, the tokens that end an answer. Runs in the sandbox."""

import os
import signal
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, Final

from dormouse.client_shim.llm.folder import BadFolder, read_json
from dormouse.client_shim.llm.grammar import Grammars
from dormouse.client_shim.llm.messages import templated
from dormouse.client_shim.llm.requests import RefusedRequest
from dormouse.client_shim.llm.text import WINDOW, UnreadableTokens
from dormouse.client_shim.llm.tools import ToolFormat, format_of
from dormouse.schemas.llm import DecoderSpec

TEMPLATE_S: Final = 2.0
TEMPLATE_CHARS: Final = 8 << 20


def tokenizer_of(folder: str, vocabulary: int, gguf: str = "") -> Any:
    """``gguf``: the file that it is in. Raises BadFolder."""
    from transformers import AutoTokenizer

    where: dict[str, Any] = {"gguf_file": gguf} if gguf else {}
    try:
        found: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True, **where)
        found.encode("a")
    except BaseException as error:  # whatever a stranger's files make it raise
        if not _of_library(error):
            raise
        raise BadFolder(f"the folder has no tokenizer that can be used: {error}") from error
    # Of a GGUF file transformers adds tokens that a family is used to have; what a text has of them is refused.
    if (found.vocab_size if gguf else len(found)) > vocabulary:
        text = f"the tokenizer has {len(found):,} tokens, the model {vocabulary:,}"
        raise BadFolder(f"{text}: these are files of two models")
    return found


class Words:
    """Tokenizer and template; ``gguf``: the file that they are in. Raises BadFolder."""

    def __init__(self, folder: str, spec: DecoderSpec, gguf: str = "") -> None:
        self._tokenizer, self._vocabulary = tokenizer_of(folder, spec.vocabulary, gguf), spec.vocabulary
        tokenizer = self._tokenizer
        plain = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
        self._decode: Callable[..., str] = tokenizer.backend_tokenizer.decode if tokenizer.is_fast else plain
        self.window = 0 if _bytewise(tokenizer) else WINDOW  # of TextStream
        self.ends = self._ends(folder)
        self.grammars = Grammars(self._tokenizer, spec.vocabulary, self.ends)
        special = zip(self._tokenizer.all_special_tokens, self._tokenizer.all_special_ids, strict=True)
        self.special: dict[str, int] = dict(special)  # tokens that are no text, by their names
        self._special_ids = frozenset(self.special.values())

    def _ends(self, folder: str) -> list[int]:
        """Tokens that end an answer, by the folder's files."""
        found: set[int] = set()
        names = [
            name for name in ("generation_config.json", "config.json") if os.path.exists(os.path.join(folder, name))
        ]
        said = [read_json(folder, name).get("eos_token_id") for name in names]
        for each in (*said, self._tokenizer.eos_token_id):
            found.update(token for token in (each if isinstance(each, list) else [each]) if isinstance(token, int))
        return sorted(found)

    def tool_format(self) -> ToolFormat:
        """How it calls tools. Raises RefusedRequest if it does not, or in no known form."""
        template = self._tokenizer.chat_template or ""
        texts = template.values() if isinstance(template, dict) else [template]
        form = next((found for text in texts if (found := format_of(str(text))) is not None), None)
        if form is None:
            text = "this model's chat template has no tools, or calls them in no form that is known: leave tools out"
            raise RefusedRequest(text, "tools", "unsupported_parameter")
        return form

    def chat(
        self, messages: Sequence[dict[str, Any]], add_prompt: bool, tools: list[dict[str, Any]] | None = None
    ) -> list[int]:
        """Raises RefusedRequest if the template cannot be used for these."""
        if not self._tokenizer.chat_template:
            raise RefusedRequest("this model has no chat template: use completions", "messages")
        plain = [templated(message) for message in messages]
        try:
            with _time_limit(TEMPLATE_S):
                text = self._tokenizer.apply_chat_template(
                    plain, tools=tools, tokenize=False, add_generation_prompt=add_prompt
                )
        except _TookTooLongError as error:
            raise RefusedRequest(f"the model's chat template took more than {TEMPLATE_S:g} s", "messages") from error
        except Exception as error:  # a template may raise anything
            raise RefusedRequest(f"the model's chat template refuses these messages: {error}", "messages") from error
        if len(text) > TEMPLATE_CHARS:
            raise RefusedRequest("the model's chat template makes too much text of these messages", "messages")
        return self.encode(text, special=False)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Raises RefusedRequest."""
        found = encoded(self._tokenizer, text, "messages", special)
        if found and max(found) >= self._vocabulary:
            token = self.token_text(max(found))
            raise RefusedRequest(f"the text has {token!r}, which is no token of this model", "messages")
        return found

    def decode(self, tokens: Sequence[int]) -> str:
        """Raises UnreadableTokens."""
        return self._text_of(list(tokens), skip_special=True)

    def decode_with(self, marks: Collection[int], tokens: Sequence[int]) -> str:
        """The same, but with these special tokens. Raises UnreadableTokens."""
        shown = [token for token in tokens if token in marks or token not in self._special_ids]
        return self._text_of(shown, skip_special=False)

    def token_text(self, token: int) -> str:
        """Raises UnreadableTokens."""
        return self._text_of([token], skip_special=False)

    def _text_of(self, tokens: list[int], skip_special: bool) -> str:
        try:
            return self._decode(tokens, skip_special_tokens=skip_special)
        except BaseException as error:
            if not _of_library(error):
                raise
            raise UnreadableTokens(f"the model's tokenizer fails for an answer's tokens: {error}") from error


def encoded(tokenizer: Any, text: str, field: str, special: bool = True) -> list[int]:
    """Raises RefusedRequest, which names the field."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RefusedRequest(f"the text is not Unicode: {error.reason}", field) from error
    try:
        found: list[int] = tokenizer.encode(text, add_special_tokens=special)
    except BaseException as error:
        if not _of_library(error):
            raise
        raise RefusedRequest(f"the model's tokenizer fails for this text: {error}", field) from error
    return found


def _bytewise(tokenizer: Any) -> bool:
    """Whether a token's text is its bytes, whatever is before it."""
    from tokenizers.decoders import ByteLevel

    return tokenizer.is_fast and isinstance(tokenizer.backend_tokenizer.decoder, ByteLevel)


def _of_library(error: BaseException) -> bool:
    """Of Python, or a panic of a library in Rust, which is no Exception and can be told by its name only."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


class _TookTooLongError(Exception):
    pass


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    def expired(number: int, frame: FrameType | None) -> None:
        raise _TookTooLongError

    before = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
