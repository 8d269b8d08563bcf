"""Seeded bugs, and that the toy device's tests see every one."""

import pytest

from tests.planning.mutants import MUTANTS, copy_with, run_tests

pytestmark = pytest.mark.mutants


def test_the_copy_without_a_bug_passes(tmp_path):
    copy_with(None, tmp_path)
    assert run_tests(tmp_path) == (True, "all pass")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_the_bug_is_caught(mutant, tmp_path):
    copy_with(mutant, tmp_path)
    passes, _ = run_tests(tmp_path)
    assert not passes
