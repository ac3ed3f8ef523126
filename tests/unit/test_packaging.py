"""Is everything that is in the tree also in the wheel, under one name? See CONTRIBUTING.md, "One namespace"."""

import ast
import graphlib
import importlib
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONFIG = PROJECT["tool"]
PACKAGES: dict[str, str] = CONFIG["setuptools"]["package-dir"]
TOP = {name: folder for name, folder in PACKAGES.items() if "/" not in folder}
WHEEL = os.environ.get("DORMOUSE_WHEEL")


def test_every_folder_is_mapped_everywhere() -> None:
    assert sorted(CONFIG["setuptools"]["packages"]) == sorted(PACKAGES)
    assert sorted(CONFIG["importlinter"]["root_packages"]) == sorted(TOP)
    links = {f"dormouse.{link.name}": link.resolve() for link in (ROOT / "typings" / "dormouse").iterdir()}
    beside = {"dormouse.client": ROOT / PACKAGES["dormouse.client"]}  # it lies where an editable install finds it
    assert links == {name: ROOT / folder for name, folder in TOP.items()} | beside
    banned = CONFIG["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"]
    assert sorted(banned) == sorted(TOP.values())


def test_every_folder_with_code_is_known() -> None:
    found = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert found - {"tests", "examples", "benchmarks"} == set(TOP.values())


def test_no_folder_is_imported_by_its_bare_name() -> None:
    code = f"import sys, {', '.join(PACKAGES)}; print(*(set({list(TOP.values())}) & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True).split() == []


def test_nested_packages_are_known() -> None:
    """One that is not in the map would import here and be missing from the wheel."""
    nested = {
        str(path.parent.relative_to(ROOT)) for top in TOP.values() for path in (ROOT / top).glob("*/**/__init__.py")
    }
    assert nested == set(PACKAGES.values()) - set(TOP.values())


def test_packages_are_typed() -> None:
    assert [folder for folder in TOP.values() if not (ROOT / folder / "py.typed").exists()] == []


def test_nothing_shadows_the_namespace() -> None:
    assert list(ROOT.glob("dormouse*.py")) == []
    assert not (ROOT / "dormouse").exists()


def test_every_module_comes_from_what_is_tested() -> None:
    """From the wheel when the wheel is under test, else from this checkout."""
    for name, folder in PACKAGES.items():
        file = importlib.import_module(name).__file__
        assert file is not None
        assert Path(file).parent == (Path(WHEEL) / name.replace(".", "/") if WHEEL else ROOT / folder)


if WHEEL is not None:  # in the part of scripts/test that builds it

    def test_the_wheel_has_every_file() -> None:
        assert WHEEL is not None
        for name, folder in PACKAGES.items():
            here = {p.name for p in (ROOT / folder).iterdir() if p.suffix in (".py", ".cpp", ".h", ".html", ".typed")}
            files = (p for p in (Path(WHEEL) / name.replace(".", "/")).iterdir() if p.is_file())
            assert {p.name for p in files if p.suffix != ".so"} == here


def test_the_version_is_the_projects() -> None:
    assert version("dormouse") == PROJECT["project"]["version"]


def test_n8_the_package_says_its_version() -> None:
    code = "import dormouse; print(dormouse.__version__, hasattr(dormouse, 'nothing'))"
    said = subprocess.check_output([sys.executable, "-c", code], text=True, cwd="/").split()
    assert said == [PROJECT["project"]["version"], "False"]


def test_constraints_are_exact_and_meet_the_bounds() -> None:
    from packaging.requirements import Requirement

    pins: dict[str, str] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, exact, pin = line.partition("==")
            assert exact, f"{line!r} is not an exact pin"
            pins[name.lower().replace("_", "-")] = pin
    extras = PROJECT["project"]["optional-dependencies"]
    for text in [
        *PROJECT["project"]["dependencies"],
        *extras["hf"],
        *extras["cuda"],
        *extras["plot"],
        *extras["client"],
        *extras["dev"],
        *extras["docs"],
    ]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pins[requirement.name.lower()]), text


