"""Covering arrays: few rows in which all combinations of levels of chosen columns occur.

A column has levels 0..size - 1, a row takes one level of each, and a group is a tuple of columns:
pairs of columns give a pairwise array, triples one of strength three. Knows nothing of what the
columns mean.
"""

import random
from collections.abc import Iterable, Sequence
from itertools import product

Row = tuple[int, ...]
Group = tuple[int, ...]


def cover(sizes: Sequence[int], groups: Iterable[Group], *, seed: int, tries: int = 8) -> list[Row]:
    """Rows that cover every combination of levels of every group of columns, greedily few.

    Each row is the best of `tries`: it starts from a combination that is still missing, and takes
    for every further column the level that covers most of what is missing. The same arguments give
    the same rows.
    """
    rng = random.Random(seed)
    missing = {group: set(combinations(sizes, group)) for group in groups}
    with_column = [[group for group in missing if column in group] for column in range(len(sizes))]
    rows: list[Row] = []
    while any(missing.values()):
        found = [grow(sizes, missing, with_column, rng) for _ in range(tries)]
        row = max(found, key=lambda row: gain(row, missing, missing))
        for group, left in missing.items():
            left.discard(tuple(row[column] for column in group))
        rows.append(row)
    return rows


def combinations(sizes: Sequence[int], group: Group) -> Iterable[Row]:
    """Every combination of the levels of a group of columns."""
    return product(*(range(sizes[column]) for column in group))


def grow(sizes, missing, with_column, rng) -> Row:
    """One row around a missing combination of a group that misses most."""
    most = max(len(left) for left in missing.values())
    group = rng.choice([group for group, left in missing.items() if len(left) == most])
    row = [-1] * len(sizes)
    # sets of tuples of integers have one order, whatever the process
    start = rng.choice(sorted(missing[group]))
    for column, level in zip(group, start, strict=True):
        row[column] = level
    free = [column for column, level in enumerate(row) if level < 0]
    rng.shuffle(free)
    for column in free:
        levels = list(range(sizes[column]))
        rng.shuffle(levels)
        gains = []
        for level in levels:
            row[column] = level
            gains.append(gain(row, missing, with_column[column]))
        row[column] = levels[gains.index(max(gains))]
    return tuple(row)


def gain(row: Sequence[int], missing, groups: Iterable[Group]) -> int:
    """How many of the groups a row, with -1 where it has no level yet, would cover anew."""
    return sum(tuple([row[column] for column in group]) in missing[group] for group in groups)


def uncovered(
    rows: Iterable[Row], sizes: Sequence[int], groups: Iterable[Group]
) -> list[tuple[Group, Row]]:
    """The combinations (group, levels) that no row has, counted without the generator's help."""
    rows = list(rows)
    faults = []
    for group in groups:
        seen = {tuple(row[column] for column in group) for row in rows}
        faults += [(group, levels) for levels in combinations(sizes, group) if levels not in seen]
    return faults
