"""A model's words: its tokenizer, its template, the tokens that end an answer. Runs in the sandbox."""

import os
from collections.abc import Sequence
from os.path import join
from typing import Any, Final

from dormouse.client_shim.llm.decoding import Decoding, of_library
from dormouse.client_shim.llm.firstbytes import mistaken
from dormouse.client_shim.llm.folder import BadFolder, first_bytes, read_any, read_json
from dormouse.client_shim.llm.gguf_file import gguf_ends
from dormouse.client_shim.llm.grammar import Grammars
from dormouse.client_shim.llm.requests import RefusedRequest
from dormouse.client_shim.llm.sampling import FILE, read_sampling
from dormouse.client_shim.llm.template import ChatTemplate
from dormouse.client_shim.llm.text import TextStream
from dormouse.client_shim.llm.tools import ToolFormat
from dormouse.schemas.llm import DecoderSpec, DefaultSampling

MAX_TOKENIZER_NBYTES: Final = 256 << 20
"""Ten times as many as the largest has."""

_FILES: Final = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "spiece.model"),
    *("sentencepiece.bpe.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.json", "chat_template.jinja"),
)

GGUF_ENDS: Final = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>"),
    *("<EOT>", "_<EOT>", "[EOT]", "<end_of_utterance>"),
)
"""Names of tokens that llama.cpp takes for ends in any file: converters have not always named them."""


def tokenizer_of(folder: str, vocabulary: int, gguf: str = "") -> Any:
    """``gguf``: the file that it is in. Raises BadFolder."""
    from transformers import AutoTokenizer

    where: dict[str, Any] = {"gguf_file": gguf} if gguf else {}
    names = [] if gguf else [name for name in _FILES if os.path.isfile(join(folder, name))]
    for name in names:  # some readers take any text for a few tokens
        if what := mistaken(*first_bytes(folder, name)):
            raise BadFolder(f"{name} {what}")
    try:
        found: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True, **where)
        found.encode("a")
    except BaseException as error:  # untrusted files may make it raise anything
        if not of_library(error):
            raise
        raise BadFolder(f"the folder has no tokenizer that can be used: {_broken(folder, names) or error}") from error
    # Of a GGUF file transformers adds tokens that a family is used to have; a text with such tokens is refused.
    if (found.vocab_size if gguf else len(found)) > vocabulary:
        text = f"the tokenizer has {len(found):,} tokens, the model {vocabulary:,}"
        raise BadFolder(f"{text}: these are files of two models")
    return found


def _broken(folder: str, names: Sequence[str]) -> str:
    """The file that is no JSON, and why; "" if all are."""
    try:
        for name in names:
            if name.endswith(".json"):
                read_any(folder, name, MAX_TOKENIZER_NBYTES)
    except BadFolder as error:
        return str(error)
    return ""


class Words:
    """Tokenizer and template; ``gguf``: the file that they are in; ``samples``: whether the folder's sampling is the
    default. Raises BadFolder.
    """

    def __init__(self, folder: str, spec: DecoderSpec, gguf: str = "", samples: bool = True) -> None:
        self._tokenizer, self._vocabulary = tokenizer_of(folder, spec.vocabulary, gguf), spec.vocabulary
        self.template = ChatTemplate(self._tokenizer)
        self._decoding = Decoding(self._tokenizer)
        self.special = self._decoding.special  # tokens that are no text, by their names
        self.ends = self._ends(folder, gguf)
        self.sampling = read_sampling(folder, gguf) if samples else DefaultSampling()
        self.grammars = Grammars(self._tokenizer, spec.vocabulary, self.ends)

    def _ends(self, folder: str, gguf: str) -> list[int]:
        """Tokens that end an answer, by all that the folder's files say."""
        names = [name for name in (FILE, "config.json") if os.path.exists(join(folder, name))]
        said = [read_json(folder, name).get("eos_token_id") for name in names]
        if gguf:
            said += gguf_ends(folder, gguf)
            known = self._tokenizer.get_vocab()
            said += [known.get(name) for name in GGUF_ENDS]
        said += [getattr(self._tokenizer, f"{end}_token_id", None) for end in ("eos", "eot", "eom")]
        tokens = [token for each in said for token in (each if isinstance(each, list) else [each])]
        return sorted({token for token in tokens if type(token) is int and 0 <= token < self._vocabulary})

    def tool_format(self) -> ToolFormat:
        """The form of its tool calls. Raises RefusedRequest if it has none, or no known one."""
        form = self.template.tool_format
        if form is None:
            text = "this model's chat template has no tools, or calls them in no form that is known: leave tools out"
            raise RefusedRequest(text, "tools", "unsupported_parameter")
        return form

    def chat(
        self, messages: Sequence[dict[str, Any]], add_prompt: bool, tools: list[dict[str, Any]] | None = None
    ) -> list[int]:
        """Raises RefusedRequest if the template cannot be used for these."""
        return self.encode(self.template.text(messages, add_prompt, tools), special=False)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Raises RefusedRequest."""
        found = encoded(self._tokenizer, text, "messages", special)
        if found and max(found) >= self._vocabulary:
            token = self._decoding.name(max(found))
            raise RefusedRequest(f"the text has {token!r}, which is no token of this model", "messages")
        return found

    def text(self, form: ToolFormat | None, stops: Sequence[str]) -> TextStream:
        """Of one answer. Tokens around calls are shown, even where they are no text."""
        marks = [] if form is None else form.marks
        return TextStream(self._decoding, stops, [self.special[mark] for mark in marks if mark in self.special])


def encoded(tokenizer: Any, text: str, field: str, special: bool = True) -> list[int]:
    """Raises RefusedRequest, which names the field."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RefusedRequest(f"the text is not Unicode: {error.reason}", field) from error
    try:
        found: list[int] = tokenizer.encode(text, add_special_tokens=special)
    except BaseException as error:
        if not of_library(error):
            raise
        raise RefusedRequest(f"the model's tokenizer fails for this text: {error}", field) from error
    return found
