"""Parses and checks embedding requests of OpenAI's interface; anything not understood is refused by name. Pure."""

from typing import Any, Final

import msgspec

from dormouse.client_shim.llm.requests import RefusedRequest

MAX_TEXTS: Final = 2048
"""OpenAI's own limit."""


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """``user`` has no effect, as elsewhere."""

    input: str | list[Any]
    model: str = ""
    encoding_format: str | None = "float"
    dimensions: int | None = None
    user: str | None = None

    def inputs(self) -> list[str | list[int]]:
        """Its texts, or their tokens. Raises RefusedRequest."""
        given = self.input
        if isinstance(given, str) or (given and all(type(each) is int for each in given)):
            given = [given]
        if not given:
            raise RefusedRequest("there is no text", "input")
        if len(given) > MAX_TEXTS:
            raise RefusedRequest(f"{len(given)} texts; send at most {MAX_TEXTS} at once", "input")
        for each in given:
            tokens = isinstance(each, list) and each and all(type(token) is int for token in each)
            if not tokens and not (isinstance(each, str) and each):
                raise RefusedRequest(
                    "input is a text, a list of texts, tokens, or a list of tokens; none empty", "input"
                )
        return given


def parse_embedding(body: Any) -> EmbeddingRequest:
    """Of a decoded body. Raises RefusedRequest."""
    if isinstance(body, dict) and (unknown := sorted(body.keys() - set(EmbeddingRequest.__struct_fields__))):
        text = f"{unknown[0][:80]} is not supported by this model's node"
        raise RefusedRequest(text, unknown[0], "unsupported_parameter")
    try:
        request = msgspec.convert(body, EmbeddingRequest)
    except msgspec.ValidationError as error:
        text = str(error)
        param = text.rpartition("`$.")[2].rstrip("`").partition("[")[0] if "`$." in text else ""
        raise RefusedRequest(f"the request cannot be read: {text}", param) from error
    if request.encoding_format not in (None, "float", "base64"):
        raise RefusedRequest(
            f"encoding_format is {request.encoding_format!r}; write float or base64", "encoding_format"
        )
    return request
