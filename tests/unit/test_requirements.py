"""What functions may require: what cannot be in an environment is refused by its name."""

import pytest

from dormouse.core.requirements import (
    MAX_DOTS,
    MAX_LINES,
    MAX_NBYTES,
    RequirementsRefused,
    checked,
    of_project,
)

TORCH = "2.13.0+cpu"


def _refused(text: str) -> tuple[str, str]:
    with pytest.raises(RequirementsRefused) as caught:
        checked(text, TORCH)
    return caught.value.code, str(caught.value)


def test_lines_without_comments() -> None:
    text = "# what it needs\n\ncolours>=1 # bright\nrich[all] \\\n  <99\ntorch\ntorch>=2.11,<3\ntorch==2.13.0\r\n"
    wanted = ["colours>=1", "rich[all]<99", "torch", "torch<3,>=2.11", "torch==2.13.0"]
    assert checked(text, TORCH).splitlines() == wanted
    assert checked("\n# nothing\n", TORCH) == ""
    assert checked("\ufeffcolours\n", TORCH) == "colours\n", "as editors on Windows save it"
    hashed = "colours==1 --hash=sha256:00 --hash=sha256:0f"
    assert checked(hashed, TORCH) == checked(hashed.replace(" --", "\\\r\n --"), TORCH) == f"{hashed}\n"


def test_the_node_s_own_build_is_what_functions_have() -> None:
    """PyPI's torch calls itself 2.13.0+cu130, and its files 2.13.0: pip would find no such version."""
    assert checked("torch==2.13.0+cpu", TORCH) == "torch\n"
    assert checked("torch[opt]>=2.13.0; python_version > '3'", TORCH) == 'torch[opt]>=2.13.0; python_version > "3"\n'


def test_what_is_not_for_here_is_not_looked_at() -> None:
    line = 'torch==2.5; sys_platform == "win32"'
    assert checked(line, TORCH) == f"{line}\n"


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("torch==2.13.0+cu130", "cuda_refused", "is a build for GPUs: functions have the node's torch 2.13.0+cpu"),
        ("torch==2.5.1", "torch_held", "is another version: functions have the node's torch 2.13.0+cpu"),
        ("Torch<2", "torch_held", "write torch without a version"),
        ("nvidia-cublas-cu12", "cuda_refused", "nvidia-cublas-cu12 is a part of CUDA"),
        ("triton==3", "cuda_refused", "triton is a part of CUDA"),
        ("--index-url https://evil.example/simple", "bad_requirements", "is an option of pip"),
        ("-r more.txt", "bad_requirements", "is an option of pip"),
        ("-e .", "bad_requirements", "is an option of pip"),
        ("./wheels/own.whl", "bad_requirements", "is no requirement"),
        ("git+https://example.org/repo", "bad_requirements", "is no requirement"),
        ("own @ https://example.org/own.whl", "bad_requirements", "own is named by an address"),
        ("own @ file:///etc/passwd", "bad_requirements", "own is named by an address"),
        ("two words", "bad_requirements", "is no requirement"),
        ("\0", "bad_requirements", "is no requirement"),
        ('colours; sys_platform == "${HTTP_PROXY}"', "bad_requirements", "has a variable or an option in it"),
        ('colours; os_name == "x --index-url=http://evil.example"', "bad_requirements", "a variable or an option"),
        ("colours==1 --hash=${HTTP_PROXY}", "bad_requirements", "is no requirement"),
        ('colours; os_name ~= "x"', "bad_requirements", "is no requirement"),
        ('colours; "a" === "b"', "bad_requirements", "is no requirement"),
        (f"torch==1.{'9' * 5000}", "bad_requirements", "is no requirement"),
        (f"torch=={'9' * 5000}", "bad_requirements", "is no requirement"),
        (f"colours; python_version < '{'9' * 5000}'", "bad_requirements", "is no requirement"),
        ("colours\x0b--index-url=http://evil.example", "bad_requirements", "is an option of pip"),
        ("colours\u2028-r more.txt", "bad_requirements", "is an option of pip"),
        ("colours\r-e .", "bad_requirements", "is an option of pip"),
        ("colours --pre", "bad_requirements", "is no requirement"),
        ("colours==1 --hash=sha256:zz", "bad_requirements", "is no requirement"),
        ("c\u043elours", "bad_requirements", "is no requirement"),
        (f'colours; {"(" * 5000}os_name == "a"{")" * 5000}', "bad_requirements", "is no requirement"),
    ],
)
def test_what_is_refused_is_named(line: str, code: str, says: str) -> None:
    found, text = _refused(f"colours\n{line}\n")
    assert found == code
    assert says in text


def test_requirements_are_bounded() -> None:
    assert "more than 32,768 bytes" in _refused("#" * (MAX_NBYTES + 1))[1]
    assert "501 requirements" in _refused("a\n" * (MAX_LINES + 1))[1]


def test_of_a_project_its_dependencies_count() -> None:
    assert of_project('[project]\nname = "f"\ndependencies = ["colours>=1", "rich"]\n') == "colours>=1\nrich\n"
    assert of_project("[tool.other]\nx = 1\n") == ""
    assert of_project('[project]\ndynamic = ["version"]\n') == ""
    assert of_project('\ufeff[project]\ndependencies = ["colours"]\n') == "colours\n"
    assert of_project(f"[{'.'.join('a' * (MAX_DOTS + 1))}]\n") == ""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[project\n", "is not TOML"),
        (f"x = {'[' * 5000}{']' * 5000}", "is not TOML"),
        (f"x = {'{a=' * 5000}1{'}' * 5000}", "is not TOML"),
        (f"x = {'9' * 5000}", "is not TOML"),
        ("project = 3\n", "is no table"),
        ("[[project]]\n", "is no table"),
        ('[project]\ndependencies = "rich"\n', "is no list of lines of text"),
        ("[project]\ndependencies = [1]\n", "is no list of lines of text"),
        ('[project]\ndependencies = ["a\\nb"]\n', "is no list of lines of text"),
        ("[project.dependencies]\nrich = 1\n", "is no list of lines of text"),
        ('[project]\ndynamic = ["dependencies"]\n', "its dependencies are dynamic, and nothing of it is run here"),
        (f"{'a.' * 100_000}b = 1\n", "a line of pyproject.toml has more than 200 dots"),
        (f"""x = {{ {"'a' . " * 40_000}b = 1 }}\n""", "a line of pyproject.toml has more than 200 dots"),
        (f"""{'"' + chr(92) + '"".'}""" * 50_000 + "b = 1", "a line of pyproject.toml has more than 200 dots"),
        (f'[{"a ." * (MAX_DOTS + 1)}"b"]', "a line of pyproject.toml has more than 200 dots"),
    ],
)
def test_an_odd_project_is_refused(text: str, says: str) -> None:
    with pytest.raises(RequirementsRefused, match=r"pyproject\.toml") as caught:
        of_project(text)
    assert caught.value.code == "bad_requirements"
    assert says in str(caught.value)
