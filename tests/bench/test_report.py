"""The figure is drawn from a sweep's file, the same every time, and says from which."""

import json

import pytest

from bench import report

POINTS = [
    {
        "requests": count,
        "prompt_tokens": 16 * count,
        "systems": {name: {"tokens_per_second": 10.0 * count} for name in report.TITLES},
    }
    for count in (1, 4, 16)
]
SWEEP = {
    "kind": "sweep",
    "model": "m",
    "dtype": "float32",
    "workload": {"new_tokens": 32},
    "points": POINTS,
    "environment": {
        "device": "a processor",
        "device_type": "cpu",
        "threads": 2,
        "commit": "0123456789abcdef",
        "dirty": False,
    },
}


def sweeps():
    return [name for name, result in report.read().items() if result.get("kind") == "sweep"]


def test_the_figure_was_made_from_the_file_that_is_there():
    assert report.FIGURE.is_file() == bool(sweeps())
    for name in sweeps():
        source = report.RESULTS / f"{name}.json"
        written = report.FIGURE.read_text()
        assert report.origin(source) in written, "run: python -m bench.report --figure"


def test_the_same_file_gives_the_same_figure(tmp_path):
    pytest.importorskip("matplotlib")
    source = tmp_path / "sweep.json"
    source.write_text(json.dumps(SWEEP))
    for name in ("one", "two"):
        report.draw(source, tmp_path / f"{name}.svg")
    text = (tmp_path / "one.svg").read_text()
    assert text == (tmp_path / "two.svg").read_text()
    assert report.origin(source) in text
    for shown in (
        *report.TITLES.values(),
        "a processor, 2 threads",
        "requests",
        "tokens per second",
    ):
        assert shown in text
    source.write_text(json.dumps(SWEEP | {"model": "other"}))
    assert report.origin(source) not in text
