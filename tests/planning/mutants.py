"""Bugs to seed, one substitution each, and the toy device's tests on a copy that has one.

It knows nothing of what the tests are: a bug is caught when they fail, or never end.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ("pool_check.py", "toy.py", "serving.py", "workloads.py", "test_toy_device.py")
# the random workloads of two shards, and all that have a name
CHOSEN = "not random_workloads or random_workloads[0] or random_workloads[1]"
SECONDS = 150


@dataclass(frozen=True, slots=True)
class Mutant:
    """A bug: in this file of the planning floor, `old` (found exactly once) reads `new`."""

    name: str
    file: str
    old: str
    new: str


MUTANTS = (
    # blocks
    Mutant(
        "a block that is handed out keeps its old content in the index",
        "blocks.py",
        "            del self.idle[block]\n            self.forget(block)",
        "            del self.idle[block]",
    ),
    Mutant(
        "a dropped block is free though it is registered",
        "blocks.py",
        "if block in self.hash_of:\n                self.idle[block] = None",
        "if False:\n                self.idle[block] = None",
    ),
    Mutant(
        "pages are hashed without the pages before them",
        "blocks.py",
        "blake2b(parent + ids.tobytes(), digest_size=16)",
        "blake2b(ids.tobytes(), digest_size=16)",
    ),
    Mutant(
        "a shared block gets no reader more",
        "blocks.py",
        "        self.idle.pop(block, None)\n        self.readers[block] += 1",
        "        self.idle.pop(block, None)\n        self.readers[block] = 1",
    ),
    Mutant(
        "new weights leave the index of the old ones",
        "state.py",
        "    state.pool.forget_all()\n",
        "",
    ),
    # supply
    Mutant(
        "a block promised to new content is found by its old",
        "blocks.py",
        "return None if block in self._given else block",
        "return block",
    ),
    Mutant(
        "a block that is to be shared is handed out",
        "blocks.py",
        "            if block not in self._claimed:\n                return block",
        "            return block",
    ),
    Mutant(
        "sharing an idle block does not lower the supply",
        "blocks.py",
        "        self.left -= self.cost(blocks)\n",
        "",
    ),
    Mutant(
        "a block is given back by the first of its readers",
        "blocks.py",
        "        if readers == 0:\n",
        "        if readers <= 1:\n",
    ),
    # schedule
    Mutant(
        "the fast path decodes one position behind the last page",
        "schedule.py",
        "if sequence.computed < sequence.room:",
        "if sequence.computed <= sequence.room:",
    ),
    Mutant(
        "a sequence whose last token is in flight decodes on",
        "schedule.py",
        "if made < sequence.limit:",
        "if True:",
    ),
    Mutant(
        "the oldest is preempted first",
        "schedule.py",
        "running[newer.pop()]",
        "running[newer.pop(0)]",
    ),
    Mutant(
        "preemption takes from older sequences too",
        "schedule.py",
        "if s > sequence.seq_id and s not in planned",
        "if s != sequence.seq_id and s not in planned",
    ),
    Mutant(
        "preemption takes from sequences of the batch",
        "schedule.py",
        "if s > sequence.seq_id and s not in planned",
        "if s > sequence.seq_id and s not in draft.preemptions",
    ),
    Mutant(
        "a preempted sequence decodes in the same batch",
        "draft.py",
        "[seq_id for seq_id in seq_ids if seq_id not in self.preemptions]",
        "seq_ids",
    ),
    Mutant(
        "pages are recycled by the end of a chunk, not by its start",
        "schedule.py",
        "pages_past(state, sequence, g, sequence.computed)",
        "pages_past(state, sequence, g, sequence.length - 1)",
    ),
    Mutant(
        "offload is planned without host slots",
        "draft.py",
        "if 0 < num_blocks <= self.host_left:",
        "if 0 < num_blocks:",
    ),
    Mutant(
        "a shared block counts as freed by one reader",
        "schedule.py",
        "freed = sum(supply.readers(block) == 1 for block in leaving)",
        "freed = len(leaving)",
    ),
    # draft
    Mutant(
        "a chunk in the middle of a prompt samples",
        "draft.py",
        "samples = start + count == sequence.length",
        "samples = True",
    ),
    Mutant(
        "a batch takes more tokens than its budget",
        "draft.py",
        "        self.tokens_left -= count\n",
        "",
    ),
    Mutant(
        "a prompt with forks to come does not pause",
        "draft.py",
        "if sequence.unforked and start < sequence.num_prompt - 1:",
        "if False:",
    ),
    Mutant(
        "what comes back from the host lands in blocks of another group",
        "draft.py",
        "restored = zip(sequence.host, fresh, strict=False)",
        "restored = zip(sequence.host[::-1], fresh, strict=False)",
    ),
    # admission
    Mutant(
        "the whole prompt is a hit",
        "admission.py",
        "end = min((sequence.num_known - 1) // page_size, len(block_hashes))",
        "end = min(sequence.num_known // page_size, len(block_hashes))",
    ),
    Mutant(
        "a hit of sliding groups lacks the first page of the window",
        "admission.py",
        "        for page in range(hit - 1, lowest - 1, -1):\n",
        "        for page in range(hit - 1, lowest, -1):\n",
    ),
    Mutant(
        "identical prompts are computed side by side",
        "admission.py",
        "if hit < end and block_hashes[hit] in coming:",
        "if False:",
    ),
    Mutant(
        "a fork shares the page that is being filled",
        "admission.py",
        "copy_from = tuple(table[end_page - base] for table, base in tables) if filled else ()",
        "copy_from = ()",
    ),
    Mutant(
        "a fork starts before its parent's prompt is computed",
        "admission.py",
        "if parent is not None and parent.computed < parent.num_prompt - 1:",
        "if False:",
    ),
    Mutant(
        "a prompt that waits is let in though its blocks are not there",
        "draft.py",
        "if need + reserve + self.reserved_blocks <= left:",
        "if self.reserved_blocks <= left:",
    ),
    Mutant(
        "two sequences get one row",
        "draft.py",
        "row = next(self._rows)",
        "row = self.state.free_rows[-1]",
    ),
    # state
    Mutant(
        "known tokens from inside the prompt lack the first generated ones",
        "state.py",
        "self.generated[max(start - prompt, 0) :",
        "self.generated[start - prompt :",
    ),
    Mutant(
        "known tokens to inside the prompt go on with generated ones",
        "state.py",
        ": max(end - prompt, 0)]",
        ": end - prompt]",
    ),
    Mutant(
        "a generated page is found a page late",
        "state.py",
        "(max(full, registered) + 1) * page_size - sequence.num_prompt",
        "(max(full, registered) + 2) * page_size - sequence.num_prompt",
    ),
    Mutant(
        "a page is found before its last token is computed",
        "state.py",
        "full = min(sequence.computed, sequence.num_known) // page_size",
        "full = sequence.num_known // page_size",
    ),
    Mutant(
        "the last page of an answer is not found",
        "state.py",
        "if count > sequence.hash_next_at:",
        "if request.max_new_tokens > count > sequence.hash_next_at:",
    ),
    Mutant(
        "a token in flight is counted for ever",
        "state.py",
        "        sequence.in_flight -= 1\n",
        "",
    ),
    Mutant(
        "an offloaded sequence gets blocks but not their content",
        "draft.py",
        "restore = tuple([p for slots, own in restored for p in zip(slots, own, strict=False)])",
        "restore = ()",
    ),
    Mutant(
        "an offloaded sequence is computed again from its start",
        "state.py",
        "        sequence.host = host\n",
        "        sequence.host = host\n        sequence.computed = 0\n",
    ),
    Mutant(
        "pages that left the window stay held",
        "state.py",
        "    _drop_past(state, sequence, chunk.start)\n",
        "",
    ),
    Mutant(
        "a prefix with a hole in it is a hit",
        "admission.py",
        "        if not holes:\n",
        "        if True:\n",
    ),
    Mutant(
        "a cancelled sequence keeps its row",
        "state.py",
        "        state.free_rows.append(sequence.row)\n",
        "",
    ),
    Mutant(
        "a cancelled sequence keeps its host slots",
        "state.py",
        "    _leave_host(state, sequence)\n    _release(state, sequence)\n",
        "    _release(state, sequence)\n",
    ),
    Mutant(
        "forks that have not begun outlive their cancelled parent",
        "state.py",
        "if s.parent == seq_id and s.row == NO_ROW]",
        "if s.parent == seq_id and s.row != NO_ROW]",
    ),
    Mutant(
        "the end token does not end a sequence",
        "state.py",
        "count, ended = len(generated), token in request.eos",
        "count, ended = len(generated), False",
    ),
    # packing
    Mutant(
        "the token before last is carried into the next batch",
        "packing.py",
        "[-1 if s.in_flight else (s.generated or s.request.prompt)[-1] for s in decodes]",
        "[(s.generated or s.request.prompt)[-1] for s in decodes]",
    ),
    Mutant(
        "new blocks count pages from the first new one",
        "packing.py",
        "first_new_page.append(chunk.first[group])",
        "first_new_page.append(0)",
    ),
    Mutant(
        "new blocks follow the order of planning, not of the batch",
        "packing.py",
        "for chunk in plan.ordered_chunks:\n            new_block_start",
        "for chunk in plan.chunks:\n            new_block_start",
    ),
    Mutant(
        "samples are taken from the first token of a chunk",
        "packing.py",
        "sample_index.append(len(token_ids) - 1)",
        "sample_index.append(len(token_ids) - chunk.count)",
    ),
    Mutant(
        "copies of forks are left out",
        "packing.py",
        "copies=tuple(pair for chunk in plan.chunks for pair in chunk.copies)",
        "copies=()",
    ),
    # plan, groups
    Mutant(
        "samples are in the order of planning, not of the batch",
        "plan.py",
        "tuple(chunk.seq_id for chunk in self.ordered_chunks if chunk.samples)",
        "tuple(chunk.seq_id for chunk in self.chunks if chunk.samples)",
    ),
    Mutant(
        "a block table is too narrow by a column",
        "groups.py",
        "return min(num_pages, _pages_spanned(window - 1 + max_chunk, page_size))",
        "return min(num_pages, _pages_spanned(window - 1 + max_chunk, page_size) - 1)",
    ),
    Mutant(
        "a window reaches one position too few",
        "groups.py",
        "max(0, position - window + 1) // page_size",
        "max(0, position - window + 2) // page_size",
    ),
)


def copy_with(mutant: Mutant | None, folder: Path) -> None:
    """A copy of the planning floor and of the toy device's tests, with the bug in it."""
    shutil.copytree(ROOT / "tcb" / "planning", folder / "tcb" / "planning")
    (folder / "tcb" / "__init__.py").touch()
    tests = folder / "tests" / "planning"
    tests.mkdir(parents=True)
    for name in SUPPORT:
        shutil.copy(ROOT / "tests" / "planning" / name, tests)
    if mutant is not None:
        file = folder / "tcb" / "planning" / mutant.file
        source = file.read_text("utf-8")
        assert source.count(mutant.old) == 1, f"{mutant.file} has changed: {mutant.name}"
        file.write_text(source.replace(mutant.old, mutant.new), "utf-8")


def run_tests(folder: Path) -> tuple[bool, str]:
    """Whether the tests pass in the copy, and which one did not; a run without end does not."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=line", "--no-header"]
    command += ["-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", str(folder)]
    command += ["--import-mode=importlib", "-o", f"pythonpath={folder}", "-k", CHOSEN]
    command.append(str(folder / "tests" / "planning" / "test_toy_device.py"))
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            # neither hypothesis nor a benchmark is needed, and each takes its time to load
            env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False, "no end"
    assert done.returncode in (0, 1), done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    return done.returncode == 0, lines[0].partition("::")[2] if lines else "all pass"
