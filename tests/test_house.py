"""The rules of the house that a machine can hold: floors, one writer, cold import, tidy text.

Every rule is a function of sources, and is itself tested on sources that break it.
"""

import ast
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.writes import OWNED, owned_fields, pool_writers, writes

ROOT = Path(__file__).resolve().parent.parent
# from the ground up
FLOORS = (
    "planning",
    "kernels",
    "options",
    "model",
    "device",
    "engine",
    "compat",
    "service",
    "api",
    "the package",
    "cli",
    "__main__",
)
MAX_LINES = 400


def python_sources(*folders):
    """Module name -> source of every Python file below the folders of the repository."""
    files = sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))
    return {module_name(file.relative_to(ROOT)): file.read_text("utf-8") for file in files}


def module_name(path):
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PACKAGE = python_sources("tcb")


# floors


def imports(module, source, modules):
    """The modules that a module names in import statements, anywhere in it, and where it can."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # relative imports would need to know whether the module is a package: there are none
            assert node.level == 0, f"{module}:{node.lineno} is a relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else node.module for name in names}
    return found


def floor(module):
    """The height of a module's floor."""
    parts = module.split(".")
    return FLOORS.index(parts[1] if len(parts) > 1 else "the package")


def floor_faults(sources):
    """Imports that lead upward, and circles."""
    edges = {
        module: {name for name in imports(module, source, sources) if name.split(".")[0] == "tcb"}
        for module, source in sources.items()
    }
    faults = [
        f"{module} imports {name}"
        for module, names in edges.items()
        for name in sorted(names)
        if floor(name) > floor(module)
    ]
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        faults.append("circle " + " <- ".join(error.args[1]))
    return faults


def foreign_imports(sources):
    """Imports from outside the package and the standard library."""
    own = sys.stdlib_module_names | {"tcb"}
    return [
        f"{module} imports {name}"
        for module, source in sources.items()
        for name in sorted(imports(module, source, sources))
        if name.split(".")[0] not in own
    ]


def planning(sources):
    return {n: source for n, source in sources.items() if n.startswith("tcb.planning")}


def test_imports_lead_down_and_not_in_circles():
    assert floor_faults(PACKAGE) == []


def test_planning_imports_only_the_standard_library():
    assert len(planning(PACKAGE)) >= 10
    assert foreign_imports(planning(PACKAGE)) == []


def imports_of_tests(sources):
    """Imports of tests, which import the package and bench, and not the reverse."""
    return [
        f"{module} imports {name}"
        for module, source in sources.items()
        for name in sorted(imports(module, source, sources))
        if name.split(".")[0] == "tests"
    ]


def test_what_is_used_imports_no_test():
    assert imports_of_tests(PACKAGE | python_sources("bench", "examples")) == []


def test_imports_of_tests_are_found():
    sources = {"bench.a": "from tests.support.oracle import build", "bench.b": "import torch"}
    sources["bench.lib.c"] = "def f():\n    import tests.gpu"
    assert imports_of_tests(sources) == [
        "bench.a imports tests.support.oracle",
        "bench.lib.c imports tests.gpu",
    ]


@pytest.mark.parametrize(
    ("sources", "fault"),
    [
        ({"tcb.planning.a": "import tcb.device.b", "tcb.device.b": ""}, "tcb.device.b"),
        ({"tcb.planning.a": "from tcb.engine import Engine", "tcb.engine": ""}, "tcb.engine"),
        ({"tcb.planning.a": "def f():\n    from tcb import api", "tcb.api": ""}, "tcb.api"),
        ({"tcb.engine": "import tcb.service.loop", "tcb.service.loop": ""}, "tcb.service"),
        ({"tcb.service.loop": "import tcb.api", "tcb.api": ""}, "tcb.api"),
        ({"tcb.kernels.a": "from tcb import generate_batch", "tcb": ""}, "imports tcb"),
        (
            {
                "tcb.planning.a": "from tcb.planning import b",
                "tcb.planning.b": "from tcb.planning.c import x",
                "tcb.planning.c": "import tcb.planning.a",
            },
            "circle",
        ),
    ],
    ids=["up", "up, from", "up, inside a function", "service", "api", "up, the package", "circle"],
)
def test_floor_faults_are_found(sources, fault):
    assert [found for found in floor_faults(sources) if fault in found]


