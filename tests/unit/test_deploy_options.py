"""What the options of a deploy come to: who says what, what is kept, and how slips are refused."""

import dataclasses
from typing import Any

import pytest
from msgspec import structs

from dormouse.router.admin import options as o
from dormouse.router.admin.deploying import spec_of
from dormouse.schemas import options
from dormouse.schemas.errors import ConfigError
from dormouse.schemas.messages import FunctionSpec

SAID: dict[str, Any] = {
    "deadline": "50ms", "percentile": 90.0, "timeout": "5s", "load_timeout": 70_000, "tenant": "shop", "max_queue": 9,
    "quota": "2GiB", "idempotent": True, "stateless": True, "max_instances": 2, "concurrency": 3, "batch": 4,
    "batch_wait": "7ms", "env": {"MODE": "fast", "EMPTY": ""}, "requirements": "numpy\n", "allow_build": True,
    "network": True, "secrets": ["TOKEN"], "embedding": True, "convert": True, "context": 64, "dtype": "float32",
    "ttft": "1s", "tpot": 25, "isolation": "function", "eager": True, "generation_config": "none", "call": ["embed"],
}  # fmt: skip


def served(of_file: tuple[str, ...] = (), **said: Any) -> FunctionSpec:
    settled = o.settle(o.flat(said), {}, None)
    return structs.replace(spec_of("f", "f.py", settled.settings), version=7, options=settled.options, of_file=of_file)


def test_a_new_deploy_keeps_every_option() -> None:
    assert set(SAID) == set(options.KEPT), "one that is forgotten here is dropped silently"
    first = o.settle(o.flat(SAID), {}, None)
    before = structs.replace(served(), options=first.options)
    again = o.settle({}, {}, before)
    assert again.settings == first.settings != options.Settings()
    assert (again.options, o.changes(first.options, again.options)) == (first.options, [])
    assert set(again.kept) == set(first.options)
    for name in options.KEPT:
        default = getattr(options.Settings(), name)
        reset = o.settle({}, {}, before, [name.replace("_", "-")]).settings
        assert reset == dataclasses.replace(first.settings, **{name: default}), name
    assert o.settle({}, {}, before, ["all"]).settings == options.Settings()


def test_the_command_comes_before_the_file_and_the_file_before_what_was() -> None:
    before = served(deadline="50ms", timeout="5s", percentile=90, env={"A": "1", "B": "1", "C": "1"}, secrets=["S"])
    file = o.of_file('deadline = "60ms"\ntimeout = "6s"\nsecret = ["T"]\n[env]\nB = "2"\nC = "2"\n')
    settled = o.settle(o.flat({"deadline": 70, "env": {"C": "3"}}), file, before)
    found = settled.settings
    assert (found.deadline, found.timeout, found.percentile) == (70, 6000, 90.0)
    assert (found.env, sorted(found.secrets)) == ({"A": "1", "B": "2", "C": "3"}, ["S", "T"])
    assert settled.of_file == ("env.B", "secret.T", "timeout")
    assert settled.kept == ("env.A", "percentile", "secret.S")
    later = structs.replace(before, options=settled.options, of_file=settled.of_file)
    without = o.settle({}, {}, later)  # what is taken out of the file has its default again
    assert (without.settings.timeout, without.settings.deadline) == (60_000, 70)
    assert (without.settings.env, without.settings.secrets) == ({"A": "1", "C": "3"}, ("S",))


def test_single_variables_and_secrets_are_reset() -> None:
    before = served(env={"A": "1", "B": "1"}, secrets=["S", "T"])
    found = o.settle({}, {}, before, ["env.A", "secret.T"]).settings
    assert (found.env, found.secrets) == ({"B": "1"}, ("S",))
    found = o.settle(o.flat({"env": {"C": "1"}}), {}, before, ["env", "secret"]).settings
    assert (found.env, found.secrets) == ({"C": "1"}, ())
    found = o.settle(o.flat({"env": {"S": "open"}}), {}, before).settings
    assert (found.env["S"], found.secrets) == ("open", ("T",)), "a variable takes a secret's place, and not beside it"


def test_what_changed_is_said_as_it_is_written_and_without_values_of_variables() -> None:
    old = o.flat({"deadline": "50ms", "env": {"A": "1", "B": "1"}, "secrets": ["S"], "quota": "2GiB"})
    new = o.flat({"timeout": "90s", "env": {"A": "2", "C": "1"}, "quota": 2 << 30, "network": True})
    assert [(row["option"], row["old"], row["new"]) for row in o.changes(old, new)] == [
        ("deadline", "50ms", "1s"),
        ("env.A", "set", "another value"),
        ("env.B", "set", None),
        ("env.C", None, "set"),
        ("network", "false", "true"),
        ("secret.S", "bound", None),
        ("timeout", "1m", "90s"),
    ]
    assert o.changes(o.flat({"deadline": "1s", "batch_wait": "0ms"}), {}) == [], "the default, however it is written"