def test_there_is_an_extra_for_each_cuda() -> None:
    from packaging.requirements import Requirement

    extras = PROJECT["project"]["optional-dependencies"]
    assert extras["cuda"] == extras["cuda13"]
    (twelve,), (thirteen,) = extras["cuda12"], extras["cuda13"]
    versions = ("12.8.0", "12.9.10", "13.0.3", "13.5.0", "14.0.0")
    found = [[version in Requirement(each).specifier for version in versions] for each in (twelve, thirteen)]
    assert found == [[False, True, False, False, False], [False, False, True, True, False]]


def test_each_function_that_the_page_of_a_request_links_is_there() -> None:
    page = (ROOT / "docs" / "request.md").read_text()
    links = re.findall(r"\[`([^`]+)`\]\(\.\./([^)]+)\)", page)
    assert len(links) == page.count("](../") > 40
    missing = []
    for name, path in links:
        scope: list[ast.stmt] = ast.parse((ROOT / path).read_text()).body
        for part in name.split("."):
            found = [node for node in scope if getattr(node, "name", None) == part]
            missing += [] if found else [(name, path)]
            scope = getattr(found[0], "body", []) if found else []
    assert missing == []


def test_a_name_means_one_class_but_for_those_that_the_glossary_argues() -> None:
    _, _, argued = (ROOT / "docs" / "glossary.md").read_text().partition("## Names that two have")
    allowed = {name for row in argued.splitlines() if row.startswith("| `") for name in re.findall(r"`(\w+)`", row)}
    names = Counter(
        node.name
        for folder in PACKAGES.values()
        for path in (ROOT / folder).glob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    )
    assert {name for name, count in names.items() if count > 1} == allowed


def test_no_line_of_a_page_is_too_long() -> None:
    """But for tables, whose rows cannot be broken."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md"), *(ROOT / "examples").glob("**/*.md")]
    assert len(pages) > 22
    lines = ((page.name, line) for page in pages for line in page.read_text().splitlines())
    assert [(page, line) for page, line in lines if len(line) > 100 and not line.startswith("|")] == []


def test_the_glossary_names_what_is_there() -> None:
    table, _, _ = (ROOT / "docs" / "glossary.md").read_text().partition("## Names that two have")
    sources = "\n".join(path.read_text() for folder in PACKAGES.values() for path in (ROOT / folder).glob("*.py"))
    classes = set(re.findall(r"^class (\w+)", sources, re.MULTILINE))
    named = set(re.findall(r"`([A-Z]\w+)(?:\.\w+)?`", table))
    assert named - classes == set()
    assert len(named) > 40


def test_each_page_of_the_design_begins_with_a_picture_and_is_linked() -> None:
    index = (ROOT / "docs" / "design.md").read_text()
    pages = [ROOT / "docs" / "design.md", *(ROOT / "docs" / "design").glob("*.md")]
    assert [page.name for page in pages if not re.match(r"# .+\n\n```\n", page.read_text())] == []
    assert set(re.findall(r"\]\(design/(\w+\.md)\)", index)) == {page.name for page in pages[1:]}


def imports(path: Path) -> Iterator[str]:
    """All names that a module imports, for types too: a module, or a name in one."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_no_modules_import_one_another_in_a_circle() -> None:
    """But for the simulator's engine, which is to run what decides instead."""
    modules = {
        f"{package}.{path.stem}".removesuffix(".__init__"): path
        for package, folder in PACKAGES.items()
        for path in (ROOT / folder).glob("*.py")
    }
    graph = {
        module: {name if name in modules else name.rpartition(".")[0] for name in imports(path)} & modules.keys()
        for module, path in modules.items()
        if not module.startswith("dormouse.controller.simulator.")
    }
    assert len(graph) > 600
    sorter = graphlib.TopologicalSorter({module: others - {module} for module, others in graph.items()})
    sorter.prepare()  # raises CycleError