@pytest.mark.parametrize("line", ["import torch", "from numpy import array", "import a.b as c"])
def test_foreign_imports_are_found(line):
    assert len(foreign_imports({"tcb.planning.a": f"import math\ndef f():\n    {line}"})) == 1


# cold import


def loaded_after(statement):
    """The modules in a fresh process after one statement."""
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("names", [["tcb"], list(planning(PACKAGE))], ids=["tcb", "planning"])
def test_import_loads_neither_torch_nor_triton(names):
    loaded = loaded_after(f"import {', '.join(names)}")
    assert set(names) <= loaded
    assert not {"torch", "triton", "transformers", "numpy"} & loaded


def test_loaded_modules_are_seen():
    assert "numpy" in loaded_after("import numpy")


# one writer


def test_state_is_written_in_one_module():
    fields, methods = owned_fields(PACKAGE), pool_writers(PACKAGE)
    faults = [
        f"{module}:{line} writes {what}"
        for module, source in PACKAGE.items()
        if module not in OWNED
        for line, what in writes(source, fields, methods)
    ]
    assert faults == []


def test_the_writers_are_seen_to_write():
    fields, methods = owned_fields(PACKAGE), pool_writers(PACKAGE)
    assert {"computed", "in_flight", "tables", "running", "waiting", "free", "idle"} <= fields
    assert {"decodes", "tokens_left"} <= fields
    assert {"take", "share", "drop", "register", "forget"} <= methods
    assert not {"find", "available"} & methods
    for module in OWNED:
        found = writes(PACKAGE[module], fields, methods)
        assert len(found) >= 10, (module, found)


@pytest.mark.parametrize(
    "line",
    [
        "sequence.computed = 0",
        "sequence.computed += 1",
        "a.b.computed, y = 0, 1",
        "for sequence.computed in range(3): pass",
        "del sequence.tables",
        "del sequence.tables[0]",
        "sequence.tables[0] = []",
        "sequence.tables[0][1] = 7",
        "sequence.tables[0][1:] = []",
        "sequence.tables.append([])",
        "sequence.tables[0].append(7)",
        "self.sequence.tables[0].append(7)",
        "tables = sequence.tables\ntables[0].append(7)",
        "x, tables = 1, sequence.tables\ntables[0][0] = 7",
        "for table in sequence.tables:\n    table.pop()",
        "(table := sequence.tables).pop()",
        "pool.take(3)",
        "state.pool.take(3)",
        "(lambda: state.pool.take(3))()",
        "with x as sequence.computed: pass",
        "table: list = sequence.tables[0]\ntable.sort()",
        "for i, table in enumerate(sequence.tables):\n    table[i] = 0",
        "[table.clear() for table in sequence.tables]",
        "def f(runner: Runner):\n    runner.sequence.computed = 0",
        "def f(s: Sequence):\n    s.computed = 0",
        "from x import State as Own\ndef f(s: Own):\n    s.computed = 0",
        "def f(s: 'State'):\n    s.computed = 0",
        "def f(s: Any):\n    s.computed = 0",
        "class State:\n    def f(self):\n        self.computed = 0",
        "s = Sequence()\ns.computed = 0",
        "s = make()\ns.computed = 0",
        "s = Runner()\ns = x.s\ns.computed = 0",
    ],
)
def test_writes_are_found(line):
    assert writes(line, {"computed", "tables"}, {"take"})


