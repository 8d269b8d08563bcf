"""The README and the results say what the repository holds: numbers, commands, files, tests."""

import re

import pytest

from bench import report
from tests.support.text import ROOT, named, rows
from tests.test_budgets import CORE, MAX_CORE

README = (ROOT / "README.md").read_text()
RESULTS = (ROOT / "docs" / "results.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()


def section(title):
    """The text of the README below a heading, up to the next of any level."""
    return re.split(r"^#+ ", README.split(f"# {title}\n")[1], flags=re.MULTILINE)[0]


def test_tables_come_from_the_result_files():
    for page, content in report.pages(report.read()).items():
        written = report.between_markers(page.read_text())
        assert written == content, "run: python -m bench.report --write"


def test_the_number_of_the_first_paragraph_is_measured():
    result = report.read()["serve-cpu-smollm2-chat128"]
    systems, workload = result["systems"], result["workload"]
    own, peer = (systems[name]["tokens_per_second"] for name in ("tcb", "transformers-cb"))
    first = re.sub(r"\s+", " ", README.split("\n\n")[1])
    assert f"on {workload['requests']} short chats {own / peer:.1f} times as fast as" in first
    assert f"{result['environment']['threads']} threads of a CPU" in first
    assert systems["tcb"]["equal_to_generate_alone"] == workload["requests"]
    on_gpu = [r for r in report.read().values() if r.get("kind") == "serve"]
    on_gpu = [r for r in on_gpu if r["environment"]["device_type"] != "cpu"]
    assert ("no GPU measured yet" in first) == (not on_gpu)


def test_a_number_stands_before_the_first_code():
    assert re.search(r"\d\.\d times", README.split("```")[0])


def test_five_promises_name_the_tests_that_hold_them():
    promises = section("Five promises, and the test that holds each").strip().split("\n- ")
    assert len(promises) == 5
    for promise in promises:
        # that the file and the function exist is a test of every page
        [(path, name)] = named(promise)
        assert path.startswith("tests/") and name.startswith("test_"), promise


def test_the_core_can_be_read_in_an_hour():
    text = section("The core in an hour")
    files = [path for row in rows(text) for path, _ in named(row[0])]
    assert files == [f"{name.replace('.', '/')}.py" for name in CORE]
    most = int(re.search(r"at most ([\d,]+) lines of code", text)[1].replace(",", ""))
    assert most == MAX_CORE


def test_every_make_command_exists():
    text = README + RESULTS + CONTRIBUTING
    commands = set(re.findall(r"^make ([a-z]+)", text, re.MULTILINE))
    commands |= set(re.findall(r"`make ([a-z]+)`", text))
    targets = set(re.findall(r"^([a-z]+):", MAKEFILE, re.MULTILINE))
    assert {"demo", "test"} <= commands
    assert commands <= targets


def test_every_bench_command_exists():
    modules = re.findall(r"python -m bench\.([a-z_]+)", README + RESULTS)
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
    assert len(example.strip().splitlines()) <= 11


def test_every_program_of_the_examples_is_named():
    programs = {path.name for path in (ROOT / "examples").glob("*.py")} - {"models.py"}
    assert programs == set(re.findall(r"\(`examples/(\w+\.py)`\)", section("Use")))


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
