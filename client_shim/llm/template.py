"""A model's chat template, and the form in which it wants the content of messages, probed at deploy.

A template is shown a message of each role, its content as a text and as a list of parts, which is how those of models
that also see pictures want it. The first form that shows in its output is used. Runs in the sandbox.
"""

import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final, Literal

from dormouse.client_shim.llm.folder import BadFolder
from dormouse.client_shim.llm.messages import role_of, templated
from dormouse.client_shim.llm.requests import RefusedRequest
from dormouse.client_shim.llm.tools import ToolFormat, format_of

TEMPLATE_S: Final = 2.0
TEMPLATE_CHARS: Final = 8 << 20

Form = Literal["text", "parts", "none"]

_MARK: Final = "dormouse7content"
_USER: Final = {"role": "user", "content": "hello"}
_CALLS: Final = [{"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]
_TOOLS: Final = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}]
_AROUND: Final[dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]]] = {
    "user": ([], []),
    "system": ([], [_USER]),
    "assistant": ([_USER], [_USER]),
    "tool": ([_USER, {"role": "assistant", "content": None, "tool_calls": _CALLS}], []),
}
"""The messages before and after one of a role, where a template wants them."""


class ChatTemplate:
    """Of one tokenizer. ``forms``: by role, the form that was found; none for a role for which the template raises.
    Raises BadFolder for a template that cannot be read, and for one that does not show users' messages.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        given = tokenizer.chat_template or ""
        self._texts = [str(text) for text in (given.values() if isinstance(given, dict) else [given]) if text]
        self.forms: dict[str, Form] = {}
        self._with_tools: dict[str, Form] = {}
        if self._texts:
            self.forms = self._probed(None)
            self._with_tools = self._probed(_TOOLS) if isinstance(given, dict) else self.forms

    @property
    def tool_format(self) -> ToolFormat | None:
        return next((found for text in self._texts if (found := format_of(text)) is not None), None)

    def text(self, messages: Sequence[dict[str, Any]], add_prompt: bool, tools: list[dict[str, Any]] | None) -> str:
        """Raises RefusedRequest."""
        if not self._texts:
            raise RefusedRequest("this model has no chat template: use completions", "messages")
        forms = self.forms if tools is None else self._with_tools
        made = []
        for message in messages:
            form = forms.get(role_of(message), forms.get("user", "text"))
            said = templated(message, form == "parts", self._named)
            if form == "none" and said["content"]:
                text = f"the model's chat template leaves out what messages of role {said['role']!r} say"
                raise RefusedRequest(text, "messages", "unsupported_parameter")
            made.append(said)
        text = self._made(made, add_prompt, tools)
        printed = [said for said in made if isinstance(said["content"], list) and str(said["content"]) in text]
        if any(said["content"] for said in printed):  # parts are wanted of other messages of its role only
            for said in printed:
                said["content"] = "".join(part["text"] for part in said["content"])
            text = self._made(made, add_prompt, tools)
        return text

    def _named(self, word: str) -> bool:
        return any(re.search(rf"\b{re.escape(word)}\b", text) for text in self._texts)

    def _made(self, messages: list[dict[str, Any]], add_prompt: bool, tools: list[dict[str, Any]] | None) -> str:
        try:
            with _time_limit(TEMPLATE_S):
                text: str = self._tokenizer.apply_chat_template(
                    messages, tools=tools, tokenize=False, add_generation_prompt=add_prompt
                )
        except _TookTooLongError as error:
            raise RefusedRequest(f"the model's chat template took more than {TEMPLATE_S:g} s", "messages") from error
        except Exception as error:  # a template may raise anything
            raise RefusedRequest(f"the model's chat template refuses these messages: {error}", "messages") from error
        if len(text) > TEMPLATE_CHARS:
            raise RefusedRequest("the model's chat template makes too much text of these messages", "messages")
        return text

    def _probed(self, tools: list[dict[str, Any]] | None) -> dict[str, Form]:
        """Raises BadFolder."""
        forms: dict[str, Form] = {}
        for role in _AROUND:
            form, slow = self._form(role, forms.get("user") == "parts", tools)
            if slow:
                break  # each request gets the error
            if form is not None:
                forms[role] = form
        if forms.get("user") == "none":
            text = "its chat template leaves out what users say, be it a text or a list of parts"
            raise BadFolder(f"{text}: mend it in tokenizer_config.json or chat_template.jinja, or remove it")
        return forms

    def _form(self, role: str, parts_around: bool, tools: list[dict[str, Any]] | None) -> tuple[Form | None, bool]:
        """None if the template raises; and whether it takes too long. Raises BadFolder."""
        before, after = _AROUND[role]
        around = [[templated(each, parts_around, self._named) for each in some] for some in (before, after)]
        form: Form | None = "none"
        for each in ("text", "parts"):
            probe = templated(
                {"role": role, "content": _MARK, "tool_call_id": "abcdefghi"}, each == "parts", self._named
            )
            try:
                text = self._made([*around[0], probe, *around[1]], True, tools)
            except RefusedRequest as error:
                if isinstance(error.__cause__, _TookTooLongError):
                    return None, True
                _check_syntax(error.__cause__)
                form = None
            else:
                if _MARK in text.casefold():
                    return ("parts" if each == "parts" else "text"), False
        return form, False


def _check_syntax(error: BaseException | None) -> None:
    """Raises BadFolder."""
    from jinja2 import TemplateSyntaxError

    if isinstance(error, TemplateSyntaxError):
        text = f"its chat template cannot be read: line {error.lineno}: {error.message}"
        raise BadFolder(f"{text}; mend it in tokenizer_config.json or chat_template.jinja, or remove it") from error


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