@pytest.mark.parametrize(
    "line",
    [
        "computed = sequence.computed\ncomputed += 1",
        "tables = list(sequence.tables)\ntables.append([])",
        "tables = sequence.tables\ntables = []\ntables.append(1)",
        "class Runner:\n    def f(self):\n        self.computed = sequence.computed",
        "class Runner:\n    def f(cls):\n        x = cls.__new__(cls)\n        x.computed = 0",
        "runner = Runner()\nrunner.tables[0].append(7)",
        "def f(runner: Runner):\n    runner.computed += 1",
        "sequence.tables.index(3)",
        "sequence.name.append(3)",
        "state.pool.find(3)",
    ],
)
def test_reading_is_not_writing(line):
    assert not writes(line, {"computed", "tables"}, {"take"})


# sizes and text

SUFFIXES = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".json", ".tex", ".bib", ".cfg", ".sh"}
NAMES = {"Makefile", "run", "LICENSE", ".gitignore"}
SKIPPED = {"build", "dist", "__pycache__", "node_modules"}
# written in pieces, so that this file does not break its own rules
ABSOLUTE = re.compile(r"(?<![\w.~}>/-])/(?:" + "root|home|work|tmp|Users|mnt|workspace" + r")/\w")
MARKER = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b")
BANNER = re.compile(r"^\s*#\s*(?:[-=#*~]\s?){4,}", re.MULTILINE)
TICKET = re.compile(r"\b(?:issue|ticket)s?\s+#?\d+\b|\b" + "fixes" + r" #\d+\b", re.IGNORECASE)


def text_files():
    """Path -> text of every file of the repository that people write or read."""
    texts = {}
    for path in sorted(ROOT.rglob("*")):
        parts = path.relative_to(ROOT).parts
        hidden = any(part.startswith(".") and part != ".ci" for part in parts[:-1])
        if hidden or SKIPPED & set(parts) or any(part.endswith(".egg-info") for part in parts):
            continue
        if path.is_file() and (path.suffix in SUFFIXES or path.name in NAMES):
            texts["/".join(parts)] = path.read_text("utf-8")
    return texts


TEXTS = text_files()


def text_faults(texts, *patterns):
    return [
        f"{path}: {match.group()!r}"
        for path, text in texts.items()
        for pattern in patterns
        for match in pattern.finditer(text)
    ]


def test_files_of_every_folder_are_looked_at():
    folders = {path.split("/")[0] for path in TEXTS}
    assert {"tcb", "tests", "bench", "pyproject.toml", ".ci"} <= folders


def test_no_python_file_is_too_long():
    lengths = {path: text.count("\n") for path, text in TEXTS.items() if path.endswith(".py")}
    assert {path: n for path, n in lengths.items() if n > MAX_LINES} == {}


def test_every_python_file_says_what_it_is_for():
    trees = {path: ast.parse(text) for path, text in TEXTS.items() if path.endswith(".py")}
    assert [path for path, tree in trees.items() if not ast.get_docstring(tree)] == []


def test_no_absolute_paths_no_markers_no_banners_no_tickets():
    assert text_faults(TEXTS, ABSOLUTE, MARKER, BANNER, TICKET) == []


@pytest.mark.parametrize(
    ("pattern", "bad", "good"),
    [
        (ABSOLUTE, "'" + "/ro" + "ot/x'", "tests/root/x"),
        (ABSOLUTE, "open(" + "/tm" + "p/x)", "https://example.org/home/x"),
        (MARKER, "# TO" + "DO: later", "todos"),
        (BANNER, "    # " + "-" * 8, "# a - b"),
        (BANNER, "# " + "= " * 8, "x = 1  # --"),
        (TICKET, "see " + "issue " + "12", "issue a batch"),
    ],
)
def test_text_faults_are_found(pattern, bad, good):
    assert len(text_faults({"a": bad}, pattern)) == 1
    assert text_faults({"a": good}, pattern) == []
