"""Reads what the repository's text names: files, functions in them, and tables."""

import ast
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# a file or folder, and what it defines: `planning/schedule.py::plan_batch`
NAMED = re.compile(r"`([\w./-]+(?:\.\w+|/))(?:::(\w+))?`")
FOLDERS = ("tcb", "tests", "bench", "docs", "examples", "paper", ".ci")
SUFFIXES = (".py", ".md", ".json", ".toml", ".svg", ".yaml")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)#]*)(?:#([^)]*))?\)")


def named(text: str) -> list[tuple[str, str | None]]:
    """(path, what is defined there or None) of every file and folder named in backticks."""
    return [
        (path, name or None)
        for path, name in NAMED.findall(text)
        if path.endswith("/") or path.endswith(SUFFIXES)
    ]


def find(path: str) -> Path | None:
    """A path of the repository, or one inside the package written without `tcb/`."""
    found = (folder / path for folder in (ROOT, ROOT / "tcb"))
    return next((place for place in found if place.exists()), None)


@cache
def definitions(path: Path) -> frozenset[str]:
    """Functions and classes of a file, methods included."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    tree = ast.parse(path.read_text("utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, kinds))


def missing(text: str) -> list[str]:
    """What a text names in backticks and the repository does not have."""
    faults = []
    for path, name in named(text):
        place = find(path)
        if place is None:
            faults.append(path)
        elif name is not None and name not in definitions(place):
            faults.append(f"{path}::{name}")
    return faults


def links(text: str) -> list[tuple[str, str]]:
    """(path, anchor) of the links that stay in the repository."""
    return [pair for pair in LINK.findall(text) if not pair[0].startswith("http")]


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def rows(table: str) -> list[list[str]]:
    """The cells of a markdown table below its header."""
    lines = [line for line in table.strip().splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def between(text: str, name: str) -> str:
    """What stands between the comments `<!-- name -->` and `<!-- end of name -->`."""
    return text.split(f"<!-- {name} -->")[1].split(f"<!-- end of {name} -->")[0]


def in_backticks(cells: Iterable[str]) -> list[str]:
    """The names in backticks, in order."""
    return [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
