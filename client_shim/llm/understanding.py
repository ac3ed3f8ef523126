"""Translates a request of OpenAI's interface for one model: prompt in tokens, limits, form of the answer."""

import os
from collections.abc import Iterator

from dormouse.client_shim.llm import requests as r
from dormouse.client_shim.llm.answers import Choice, OpenAiAnswer
from dormouse.client_shim.llm.grammar import Wanted
from dormouse.client_shim.llm.model import Words
from dormouse.client_shim.llm.open_requests import OpenChoice, OpenRequest
from dormouse.client_shim.llm.responses import PARAMS, ResponsesAnswer, ResponsesRequest, as_chat
from dormouse.client_shim.llm.sampling import chosen
from dormouse.client_shim.llm.tool_calls import ToolCallStream
from dormouse.client_shim.llm.tools import ToolFormat, ToolUse, grammar_of, tool_use
from dormouse.schemas import messages as m
from dormouse.schemas.llm import DecoderSpec


class Understanding:
    """Of requests for one model, which is called ``name``. ``numbers`` are those of its sequences."""

    def __init__(self, name: str, spec: DecoderSpec, words: Words, numbers: Iterator[int]) -> None:
        self._name, self._spec, self._words, self._numbers = name, spec, words, numbers

    def opened(self, run: m.Run) -> OpenRequest:
        """Raises RefusedRequest."""
        body = bytes(run.body or b"")
        if run.route == "responses":
            return self._of_responses(run.request, body)
        kind: r.Kind = "chat" if run.route == "chat" or (not run.route and b'"messages"' in body) else "completions"
        asked = r.parse(kind, body)
        answer = OpenAiAnswer(
            kind=kind,
            id=f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{os.urandom(12).hex()}",
            model=asked.model or self._name,
            wants_logprobs=r.logprobs_of(asked) >= 0,
        )
        return self._opened(run.request, asked, answer)

    def _of_responses(self, number: int, body: bytes) -> OpenRequest:
        """Raises RefusedRequest, which names fields as they are called there."""
        given = r.read(ResponsesRequest, body)
        try:
            asked = as_chat(given)
            r.check(asked)
            sampling = chosen(self._words.sampling, asked)
            # The answer reports them.
            given.temperature, given.top_p = sampling.temperature, sampling.top_p
            given.max_output_tokens = given.max_output_tokens or sampling.max_tokens
            answer = ResponsesAnswer(id=f"resp_{os.urandom(16).hex()}", model=given.model or self._name, asked=given)
            return self._opened(number, asked, answer)
        except r.RefusedRequest as error:
            raise r.RefusedRequest(str(error), PARAMS.get(error.param, error.param), error.code) from error

    def _opened(self, number: int, asked: r.Request, answer: OpenAiAnswer | ResponsesAnswer) -> OpenRequest:
        r.check_vocabulary(asked, self._spec.vocabulary)
        use = None
        if isinstance(asked, r.ChatRequest):
            use = tool_use(asked.tools, asked.tool_choice, asked.parallel_tool_calls)
        form = self._words.tool_format() if use is not None else None
        prompt, limit = self._prompt_and_limit(asked, use)
        sampling = chosen(self._words.sampling, asked)
        request = OpenRequest(number, asked, answer, prompt, limit, r.logprobs_of(asked), sampling)
        request.parallel_calls = use is None or use.parallel
        request.wanted = self._wanted(asked, use, form)
        # A grammar makes a call, unless it may also be any JSON, or is a list of calls, of which none is apart.
        certain = request.wanted is not None and form is not None and not form.listed
        certain = certain and not (form is not None and form.bare and r.schema_of(asked) is not None)
        seed, stops = r.seed_of(asked), r.stops_of(asked)
        if request.wanted is None and not asked.ignore_eos:  # an answer with a schema is whole where that says so
            stops += sampling.stop
        for index in range(asked.n or 1):
            generation = OpenChoice(
                number=next(self._numbers),
                request=request,
                choice=Choice(index),
                seed=seed + index,
                text=self._words.text(form, stops),
                calls=None if use is None or form is None else ToolCallStream(form, use.names, certain),
            )
            request.generations.append(generation)
        return request

    def _wanted(self, asked: r.Request, use: ToolUse | None, form: ToolFormat | None) -> Wanted | None:
        """The grammar of its answers: `begun` puts it into them. Raises RefusedRequest."""
        schema, marks = r.schema_of(asked), dict[str, int]()
        if use is not None and form is not None and (use.kept or schema is not None):
            marks = self._words.grammars.marks(form.marks)
        text = grammar_of(use, form, schema, marks)
        if text is None:
            return None
        return self._words.grammars.wanted(text, "tools" if schema is None else "response_format")

    def begun(self, request: OpenRequest, now_s: float) -> bool:
        """Whether it can be answered, because its grammar is there. Raises RefusedRequest."""
        if request.wanted is not None:
            grammar = self._words.grammars.compiled(request.wanted, now_s)
            if grammar is None:
                return False
            for generation in request.generations:
                generation.grammar = grammar.fresh()
        return True

    def _prompt_and_limit(self, asked: r.Request, use: ToolUse | None) -> tuple[list[int], int]:
        """Tokens of the prompt, and how many it and the answer may have together. Raises RefusedRequest."""
        if isinstance(asked, r.ChatRequest):
            tools = None if use is None else use.given
            prompt, field = self._words.chat(asked.messages, asked.add_generation_prompt, tools), "messages"
        else:
            prompt, field = self._prompt(asked), "prompt"
        most, context = r.most_new(asked), self._spec.context
        if not prompt:
            raise r.RefusedRequest("the prompt has no tokens", field)
        if len(prompt) >= context or (most is not None and len(prompt) + most > context):
            wanted = f"{len(prompt)} tokens" + (f" and {most} to be made" if most is not None else "")
            raise r.RefusedRequest(
                f"the model's context is {context} tokens; the prompt has {wanted}", field, "context_length_exceeded"
            )
        if most is None:
            most = min(context - len(prompt), self._words.sampling.max_tokens or context)
        return prompt, len(prompt) + most

    def _prompt(self, asked: r.CompletionRequest) -> list[int]:
        prompt = asked.prompt
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            if len(prompt) > 1:
                raise r.RefusedRequest("one prompt at a time", "prompt", "unsupported_parameter")
            prompt = prompt[0]
        if isinstance(prompt, str):
            return self._words.encode(prompt)
        if any(type(token) is not int or not 0 <= token < self._spec.vocabulary for token in prompt):
            text = f"a prompt is text, or tokens from 0 to {self._spec.vocabulary - 1}"
            raise r.RefusedRequest(text, "prompt")
        return list(prompt)
