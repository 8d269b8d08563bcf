"""Seeded bugs in the kernels of attention and block tables, each of which value tests must catch.

A mutant is a copy of the package with one line changed, tested in a process of its own.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TILE, CHUNKS, DECODE = "tile.py", "paged_attention.py", "paged_decode.py"
LIST, PAGES = "work_list.py", "page_tables.py"
# name: (file, what stands there, what stands there in the mutant)
MUTANTS = {
    "values of dead rows are read": (
        TILE,
        "value_offset, live, VALUES",
        "value_offset, live | (lane >= 0), VALUES",
    ),
    "window one too wide": (
        TILE,
        "> position[:, None] - window",
        ">= position[:, None] - window",
    ),
    "window one too narrow": (
        TILE,
        "> position[:, None] - window",
        "> position[:, None] - window + 1",
    ),
    "diagonal hidden": (
        TILE,
        "key_position[None, :] <= position[:, None]",
        "key_position[None, :] < position[:, None]",
    ),
    "ring without wrap": (TILE, "column = page % pages.columns if RING", "column = page if RING"),
    "a row that has seen nothing": (
        TILE,
        'tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max',
        "new_max",
    ),
    "block offset in 32 bits": (TILE, "next_block.to(tl.int64)", "next_block"),
    "chunk starts one late": (TILE, "key_position < context_len", "key_position <= context_len"),
    "old sum not scaled": (TILE, "row_sum * decay + tl.sum(", "row_sum + tl.sum("),
    "full zone one tile too far": (
        CHUNKS,
        "edge_tile = tl.maximum((first_position + 1) // BLOCK_N, first_tile)",
        "edge_tile = tl.maximum((first_position + 1) // BLOCK_N + 1, first_tile)",
    ),
    "full zone begins inside the window's edge": (
        CHUNKS,
        "full_tile = tl.cdiv(tl.maximum(last_position - window + 1, 0), BLOCK_N)",
        "full_tile = tl.maximum(last_position - window + 1, 0) // BLOCK_N",
    ),
    "token offset in 32 bits": (
        CHUNKS,
        "        token = (query_start + row // Q_PER_KV).to(tl.int64)\n"
        "        query_head = head * Q_PER_KV + row % Q_PER_KV\n"
        "        query_row",
        "        token = query_start + row // Q_PER_KV\n"
        "        query_head = head * Q_PER_KV + row % Q_PER_KV\n"
        "        query_row",
    ),
    "last tile of a sequence lost": (LIST, "(first_row < rows)", "(first_row + 32 <= rows)"),
    "tile of another sequence": (LIST, "tl.maximum(found - 1, 0)", "tl.maximum(found - 2, 0)"),
    "equal costs share a place": (LIST, "(other[None, :] < slot[:, None])", "(other < 0)[None, :]"),
    "sink of the first head for all": (
        CHUNKS,
        "tl.load(sinks_ptr + query_head)",
        "tl.load(sinks_ptr + query_head * 0)",
    ),
    "sink in every part": (
        DECODE,
        "    if parts == 1:\n        if HAS.sinks:",
        "    if HAS.sinks:\n"
        "        total, row_sum = add_sink(total, row_max, row_sum, row_max * 0)\n"
        "    if parts == 1:\n        if HAS.sinks:",
    ),
    "sink lost in the merge": (DECODE, "row_sum += tl.exp2(sink - top)", "row_sum += 0.0"),
    "last part lost": (DECODE, "if index >= parts:", "if index + (parts > 1) >= parts:"),
    "parts overlap": (
        DECODE,
        "end_tile = tl.minimum(first_tile + tiles_per_part, end_tile)",
        "end_tile = tl.minimum(first_tile + tiles_per_part + 1, end_tile)",
    ),
    "empty sequence not written": (
        DECODE,
        "parts = tl.maximum(tl.cdiv(tiles, tiles_per_part), 1)",
        "parts = tl.cdiv(tiles, tiles_per_part)",
    ),
    "edits begin at a page, not at its column": (
        PAGES,
        "tl.load(first_new_page_ptr + entry) % columns",
        "tl.load(first_new_page_ptr + entry)",
    ),
    "edits of another group's sequence": (
        PAGES,
        "entry = group * num_sequences + sequence",
        "entry = sequence * GROUPS + group",
    ),
    "many edits begin anew": (
        PAGES,
        "index = start + tl.arange(0, BLOCK_EDITS)",
        "index = tl.arange(0, BLOCK_EDITS)",
    ),
    "edits are not seen before they are written": (
        PAGES,
        "return tl.where(is_new, new, kept)",
        "return kept",
    ),
    "padding sees the first row": (
        PAGES,
        "    is_live = table_row >= 0\n",
        "    table_row = tl.maximum(table_row, 0)\n    is_live = table_row >= 0\n",
    ),
    "groups of slots lie side by side": (
        PAGES,
        "group.to(tl.int64) * stride_slot_group",
        "group.to(tl.int64) * num_slots",
    ),
    "slots of no token begin one late": (
        PAGES,
        "        start = first\n",
        "        start = first + 1\n",
    ),
}
# file: (test modules, which of their tests, what stands in the report when one is wrong)
ATTENTION = "values or beyond", "AssertionError: error"
TESTS = {
    CHUNKS: (["paged_attention"], *ATTENTION),
    LIST: (["paged_attention"], *ATTENTION),
    DECODE: (["paged_decode"], *ATTENTION),
    TILE: (["paged_attention", "paged_decode"], *ATTENTION),
    PAGES: (["page_tables"], "triton", "E +(AssertionError: )?assert "),
}


@pytest.mark.mutants
@pytest.mark.parametrize("name", MUTANTS)
def test_a_seeded_bug_is_caught(name, tmp_path):
    file, sound, broken = MUTANTS[name]
    for folder in ("tcb", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    path = tmp_path / "tcb/kernels/gpu" / file
    source = path.read_text()
    assert source.count(sound) == 1, f"{file} has {source.count(sound)} lines {sound!r}"
    path.write_text(source.replace(sound, broken))
    modules, chosen, sign = TESTS[file]
    tests = [f"tests/kernels/test_{module}.py" for module in modules]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-k", chosen, *tests]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "TRITON_INTERPRET": "1"}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    # reads outside the pool can end the process: a catch too. A kernel that does not run is none.
    caught = result.returncode < 0 or re.search(sign, result.stdout)
    assert caught or "not finite" in result.stdout, result.stdout[-2000:]
