"""A plan laid out as plain integers, in the order in which the device reads them.

Reads `State` (as it is before the plan is applied) and a plan, writes neither; knows nothing of
tensors.
"""

from array import array
from dataclasses import dataclass

from tcb.planning.plan import BatchPlan, Chunk, Pairs
from tcb.planning.request import SamplingParams
from tcb.planning.state import Sequence, State


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One batch: first the sequences with one token (`num_decodes` of them), then longer chunks.

    token_ids     [tokens]          -1: known on the device only, the row's last sampled token
    positions     [tokens]
    query_start   [sequences + 1]   sequence i owns the tokens query_start[i]:query_start[i + 1]
    context_len   [sequences]       positions before this batch's
    rows          [sequences]       row of every group's block table
    sample_index  [samples]         tokens whose logits are sampled
    sample_row    [samples]         their rows
    new_block         [new blocks]                  what comes into the block tables, see below
    new_block_start   [groups * sequences + 1]      where each entry's blocks start, and the end
    first_new_page    [groups * sequences]          the logical page of an entry's first block
    offload       (block, host slot) pairs       first of all come offload, restore and copies,
    restore       (host slot, block) pairs       in this order
    copies        (source, target) blocks
    admitted      (row, how it samples) of the sequences that this batch lets in
    max_seq_len   the most positions that a sequence has after this batch

    An entry g * sequences + i is sequence i in group g. Two groups and three sequences, of which
    the first decodes in room that it has, while the second gets pages 1 and 2 and the third page 6:

        entry              0       1       2       3       4       5
        new_block              | 7   2 |   4   |       | 9   5 |   8   |
        new_block_start    0   |   0   |   2   |   3   |   3   |   5   |   6
        first_new_page     0   |   1   |   6   |   0   |   1   |   6   |
    """

    token_ids: array
    positions: array
    query_start: array
    context_len: array
    rows: array
    sample_index: array
    sample_row: array
    new_block: array
    new_block_start: array
    first_new_page: array
    offload: Pairs
    restore: Pairs
    copies: Pairs
    admitted: tuple[tuple[int, SamplingParams], ...]
    num_decodes: int
    max_seq_len: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the batch."""
        return len(self.token_ids)


def pack_batch(state: State, plan: BatchPlan) -> PackedBatch:
    """Lay the plan out. Reads only; call it before `apply_plan`."""
    running = state.running
    decodes = [running[seq_id] for seq_id in plan.decodes]
    # a decode's pending token is known, or the last one sampled on the device
    token_ids = [-1 if s.in_flight else (s.generated or s.request.prompt)[-1] for s in decodes]
    positions = [s.computed for s in decodes]
    rows = [s.row for s in decodes]
    context_len = positions.copy()
    query_start = list(range(len(decodes) + 1))
    sample_index = list(range(len(decodes)))
    sample_row = rows.copy()
    new_block, new_block_start, first_new_page = _pack_new_blocks(len(state.groups), plan)
    num_decodes = len(decodes)
    for chunk in plan.ordered_chunks:
        sequence = state.live(chunk.seq_id)
        token_ids += _chunk_tokens(sequence, chunk)
        positions += range(chunk.start, chunk.end)
        rows.append(chunk.row)
        context_len.append(chunk.start)
        query_start.append(len(token_ids))
        num_decodes += chunk.count == 1
        if chunk.samples:
            sample_index.append(len(token_ids) - 1)
            sample_row.append(chunk.row)
    return PackedBatch(
        token_ids=array("i", token_ids),
        positions=array("i", positions),
        query_start=array("i", query_start),
        context_len=array("i", context_len),
        rows=array("i", rows),
        sample_index=array("i", sample_index),
        sample_row=array("i", sample_row),
        new_block=new_block,
        new_block_start=new_block_start,
        first_new_page=first_new_page,
        offload=tuple(
            p for preemption in plan.preemptions for pairs in preemption.offload for p in pairs
        ),
        restore=tuple(pair for chunk in plan.chunks for pair in chunk.restore),
        copies=tuple(pair for chunk in plan.chunks for pair in chunk.copies),
        admitted=tuple(
            (chunk.row, state.waiting[chunk.seq_id].request.sampling)
            for chunk in plan.chunks
            if chunk.seq_id in state.waiting
        ),
        num_decodes=num_decodes,
        max_seq_len=max(positions, default=-1) + 1,
    )


def _chunk_tokens(sequence: Sequence, chunk: Chunk) -> list[int]:
    known = sequence.known(chunk.start, chunk.end)
    return known if len(known) == chunk.count else [*known, *[-1] * (chunk.count - len(known))]


def _pack_new_blocks(num_groups: int, plan: BatchPlan) -> tuple[array, array, array]:
    """`new_block`, `new_block_start` and `first_new_page`: the plan's changes of the tables."""
    new_block, new_block_start, first_new_page = array("i"), array("i"), array("i")
    for group in range(num_groups):
        # sequences that decode in room they have get no page
        new_block_start.extend([len(new_block)] * len(plan.decodes))
        first_new_page.extend([0] * len(plan.decodes))
        for chunk in plan.ordered_chunks:
            new_block_start.append(len(new_block))
            first_new_page.append(chunk.first[group])
            new_block.extend(chunk.shared[group])
            new_block.extend(chunk.fresh[group])
    new_block_start.append(len(new_block))
    return new_block, new_block_start, first_new_page
