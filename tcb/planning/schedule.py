"""From state to plan: which sequences compute how many tokens next, and in which blocks.

Reads `State` and `Limits`, writes neither; uses no clock, no `hash()` and no set order, so equal
states give equal plans.
"""

from tcb.planning.admission import plan_waiting
from tcb.planning.draft import Draft
from tcb.planning.limits import Limits
from tcb.planning.plan import BatchPlan, Preemption
from tcb.planning.state import Sequence, State, pages_left


def plan_batch(state: State, limits: Limits) -> BatchPlan:
    """The next batch: running sequences first, in the order of the policy, then whom the queue lets
    in.
    """
    draft = Draft(state, limits)
    decoding, growing, prefilling = _sort_running(state)
    if limits.policy == "prefill_first":
        _plan_each(draft, prefilling)
        draft.add_decodes(_not_preempted(draft, decoding))
        _plan_each(draft, growing)
    else:
        draft.add_decodes(decoding)
        _plan_each(draft, growing)
        _plan_each(draft, prefilling)
    plan_waiting(draft)
    return draft.finish()


def _sort_running(state: State) -> tuple[list[int], list[Sequence], list[Sequence]]:
    """Keys that decode in room they have; sequences that decode into a new page; unfinished
    prompts.
    """
    decoding, growing, prefilling = [], [], []
    for seq_id, sequence in state.running.items():
        # numbers that stay small in a long context: Python makes an object of every large one
        made = len(sequence.generated) + sequence.in_flight
        pending = made - (sequence.computed - sequence.num_prompt)
        if pending == 1:
            if made < sequence.limit:
                if sequence.computed < sequence.room:
                    decoding.append(seq_id)
                else:
                    growing.append(sequence)
        elif pending > 1:
            prefilling.append(sequence)
    return decoding, growing, prefilling


def _not_preempted(draft: Draft, seq_ids: list[int]) -> list[int]:
    return (
        [seq_id for seq_id in seq_ids if seq_id not in draft.preempted]
        if draft.preempted
        else seq_ids
    )


def _plan_each(draft: Draft, sequences: list[Sequence]) -> None:
    for sequence in sequences:
        if draft.is_full:
            return
        if sequence.seq_id in draft.preempted:
            continue
        if sequence.length - sequence.computed > 1 and draft.prompts_wait:
            return
        _plan_running(draft, sequence)


def _plan_running(draft: Draft, sequence: Sequence) -> None:
    """One chunk of a running sequence that needs new pages, or whose prompt is not done."""
    supply, start = draft.supply, sequence.computed
    count = draft.tokens_within_budget(sequence, start)
    end_page = sequence.room // draft.state.page_size
    need = draft.num_groups * draft.new_pages(start + count, end_page)
    leaving = _leaving(draft.state, sequence)
    freed = sum(supply.readers(block) == 1 for block in leaving)
    # a decode needs its page; a prompt that finds at least one more page goes on with a shorter
    # chunk
    _preempt_newer(draft, sequence, min(need, draft.num_groups) - freed)
    if need > supply.left + freed:
        count = draft.room_with(end_page, supply.left + freed) - start
    if count <= 0:
        draft.lacks_blocks = True
        return
    for block in leaving:
        supply.release(block)
    new_pages = draft.new_pages(start + count, end_page)
    draft.add_chunk(
        sequence,
        sequence.row,
        start,
        count,
        first=(end_page,) * draft.num_groups,
        shared=((),) * draft.num_groups,
        num_fresh=(new_pages,) * draft.num_groups,
    )


def _leaving(state: State, sequence: Sequence) -> list[int]:
    """Blocks whose pages no later query reads: recycled in place where nobody else wants them."""
    blocks = []
    for g in state.sliding:
        blocks += sequence.tables[g][: pages_left(state, sequence, g, sequence.computed)]
    return blocks


def _preempt_newer(draft: Draft, sequence: Sequence, need: int) -> None:
    """Take blocks from sequences that came later, the newest first, until `need` are there.

    Only later ones: so the oldest always goes on, and everybody's turn comes.
    """
    if need <= draft.supply.left:
        return
    planned = {*draft.decodes, *(chunk.seq_id for chunk in draft.chunks), *draft.preempted}
    newer = sorted(
        seq_id
        for seq_id in draft.state.running
        if seq_id > sequence.seq_id and seq_id not in planned
    )
    while need > draft.supply.left and newer:
        _preempt(draft, draft.state.running[newer.pop()])


def _preempt(draft: Draft, victim: Sequence) -> None:
    # pages behind the window are not worth a host slot, nor a block when the sequence comes back
    kept = [
        table[pages_left(draft.state, victim, g, victim.computed) :]
        for g, table in enumerate(victim.tables)
    ]
    num_blocks = sum(map(len, kept))
    if 0 < num_blocks <= draft.host_left:
        draft.host_left -= num_blocks
        # zip asks the table first, so that no host slot is drawn in vain
        pairs = tuple(tuple(zip(table, draft.host, strict=False)) for table in kept)
        draft.preemptions.append(Preemption(victim.seq_id, "offload", pairs))
    else:
        draft.preemptions.append(Preemption(victim.seq_id, "recompute"))
    draft.preempted.add(victim.seq_id)
    for table in victim.tables:
        for block in table:
            draft.supply.release(block)
