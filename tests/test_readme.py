"""The README says what the repository holds: its tables, its commands, its files.

It knows nothing of how a number was measured.
"""

import re
from pathlib import Path

import pytest

from bench import report

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()


def test_tables_come_from_the_result_files():
    written = report.between_markers(README)
    assert written == report.tables(report.read()), "run: python -m bench.report --write"


def test_every_make_command_exists():
    commands = set(re.findall(r"^make ([a-z]+)", README, re.MULTILINE))
    commands |= set(re.findall(r"`make ([a-z]+)`", README))
    targets = set(re.findall(r"^([a-z]+):", MAKEFILE, re.MULTILINE))
    assert {"demo", "test"} <= commands
    assert commands <= targets


def test_every_bench_command_exists():
    modules = re.findall(r"python -m bench\.([a-z_]+)", README)
    assert modules
    for module in modules:
        assert (ROOT / "bench" / f"{module}.py").is_file(), module


def test_the_tree_names_what_is_there():
    tree = README.split("## What is where")[1].split("```")[1]
    folder = ""
    for line in tree.strip().splitlines():
        name = line.split()[0]
        folder = name if not line.startswith(" ") else folder
        path = ROOT / name if folder == name else ROOT / folder / name
        assert path.exists(), name


def test_the_example_is_short_and_parses():
    example = README.split("```python\n")[1].split("```")[0]
    compile(example, "README.md", "exec")
    assert len(example.strip().splitlines()) <= 12


def test_a_changed_number_is_noticed():
    result = {
        "kind": "serve",
        "model": "m",
        "dtype": "float32",
        "workload": {"requests": 4, "new_tokens": 8, "shared": 0},
        "prompt_tokens": 64,
        "systems": {
            "tcb": {"tokens_per_second": 300.0, "equal_to_generate_alone": 4},
            "transformers-cb": {"tokens_per_second": 150.0, "equal_to_generate_alone": 3},
            "generate-padded": {"tokens_per_second": 200.0, "equal_to_generate_alone": None},
        },
        "environment": {
            "device": "a processor",
            "device_type": "cpu",
            "threads": 2,
            "commit": "0123456789abcdef",
            "dirty": False,
        },
    }
    text = report.tables({"serve-m": result})
    assert "| **300** | 150 | 200 | **2.00** | not compared |" in text
    assert "a processor, 2 threads, 012345678 |" in text
    result["systems"]["tcb"]["tokens_per_second"] = 450.0
    assert report.tables({"serve-m": result}) != text


def test_tables_are_put_between_the_markers():
    text = f"before\n{report.BEGIN}\nold\n{report.END}\nafter"
    changed = report.with_tables(text, "new")
    assert report.between_markers(changed) == "new"
    assert changed.startswith("before\n")
    assert changed.endswith("\nafter")
    with pytest.raises(ValueError, match="unpack"):
        report.with_tables("no markers", "new")
