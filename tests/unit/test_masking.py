"""Secrets in what is printed: they do not come through, however the text is cut."""

import itertools
import json

from hypothesis import given
from hypothesis import strategies as st

from dormouse.core.masking import NO_MASK, SecretMask


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


@given(st.text("abc", max_size=60), st.integers(1, 7))
def test_what_is_no_secret_comes_through_whole(text: str, size: int) -> None:
    mask, data = SecretMask({"S": "abcabcX"}), text.encode()
    out = b"".join(mask.feed(data[start : start + size]) for start in range(0, len(data), size))
    assert out + mask.rest() == data
