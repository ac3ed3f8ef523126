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


def test_texts_of_refusals_are_those_of_the_code() -> None:
    root = Path(__file__).parents[2]
    files = [*(root / "client_shim" / "llm").glob("*.py"), root / "schemas" / "rope.py"]
    code = re.sub(r'"\s+f?"', "", "".join(file.read_text() for file in files))
    table = PAGE.partition("### What a refusal says")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    said = [text for row in rows for text in re.findall("`([^`]+)`", row)]
    assert len(said) > 20
    assert [text for text in said if text not in code] == []
