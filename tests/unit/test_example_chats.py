"""What `make demo-llm` takes for a wrong answer, on a tiny model with two adapters."""

import dataclasses
from pathlib import Path
from typing import Any, Final

import pytest
from adapter_folders import base_model, save_adapter
from language_models import make_folder
from llm_node import generated, prompt_tokens

from examples import demo_adapters
from examples.chats import TOKENS, Chat, Reference, messages
from examples.styles import STYLES

END: Final = 2
QUESTIONS: Final = ("one", "two three")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def chats(folder: Path) -> list[Chat]:
    """As they have to be answered, each token by a forward of its own."""
    models: dict[str, Any] = {"chat": make_folder(folder / "chat")}
    for name, rank in (("math", 8), ("poem", 4)):
        models[name] = save_adapter(folder / name, base_model(), r=rank, target_modules=["q_proj", "down_proj"])
    return [
        Chat(question, name, generated(model, prompt_tokens(messages(question)), TOKENS, END))
        for question in QUESTIONS
        for name, model in models.items()
    ]


@pytest.fixture(scope="module")
def reference(folder: Path, chats: list[Chat]) -> Reference:
    return Reference(folder / "chat", "chat", {name: folder / name for name in ("math", "poem")})


def test_answers_of_base_and_adapters_are_right(reference: Reference, chats: list[Chat]) -> None:
    assert len({chat.text for chat in chats}) == len(chats)
    assert reference.wrong(chats) == []


def test_an_answer_that_is_another_functions_goes_on_or_ends_early_is_wrong(
    reference: Reference, chats: list[Chat]
) -> None:
    for chat, other in ((chats[0], chats[1]), (chats[1], chats[0])):
        for text in {other.text, chat.text + "x", chat.text[:-1]}:
            (said,) = reference.wrong([dataclasses.replace(chat, text=text)])
            assert said == f"{chat.model}: {chat.question} {text!r}, expected {chat.text!r}"


def test_an_answer_that_did_not_come_is_wrong(reference: Reference, chats: list[Chat]) -> None:
    (said,) = reference.wrong([dataclasses.replace(chats[0], error="503 no room")])
    assert "503 no room" in said


def test_an_adapter_that_does_not_show_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    plain = "Rome is the capital of Italy"
    chats = [Chat(demo_adapters.SHOWN, name, style.make(plain)) for name, style in STYLES.items()]
    chats.append(Chat(demo_adapters.SHOWN, demo_adapters.BASE, plain))
    saved = demo_adapters.Saved(9, 4_850_000_000, 7_500_000, 546_000_000, {"0": 538_000_000, "1": 546_000_000})
    assert demo_adapters.show(chats, saved) == []
    table = capsys.readouterr().out
    assert "on GPU 0, 1" in table
    assert "1084 MB" in table
    (said,) = demo_adapters.show([*chats, Chat(demo_adapters.SHOWN, "json", plain)], saved)
    assert said.startswith("json has not answered in its style")
