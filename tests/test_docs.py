"""What docs/, CONTRIBUTING and the paper say is what the code says: names, tables, signatures."""

import ast
import inspect
import re
import sys
import tomllib

import pytest
from transformers import GenerationConfig

import tcb
import tcb.kernels
from bench import report
from tcb.options.generation import _OF_A_REQUEST, _RULES
from tcb.planning.config import settings_table
from tests.support.options import HISTORY, WARPERS
from tests.support.text import (
    ROOT,
    anchors,
    between,
    in_backticks,
    links,
    missing,
    named,
    rows,
)
from tests.test_house import FLOORS

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "paper").glob("*.md")])
DESIGN = (ROOT / "docs" / "design.md").read_text("utf-8")
KERNELS = (ROOT / "docs" / "kernels.md").read_text("utf-8")
COMPATIBILITY = (ROOT / "docs" / "compatibility.md").read_text("utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


# names


@every_page
def test_every_file_and_function_named_is_there(page):
    assert missing(page.read_text("utf-8")) == []


@every_page
def test_every_link_leads_somewhere(page):
    for path, anchor in links(page.read_text("utf-8")):
        target = (page.parent / path) if path else page
        # the figure is drawn from a sweep; until one is measured there is nothing to show
        kinds = {result.get("kind") for result in report.read().values()}
        if target.suffix == ".svg" and "sweep" not in kinds:
            continue
        assert target.exists(), path
        if anchor:
            assert anchor in anchors(target.read_text("utf-8")), f"{path}#{anchor}"


def test_what_is_missing_is_found():
    text = "`planning/schedule.py::plan_batch` `tests/` `planning/none.py` `engine.py::nothing`"
    assert len(named(text)) == 4
    assert missing(text) == ["planning/none.py", "engine.py::nothing"]
    assert links("[a](b.md#c-d) ![f](g.svg) [h](https://i.org)") == [("b.md", "c-d"), ("g.svg", "")]
    assert anchors("# 1. One pool, for all\n## `x`") == {"1-one-pool-for-all", "x"}


# design


def test_the_floors_are_those_that_are_enforced():
    section = DESIGN.split("\n## 3. ")[1].split("\n## 4. ")[0]
    floors = [cell.split("`")[1] for cell, *_ in rows(section)]
    assert [floor.removesuffix("/").removesuffix(".py") for floor in floors] == [
        "__init__" if floor == "the package" else floor for floor in FLOORS
    ]
    contributing = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    order = " < ".join(f"`{floor}`" for floor in FLOORS if floor != "the package")
    assert order in contributing


def test_a_request_lives_in_eight_steps_with_files():
    section = DESIGN.split("\n## 5. ")[1].split("\n## 6. ")[0]
    steps = re.split(r"^\d\. ", section, flags=re.MULTILINE)[1:]
    assert len(steps) == 8
    assert [step for step in steps if not named(step)] == []


def test_the_dictionary_has_every_word_once():
    section = DESIGN.split("\n## 2. ")[1].split("\n## 3. ")[0]
    words = [word for cell, *_ in rows(section) for word in cell.split(", ")]
    assert len(words) == len(set(words)) >= 25


# kernels


def signatures():
    """Name -> parameters of every operation, as the page's contracts list them."""
    block = KERNELS.split("## 1. Contracts")[1].split("```")[1]
    calls = re.findall(r"^(\w+\((?:[^()]|\n)*\))$", block, re.MULTILINE)
    found = {}
    for call in calls:
        arguments = ast.parse(f"def {call}: pass").body[0].args
        names = [argument.arg for argument in arguments.args]
        found[call.split("(")[0]] = (names, [argument.arg for argument in arguments.kwonlyargs])
    return found


def test_the_contracts_are_the_signatures_of_the_operations():
    found = signatures()
    assert sorted(found) == tcb.kernels.__all__
    for name, (positional, keywords) in found.items():
        parameters = inspect.signature(getattr(tcb.kernels, name)).parameters.values()
        kinds = {
            kind: [p.name for p in parameters if p.kind is kind] for kind in inspect._ParameterKind
        }
        assert positional == kinds[inspect.Parameter.POSITIONAL_OR_KEYWORD], name
        assert keywords == kinds[inspect.Parameter.KEYWORD_ONLY], name


# compatibility


def test_the_settings_are_those_of_the_configuration():
    assert between(COMPATIBILITY, "settings").strip().splitlines() == list(settings_table())


def test_every_generation_option_has_one_row():
    found = rows(between(COMPATIBILITY, "options"))
    options = in_backticks(row[0] for row in found)
    known = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert len(options) == len(set(options))
    # an older transformers has fewer
    assert known <= set(options)
    answers = {name: row[1] for row in found for name in in_backticks(row[:1])}
    refused = {name for name, answer in answers.items() if answer.startswith("refused")}
    honoured = {"max_new_tokens", "max_length", "num_return_sequences", "max_time"}
    assert refused == _RULES.keys() - honoured
    processors = {name for name, answer in answers.items() if "own processors" in answer}
    assert processors == {name for case in (HISTORY | WARPERS).values() for name in case} - {
        *("temperature", "top_k", "top_p", "min_p")
    }


def test_the_options_of_a_request_are_listed():
    sentence = COMPATIBILITY.split("Options of one request go to `add_request`:")[1].split(".")[0]
    assert set(in_backticks([sentence])) == set(_OF_A_REQUEST)


# the project


def test_one_version_without_an_import():
    assert "version" not in PROJECT["project"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "tcb.__version__"}
    tree = ast.parse((ROOT / "tcb" / "__init__.py").read_text("utf-8"))
    values = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__version__"
    ]
    # a literal is read from the source text; anything else would import torch to build a wheel
    assert [ast.literal_eval(value) for value in values] == [tcb.__version__]
    assert f"## {tcb.__version__}" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_types_are_packaged():
    assert (ROOT / "tcb" / "py.typed").is_file()
    assert PROJECT["tool"]["setuptools"]["package-data"] == {"tcb": ["py.typed"]}


def names_for_type_checkers(path):
    """Name -> module of the imports that only a type checker reads."""
    return {
        alias.asname: node.module
        for block in ast.parse(path.read_text("utf-8")).body
        if isinstance(block, ast.If)
        for node in block.body
        for alias in node.names
    }


def test_type_checkers_see_every_public_name():
    assert names_for_type_checkers(ROOT / "tcb" / "__init__.py") == tcb._HOMES
    operations = names_for_type_checkers(ROOT / "tcb" / "kernels" / "__init__.py")
    assert operations == dict.fromkeys(tcb.kernels.__all__, "tcb.kernels.operations")


def test_what_is_imported_is_declared():
    own = PROJECT["project"]["dependencies"]
    declared = {re.split(r"[<>=]", requirement)[0] for requirement in own}
    imported = set()
    for path in (ROOT / "tcb").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add((node.module or "").split(".")[0])
    assert imported - {"tcb", *sys.stdlib_module_names} == declared
