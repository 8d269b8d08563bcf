"""Every refusal of the package has the type, the field, the value and the range on record."""

import json

import pytest

from tests.refusals.cases import CASES
from tests.refusals.facts import observe
from tests.refusals.record import EXPECTED
from tests.refusals.world import World

RECORD = json.loads(EXPECTED.read_text("utf-8"))


@pytest.fixture(scope="module")
def world():
    return World()


def test_every_case_is_on_record_and_refused_or_logged():
    assert list(CASES) == list(RECORD)
    assert all("error" in seen or "log" in seen for seen in RECORD.values())


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_as_on_record(world, name):
    expected, seen = RECORD[name], observe(CASES[name], world)
    for part in ("error", "field", "value"):
        assert seen.get(part) == expected.get(part), f"{part}: {seen}"
    for part in ("facts", "accepted"):
        assert set(expected.get(part, ())) <= set(seen.get(part, ())), f"{part}: {seen}"
    lines, logged = expected.get("log", []), seen.get("log", [])
    assert len(lines) == len(logged)
    for line, new in zip(lines, logged, strict=True):
        assert set(line) <= set(new)