def test_a_version_of_an_older_dormouse_has_what_can_be_seen_of_it() -> None:
    said = {name: value for name, value in SAID.items() if options.OPTIONS[name].metadata["of"] == "functions"}
    hidden = ("requirements", "allow_build", "call", "eager")
    said = {name: value for name, value in said.items() if name not in ("concurrency", *hidden)}
    old = served(**said)
    assert o.had(structs.replace(old, options=None)) == old.options
    model = o.flat({"llm": True, "context": 64, "dtype": "float32", "ttft": "1s", "tpot": 25, "convert": True})
    settled = o.settle(model, {}, None)
    spec = spec_of("f", "config.json", settled.settings)
    assert o.had(spec) == settled.options
    assert (o.kind_of(spec), o.kind_said(model), o.kind_said({"base": "b"}), o.kind_of(old)) == (
        "model", "model", "adapter", "function",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            'deadline = "80ms"\nnonsense = 1\n',
            "dormouse.toml:2: nonsense is no option of a deploy; there are deadline,",
        ),
        ('dead-line = "80ms"\n', "dormouse.toml:1: dead-line is no option of a deploy; did you mean deadline?"),
        ('env-file = ".env"\n', "dormouse.toml:1: env-file is no option of a deploy; write variables into [env];"),
        ('\ndeadline = "soon"\n', "dormouse.toml:2: deadline: 'soon' is not a duration"),
        ("deadline = 1.5\n", 'dormouse.toml:1: deadline is 1.5; write a duration such as "80ms"'),
        ('max-queue = "5"\n', "dormouse.toml:1: max-queue is 5; write a whole number"),
        ('network = "yes"\n', "dormouse.toml:1: network is yes; write true or false"),
        ("\n\n[env]\nMODE = 5\n", "dormouse.toml:3: env is {'MODE': 5}; write a table of names and texts"),
        ('secrets = "TOKEN"\n', 'dormouse.toml:1: secrets is TOKEN; write a list of names, such as ["TOKEN"]'),
        ("llm = true\n", "dormouse.toml:1: llm says what is deployed, so it belongs to the command"),
        ('note = "1a2b"\n', "dormouse.toml:1: note belongs to one deploy and is not kept; "),
        ("[deploy]\ndeadline = 5\n", "dormouse.toml:1: deploy is no option of a deploy;"),
        (
            "deadline = \n",
            "dormouse.toml: not TOML: Invalid value (at line 1, column 12), in 'deadline ='; a value is missing",
        ),
        ("#" * (17 << 10), "dormouse.toml has more than 16,384 bytes"),
    ],
)
def test_slips_in_the_file_are_refused_with_their_line(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        o.of_file(text)
    assert str(raised.value).startswith(says)


def test_what_cannot_be_reset_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^dedline is no option of a deploy; did you mean deadline\?"):
        o.settle({}, {}, None, ["dedline"])
    for word in ("note", "check", "traffic"):
        with pytest.raises(ConfigError) as raised:
            o.settle({}, {}, None, [word])
        assert str(raised.value) == (
            f"{word} belongs to one deploy and is not kept; there is nothing to reset or to write into dormouse.toml: "
            f"give --{word} to the deploy that it is for"
        )
    file = o.of_file("deadline = 5\n")
    with pytest.raises(ConfigError, match=r"^deadline is what dormouse\.toml says; change it there$"):
        o.settle({}, file, served(deadline=6), ["deadline"])
    assert o.settle(o.flat({"deadline": 7}), file, None, ["deadline"]).settings.deadline == 7
    assert o.settle({}, file, served(deadline=6, timeout=7), ["all"]).options == {"deadline": 5}


@pytest.mark.parametrize(
    ("call", "more", "words"),
    [
        (["f"], {}, "call names 'f' itself"),
        (["a b"], {}, "call names 'a b', which is no function's name"),
        (["g@2"], {}, "versions are left out"),
        ([f"f{number}" for number in range(65)], {}, "at most 64"),
        (["g"], {"batch": 4}, "leave out batch, or call"),
        (["g"], {"llm": True}, "call is of functions"),
    ],
)
def test_whom_a_function_may_not_be_said_to_call(call: list[str], more: dict[str, Any], words: str) -> None:
    settled = o.settle(o.flat({"call": call, **more}), {}, None)
    with pytest.raises(ConfigError, match=words):
        spec_of("f", "config.json" if more.get("llm") else "f.py", settled.settings)


def test_whom_a_function_may_call_is_kept_name_by_name() -> None:
    before = served(call=["g", "h"])
    assert before.calls == ("g", "h")
    settled = o.settle(o.flat({"call": ["i"]}), {}, before, ["call.h"])
    assert settled.settings.call == ("g", "i")
    assert o.settle({}, {}, before, ["call"]).settings.call == ()
    assert o.changes(o.had(before), settled.options) == [
        {"option": "call.h", "old": "allowed", "new": None},
        {"option": "call.i", "old": None, "new": "allowed"},
    ]
