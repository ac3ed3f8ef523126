"""Secrets in what is printed: they do not come through, however the text is cut."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dormouse.core.masking import NO_MASK, PIECE_NBYTES, TEXT_NBYTES, SecretMask


def test_what_stands_instead_names_the_secret() -> None:
    mask = SecretMask({"TOKEN": "hf_abcdef", "OTHER": "hf_abc"})
    assert mask.text("a hf_abcdef b hf_abc c") == "a [secret TOKEN] b [secret OTHER] c"
    assert mask.text("nothing of it: hf_ab") == "nothing of it: hf_ab"


def test_a_secret_as_python_and_json_write_it() -> None:
    value = 'line "one" é\n\tline two'
    mask = SecretMask({"KEY": value})
    for form in (value, repr(value), json.dumps(value), json.dumps(value, ensure_ascii=False)):
        assert "one" not in mask.text(f"see {form}"), form
    assert mask.text("  line two  ") == "  [secret KEY]  ", "one line of it, as a traceback may show it"


def test_without_secrets_nothing_is_held_back() -> None:
    assert not NO_MASK
    assert NO_MASK.feed(b"abc") == b"abc"
    assert NO_MASK.rest() == b""
    assert NO_MASK.text("abc \udcff") == "abc \udcff"


@given(
    st.lists(st.text("ab\n", min_size=4, max_size=8), min_size=1, max_size=3, unique=True),
    st.text("abc\n", max_size=60),
    st.lists(st.integers(0, 60), max_size=8),
)
def test_a_stream_is_masked_wherever_it_is_cut(values: list[str], text: str, cuts: list[int]) -> None:
    secrets = {f"S{number}": value for number, value in enumerate(values)}
    data, mask = text.encode(), SecretMask(secrets)
    places = sorted({min(cut, len(data)) for cut in [0, *cuts, len(data)]})
    pieces = [data[start:end] for start, end in itertools.pairwise(places)]
    out = b"".join(mask.feed(piece) for piece in pieces) + mask.rest()
    assert not any(value.encode() in out for value in values)


def test_a_secret_that_begins_as_another_one() -> None:
    mask = SecretMask({"SHORT": "hf_abc", "LONG": "hf_abcdef"})
    assert [mask.feed(b"see hf_abc"), mask.feed(b"def and hf_abc"), mask.feed(b"d"), mask.rest()] == [
        b"see ", b"[secret LONG] and ", b"", b"[secret SHORT]d"
    ]  # fmt: skip


def test_a_long_secret_is_hidden_and_named_once() -> None:
    value = "".join(f"{number:x}-" for number in range(3000))
    data, mask = f"it is {value}, {value}.".encode(), SecretMask({"LONG": value})
    for size in (1, 100, PIECE_NBYTES, 5000, len(data)):
        pieces = [mask.feed(data[start : start + size]) for start in range(0, len(data), size)]
        assert b"".join([*pieces, mask.rest()]) == b"it is [secret LONG], [secret LONG].", size
    assert mask.text(json.dumps(value)) == '"[secret LONG]"'


def test_a_part_of_a_secret_that_may_stand_in_any_text_is_none() -> None:
    ended = "-----BEGIN KEY-----\n" + "Zm9v" * 300 + "\n-----"
    mask = SecretMask({"SHORT": "a      ", "KEY": ended})
    assert mask.text("a ----- b") == "a ----- b"


def test_of_a_longer_text_the_last_lines_are_kept_and_no_part_of_a_secret() -> None:
    mask = SecretMask({"S": "s3cret" * 100})
    text = "s3cret" * 100 + "\n" + "x" * (TEXT_NBYTES - 8) + "\nError: s3cret"
    assert mask.text(text) == "...\nError: s3cret"
    assert mask.text("s3cret" * TEXT_NBYTES) == "...\n"


@pytest.mark.parametrize(
    ("secrets", "said"),
    [
        ({"S": "\n".join("a" * 8 + str(number) for number in range(2000))}, b"a"),
        ({f"S{number}": f"a{number:03d}" for number in range(900)}, b"a001"),
        ({"S": "abcd", "LONG": "a" * 31000 + "x"}, b"abcd"),
        ({"S": "\n".join("a" * number for number in range(8, 250))}, b"aaaaaaab"),
        ({"S": "aaaa", "LONG": "a" * 32000}, b"a"),
    ],
)
def test_a_place_costs_a_few_looks_whatever_the_secrets_are(secrets: dict[str, str], said: bytes) -> None:
    """Counted in comparisons of forms, not in time: before, 16 KiB of `a` held the router's loop for a second."""
    looks = 0

    class Form(bytes):
        def startswith(self, *args: Any) -> bool:
            nonlocal looks
            looks += 1
            return super().startswith(*args)

        def __getitem__(self, index: Any) -> Any:
            return Form(super().__getitem__(index)) if isinstance(index, slice) else super().__getitem__(index)

        def __lt__(self, other: bytes) -> bool:
            nonlocal looks
            looks += 1
            return super().__lt__(other)

        def __radd__(self, other: bytes) -> bytes:
            return Form(other + bytes(self))

    mask, data = SecretMask(secrets), (said * 4096)[:4096]
    for _ in range(4):
        mask.feed(Form(data))
    mask.rest()
    assert 0 < looks < 30 * 4 * (4096 + PIECE_NBYTES)


@given(st.text("abc", max_size=60), st.integers(1, 7))
def test_what_is_no_secret_comes_through_whole(text: str, size: int) -> None:
    mask, data = SecretMask({"S": "abcabcX"}), text.encode()
    out = b"".join(mask.feed(data[start : start + size]) for start in range(0, len(data), size))
    assert out + mask.rest() == data
