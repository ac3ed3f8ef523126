"""docs/language-models.md names the fields that requests may have."""

import re
from pathlib import Path

import msgspec
import pytest

from dormouse.client_shim.llm.requests import ChatRequest, CompletionRequest
from dormouse.client_shim.llm.responses import ResponsesRequest

PAGE = (Path(__file__).parents[2] / "docs" / "language-models.md").read_text()


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest, ResponsesRequest])
def test_every_field_that_is_understood_is_named(kind: type[msgspec.Struct]) -> None:
    wordless = {"model"}  # whom the request is for
    assert [
        name for name in kind.__struct_fields__ if name not in wordless and not re.search(rf"`{name}[`.]", PAGE)
    ] == []
