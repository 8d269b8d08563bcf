"""From state to plan: which sequences compute how many tokens next, and in which blocks.

Reads `State` and `Limits`, writes neither. It uses no clock, no `hash()` and no set order, so equal
states give equal plans.
"""

from tcb.planning.admission import plan_waiting
from tcb.planning.draft import Draft
from tcb.planning.limits import Limits
from tcb.planning.plan import BatchPlan
from tcb.planning.state import Sequence, State, pages_past


def plan_batch(state: State, limits: Limits) -> BatchPlan:
    """The next batch: `pending = tokens + in flight - computed`; plan until pending is 0.

    There are no phases. Running sequences come first, in the order of the policy, then waiting
    ones; a prompt, its next chunk and a decode differ only in how many tokens are pending.
    """
    draft = Draft(state, limits)
    decoding, growing, prefilling = _sort_running(state)
    if limits.policy == "prefill_first":
        _plan_each(draft, prefilling)
    draft.add_decodes(decoding)
    _plan_each(draft, growing)
    if limits.policy == "fifo":
        _plan_each(draft, prefilling)
    plan_waiting(draft)
    return draft.finish()


def _sort_running(state: State) -> tuple[list[int], list[Sequence], list[Sequence]]:
    """Ids of those that decode in room they have; those that decode into a new page; unfinished
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


def _plan_each(draft: Draft, sequences: list[Sequence]) -> None:
    """One chunk of each running sequence that needs new pages, or whose prompt is not done."""
    for sequence in sequences:
        if draft.is_full:
            return
        if sequence.seq_id in draft.preemptions:
            continue
        if sequence.length - sequence.computed > 1 and draft.prompts_wait:
            return
        _plan_running(draft, sequence)


def _plan_running(draft: Draft, sequence: Sequence) -> None:
    """Its pending tokens, as many as the budget and the blocks allow."""
    supply, start, end_page = draft.supply, sequence.computed, draft.end_page(sequence)
    count = draft.tokens_within_budget(sequence, start)
    need = draft.num_groups * draft.new_pages(start + count, end_page)
    leaving = _leaving(draft.state, sequence)
    freed = sum(supply.readers(block) == 1 for block in leaving)
    # a decode needs its page; a prompt that finds one page more goes on with a shorter chunk
    _preempt_newer(draft, sequence, min(need, draft.num_groups) - freed)
    if need > supply.left + freed:
        count = draft.room_with(supply.left + freed, end_page) - start
    if count > 0:
        draft.extend(sequence, count, leaving)
    else:
        draft.starve()


def _leaving(state: State, sequence: Sequence) -> list[int]:
    """Blocks whose pages no later query reads: recycled in place where nobody else wants them."""
    blocks = []
    for g in state.sliding:
        blocks += sequence.tables[g][: pages_past(state, sequence, g, sequence.computed)]
    return blocks


def _preempt_newer(draft: Draft, sequence: Sequence, need: int) -> None:
    """Preempt sequences that came later, the newest first, until `need` blocks are there.

    Only later ones: so nobody waits for ever for those who came after.
    """
    if need <= draft.supply.left:
        return
    planned = {*draft.decodes, *(chunk.seq_id for chunk in draft.chunks), *draft.preemptions}
    running = draft.state.running
    newer = sorted(s for s in running if s > sequence.seq_id and s not in planned)
    while need > draft.supply.left and newer:
        draft.preempt(running[newer.pop()])
