"""The schema of a function and the OpenAPI document, from what instances say, which may be anything."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import orjson
import pytest
from router_rig import Rig, spec

from dormouse.router.access.access import ANYBODY, Caller
from dormouse.router.front import openapi
from dormouse.router.front.exchange import HttpError
from dormouse.schemas import messages as m

ASKED = {"title": "Asked", "type": "object", "properties": {"image": {"type": "string", "contentEncoding": "base64"}}}
SAID = {
    "request": {"$ref": "#/$defs/Asked", "$defs": {"Asked": ASKED, "List": {"items": {"$ref": "#/$defs/Asked"}}}},
    "response": {"type": "number"},
    "description": "Looks at it.",
}


def rig(**schemas: bytes) -> Rig:
    """One function for each, loaded, with this schema."""
    found = Rig(*(spec(name, tenant=name.partition("_")[0]) for name in schemas), loads=10)
    for number, schema in enumerate(schemas.values(), 1):
        found.say(f"i{number}", m.Importing(confinement=""))
        found.say(f"i{number}", m.Loaded(version=1, nbytes=1, schema=schema))
    return found


def document(found: Rig, caller: Caller = ANYBODY) -> Any:
    return json.loads(openapi.Documents().document(found.policy.picture, caller))


def references(value: Any) -> set[str]:
    if isinstance(value, list):
        return set().union(*map(references, value))
    if not isinstance(value, dict):
        return set()
    return {value["$ref"]} if isinstance(value.get("$ref"), str) else set().union(*map(references, value.values()))


def test_two_functions_types_of_one_name_are_two_components() -> None:
    said = json.dumps(SAID).encode()
    found = document(rig(a=said, b=said))
    assert sorted(found["paths"]) == ["/functions/a/invoke", "/functions/b/invoke"]
    post = found["paths"]["/functions/a/invoke"]["post"]
    assert post["description"] == "Looks at it."
    content = post["requestBody"]["content"]
    assert content["application/json"]["schema"] == {"$ref": "#/components/schemas/a.Asked"}
    image = content["multipart/form-data"]["schema"]["properties"]["image"]
    assert image == {"type": "string", "contentMediaType": "application/octet-stream"}
    schemas = found["components"]["schemas"]
    assert sorted(schemas) == ["Error", "a.Asked", "a.List", "b.Asked", "b.List"]
    assert schemas["a.List"] == {"items": {"$ref": "#/components/schemas/a.Asked"}}
    assert {each.rpartition("/")[2] for each in references(found)} <= set(schemas)


def test_a_function_that_says_nothing_takes_anything() -> None:
    content = document(rig(a=b""))["paths"]["/functions/a/invoke"]["post"]["requestBody"]["content"]
    assert content == {"application/json": {"schema": {}}, "*/*": {"schema": {}}}


def nested(levels: int) -> bytes:
    return b'{"request": ' + b'{"a":' * levels + b"1" + b"}" * levels + b"}"


@pytest.mark.parametrize(
    "schema",
    [
        b"{",
        b"[]",
        b"\xff",
        b'{"request": 1, "response": [], "description": {}}',
        nested(100),
        nested(900),
        nested(5000),
        b'{"request": {"$defs": [1], "$ref": {}, "properties": 3}}',
        b'{"request": {"$ref": "#/$defs/Missing"}}',
        b'{"request": {"properties": {"a": 1}, "$defs": {"b": 7}}}',
        b"x" * (m.SCHEMA_NBYTES + 1),
        b'{"request": {"default": 123456789012345678901234567890}}',
        b'{"request": {"default": 1%b}}' % (b"0" * 400),
        b'{"request": {"default": "\\ud800"}}',
        b'{"request": {"default": NaN}}',
    ],
)
def test_what_a_hostile_instance_says_spoils_nothing(schema: bytes) -> None:
    found = rig(a=schema, b=json.dumps(SAID).encode())
    assert "/functions/a/invoke" in document(found)["paths"]
    assert document(found)["components"]["schemas"]["b.Asked"] == ASKED
    said = openapi.schema_of(found.policy.picture, ANYBODY, "a")
    assert json.loads(orjson.dumps(said))["name"] == "a"


def test_what_a_function_adds_is_made_once_for_each_schema() -> None:
    found = rig(a=json.dumps(SAID).encode(), b=b"")
    documents, picture = openapi.Documents(), found.policy.picture
    assert [documents.describe(picture, name) for name in ("a", "b", "gone", "a", "b")] == [
        True,
        True,
        False,
        False,
        False,
    ]
    before = documents.document(picture, ANYBODY)
    picture.functions["a"].schema = b'{"description": "Another."}'
    assert documents.describe(picture, "a")
    after = json.loads(documents.document(picture, ANYBODY))
    assert after["paths"]["/functions/a/invoke"]["post"]["description"] == "Another."
    assert sorted(after["components"]["schemas"]) == ["Error"]
    picture.functions["a"].schema = json.dumps(SAID).encode()
    assert documents.document(picture, ANYBODY) == before


def test_components_of_functions_with_dots_are_their_own() -> None:
    mine, others = ({"request": {"$ref": f"#/$defs/{key}", "$defs": {key: ASKED}}} for key in ("b.C", "C"))
    schemas = document(rig(**{"a": json.dumps(mine).encode(), "a.b": json.dumps(others).encode()}))["components"]
    assert sorted(schemas["schemas"]) == ["Error", "_a_-b.C", "a.b.C"]


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
def test_the_pages_example_of_types_that_name_each_other_is_bounded() -> None:
    """Sixty fields, each of the type itself, five deep, would be 700 million values."""
    script = Path(openapi.__file__).with_name("trypage.html").read_text().partition("<script>")[2]
    functions = "function resolved" + script.partition("function resolved")[2].partition("async function load")[0]
    said = "components = { A: { type: 'object', properties: {} } }\n"
    said += "for (let i = 0; i < 60; i++) components.A.properties['p' + i] = { $ref: '#/components/schemas/A' }\n"
    played = f"let components, room = 2000\n{functions}{said}console.log(JSON.stringify(example(components.A)))"
    ran = subprocess.run(["node", "-e", played], capture_output=True, text=True, check=True, timeout=90)
    assert 2000 < ran.stdout.count('"p') <= 2000 + 6 * 60


def test_a_caller_sees_what_it_may_call() -> None:
    found = rig(a_x=json.dumps(SAID).encode(), b_x=json.dumps(SAID).encode())
    caller = Caller("key 1", None, "", frozenset({"invoke"}), "a")
    assert list(document(found, caller)["paths"]) == ["/functions/a_x/invoke"]
    assert not any("b_x" in name for name in document(found, caller)["components"]["schemas"])
    assert openapi.schema_of(found.policy.picture, caller, "a_x")["request"] == SAID["request"]
    with pytest.raises(HttpError) as caught:
        openapi.schema_of(found.policy.picture, caller, "b_x")
    assert (caught.value.failure.status, caught.value.failure.code) == (404, "unknown_function")


def test_a_schema_is_there_once_the_function_has_loaded_and_stays() -> None:
    found = Rig(spec("f"))
    with pytest.raises(HttpError) as caught:
        openapi.schema_of(found.policy.picture, ANYBODY, "f")
    assert (caught.value.failure.status, caught.value.failure.code) == (503, "starting")
    found.say("i1", m.Importing(confinement=""))
    found.say("i1", m.Loaded(version=1, nbytes=1, schema=json.dumps(SAID).encode()))
    assert openapi.schema_of(found.policy.picture, ANYBODY, "f")["response"] == {"type": "number"}
