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
    edit          [edits]           blocks of new pages, group after group, in each group sequence
                                    after sequence
    edit_start    [groups * sequences + 1]       entry g * sequences + i, of sequence i in group g,
                                    owns the blocks edit[edit_start[entry]:edit_start[entry + 1]]
    edit_page     [groups * sequences]           the logical page of the first of them; the others
                                    follow
    offload       (block, host slot) pairs       first of all come offload, restore and copies,
    restore       (host slot, block) pairs       in this order
    copies        (source, target) blocks
    admitted      (row, how it samples) of the sequences that this batch lets in
    context_end   the most positions that a sequence has after this batch
    """

    token_ids: array
    positions: array
    query_start: array
    context_len: array
    rows: array
    sample_index: array
    sample_row: array
    edit: array
    edit_start: array
    edit_page: array
    offload: Pairs
    restore: Pairs
    copies: Pairs
    admitted: tuple[tuple[int, SamplingParams], ...]
    num_decodes: int
    context_end: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the batch."""
        return len(self.token_ids)

    @property
    def num_sequences(self) -> int:
        """Sequences of the batch."""
        return len(self.rows)


def pack_batch(state: State, plan: BatchPlan) -> PackedBatch:
    """Lay the plan out. Reads only; call it before `apply_plan`."""
    running = state.running
    decodes = [running[key] for key in plan.decodes]
    # a decode's pending token is known, or the last one sampled on the device
    token_ids = [-1 if s.in_flight else (s.generated or s.request.prompt)[-1] for s in decodes]
    positions = [s.computed for s in decodes]
    rows = [s.row for s in decodes]
    context_len = positions.copy()
    query_start = list(range(len(decodes) + 1))
    sample_index = list(range(len(decodes)))
    sample_row = rows.copy()
    edit, edit_start, edit_page = _pack_edits(len(state.groups), plan)
    num_decodes = len(decodes)
    for chunk in plan.ordered_chunks:
        sequence = state.find(chunk.key)
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
        edit=edit,
        edit_start=edit_start,
        edit_page=edit_page,
        offload=tuple(p for relief in plan.relief for pairs in relief.offload for p in pairs),
        restore=tuple(pair for chunk in plan.chunks for pair in chunk.restore),
        copies=tuple(pair for chunk in plan.chunks for pair in chunk.copies),
        admitted=tuple(
            (chunk.row, state.waiting[chunk.key].request.sampling)
            for chunk in plan.chunks
            if chunk.key in state.waiting
        ),
        num_decodes=num_decodes,
        context_end=max(positions, default=-1) + 1,
    )


def _chunk_tokens(sequence: Sequence, chunk: Chunk) -> list[int]:
    known = sequence.known(chunk.start, chunk.end)
    return known if len(known) == chunk.count else [*known, *[-1] * (chunk.count - len(known))]


def _pack_edits(num_groups: int, plan: BatchPlan) -> tuple[array, array, array]:
    """`edit`, `edit_start` and `edit_page`: what the plan changes in the block tables."""
    edit, edit_start, edit_page = array("i"), array("i"), array("i")
    for group in range(num_groups):
        # sequences that decode in room they have get no page
        edit_start.extend([len(edit)] * len(plan.decodes))
        edit_page.extend([0] * len(plan.decodes))
        for chunk in plan.ordered_chunks:
            edit_start.append(len(edit))
            edit_page.append(chunk.first[group])
            edit.extend(chunk.shared[group])
            edit.extend(chunk.fresh[group])
    edit_start.append(len(edit))
    return edit, edit_start, edit_page
