"""How large each floor may be, and that every function of the package says its types."""

import pytest

from tests.code_lines import count_code_lines, unannotated
from tests.test_house import FLOORS, PACKAGE, floor

# most lines of code of neighbouring floors; docstrings, comments and blank lines are free
BUDGETS = {
    ("planning",): 1635,
    ("kernels",): 3070,
    ("options", "model", "device"): 2330,
    ("engine", "compat", "service", "api", "the package"): 1800,
    ("cli", "__main__"): 430,
}
# what a newcomer reads in an hour: from a request to the attention of a layer
CORE = (
    "planning.request",
    "planning.plan",
    "planning.blocks",
    "planning.state",
    "planning.schedule",
    "planning.draft",
    "planning.admission",
    "planning.packing",
    "engine",
    "device.runner",
    "device.buffers",
    "device.kv_cache",
    "device.attention",
    "model.attention_hook",
)
MAX_CORE = 1350


def test_no_floor_is_over_its_budget():
    spent = dict.fromkeys(FLOORS, 0)
    for module, source in PACKAGE.items():
        spent[FLOORS[floor(module)]] += count_code_lines(source)
    assert sorted(name for names in BUDGETS for name in names) == sorted(FLOORS)
    sums = {names: sum(spent[name] for name in names) for names in BUDGETS}
    assert {names: n for names, n in sums.items() if n > BUDGETS[names]} == {}


def test_the_core_is_read_in_an_hour():
    lines = {name: count_code_lines(PACKAGE[f"tcb.{name}"]) for name in CORE}
    assert sum(lines.values()) <= MAX_CORE, lines


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("", 0),
        ("'Duty.'\n\n# why\nx = 1  # here\n", 1),
        ("def f(\n    a,\n):\n    '''Doc\n    more.'''\n    return a\n", 4),
        ("class A:\n    'Doc.'\n    x = 1\n", 2),
        ("x = '''a\nb'''\n", 2),
    ],
)
def test_code_lines_are_counted(source, count):
    assert count_code_lines(source) == count


def test_every_function_is_annotated():
    found = {module: unannotated(source) for module, source in PACKAGE.items()}
    assert {module: functions for module, functions in found.items() if functions} == {}


@pytest.mark.parametrize(
    ("source", "is_found"),
    [
        ("def f(a: int, *b: int, c: int = 1, **d: int) -> int: ...", False),
        ("def f(a) -> int: ...", True),
        ("def f(a: int): ...", True),
        ("def f(*a) -> int: ...", True),
        ("def f(*, a) -> int: ...", True),
        ("def f(self) -> None: ...", True),
        ("class A:\n    def f(self) -> None: ...", False),
        ("class A:\n    def __init__(self): ...", False),
        ("class A:\n    def __init__(self, a): ...", True),
        ("class A:\n    @staticmethod\n    def f(a) -> None: ...", True),
        ("@triton.jit\ndef f(a, B: tl.constexpr): ...", False),
    ],
)
def test_missing_annotations_are_found(source, is_found):
    assert bool(unannotated(source)) == is_found
