"""Admission from the queue: prefix hits, forks, sequences that come back after preemption.

Reads the draft's `State` and tells the draft whom to admit.
"""

from bisect import bisect_left

from tcb.planning.draft import Draft
from tcb.planning.groups import first_visible_page
from tcb.planning.plan import Chunk
from tcb.planning.state import Sequence


def plan_waiting(draft: Draft) -> None:
    """Admit waiting sequences, in order, until the first that does not fit; none while running ones
    lack blocks.
    """
    state = draft.state
    if not draft.admits or not state.waiting:
        return
    coming = {one for chunk in draft.chunks for one in _completed(draft, chunk)}
    for sequence in state.waiting.values():
        if draft.is_full or draft.prompts_wait or draft.rows_left == 0:
            return
        # every admitted sequence needs a page of every group at least
        if draft.supply.left < draft.num_groups:
            return
        if len(sequence.generated) + sequence.in_flight >= sequence.limit:
            continue
        parent = None if sequence.parent is None else state.find(sequence.parent)
        if parent is not None and parent.computed < parent.num_prompt - 1:
            continue
        if parent is not None and parent.computed == parent.num_prompt - 1 and parent.tables[0]:
            fits = _plan_fork(draft, sequence, parent)
        elif sequence.host:
            fits = _plan_restore(draft, sequence)
        else:
            fits = _plan_prompt(draft, sequence, coming)
        if not fits:
            return


def _completed(draft: Draft, chunk: Chunk) -> list[bytes]:
    """Hashes of the full pages that this chunk completes."""
    page_size = draft.state.page_size
    block_hashes = draft.state.live(chunk.seq_id).block_hashes
    return block_hashes[chunk.start // page_size : chunk.end // page_size]


def _plan_prompt(draft: Draft, sequence: Sequence, coming: set[bytes]) -> bool:
    """Admit a prompt, new or to be recomputed, behind the longest prefix that the cache holds.

    coming   hashes of the pages that this batch completes; grows with the prompt's own
    """
    page_size, block_hashes = draft.state.page_size, sequence.block_hashes
    # at least one token is left to compute
    end = min((sequence.num_known - 1) // page_size, len(block_hashes))
    while True:
        hit = _hit_pages(draft, sequence, end)
        if hit < end and block_hashes[hit] in coming:
            # this batch computes the next page of the same content: one step later it is a hit
            return True
        # a prompt that waits for blocks is asked in every step: not for every page of it
        if not draft.has_pool_to_itself and not _may_fit(draft, sequence, hit):
            return False
        first = _first_visible(draft, hit * page_size)
        found = [
            [draft.supply.find(g, block_hash) for block_hash in block_hashes[low:hit]]
            for g, low in enumerate(first)
        ]
        holes = [
            blocks.index(None) + low
            for blocks, low in zip(found, first, strict=True)
            if None in blocks
        ]
        if not holes:
            break
        end = min(holes)
    shared = tuple(tuple([block for block in blocks if block is not None]) for blocks in found)
    if not draft.admit(sequence, hit * page_size, hit, first, shared):
        return False
    coming.update(_completed(draft, draft.chunks[-1]))
    return True


def _first_visible(draft: Draft, position: int) -> tuple[int, ...]:
    """The first page of each group that a query at `position` reads."""
    page_size, groups = draft.state.page_size, draft.state.groups
    return tuple([first_visible_page(position, group.window, page_size) for group in groups])


def _hit_pages(draft: Draft, sequence: Sequence, end: int) -> int:
    """Pages of the longest prefix, of up to `end` pages, that can be read instead of computed.

    Every full group must hold all its pages, every sliding group the pages that the next query's
    window reaches. Full groups are taken to hold no page without those before it: a reader of a
    page reads these too, and gives them back later.
    """
    find, block_hashes, hit = draft.supply.find, sequence.block_hashes, end
    for g in draft.full_groups:

        def is_missing(page: int, g: int = g) -> bool:
            return find(g, block_hashes[page]) is None

        hit = bisect_left(range(hit), True, key=is_missing)
    while hit:
        missing = _missing_page(draft, sequence, hit)
        if missing is None:
            return hit
        # every longer prefix, up to `hit`, needs the missing page too
        hit = missing
    return 0


def _missing_page(draft: Draft, sequence: Sequence, hit: int) -> int | None:
    """The last page below `hit` that a sliding group needs and lacks; of several groups the
    smallest.
    """
    state, missing = draft.state, None
    for g in state.sliding:
        lowest = first_visible_page(hit * state.page_size, state.groups[g].window, state.page_size)
        for page in range(hit - 1, lowest - 1, -1):
            if draft.supply.find(g, sequence.block_hashes[page]) is None:
                missing = page if missing is None else min(missing, page)
                break
    return missing


def _may_fit(draft: Draft, sequence: Sequence, hit: int) -> bool:
    """Whether the sequence fits behind `hit` pages; idle pages of full groups count as the last."""
    supply, block_hashes, start = draft.supply, sequence.block_hashes, hit * draft.state.page_size
    first, cost = _first_visible(draft, start), 0
    for g in draft.state.sliding:
        found = [supply.find(g, one) for one in block_hashes[first[g] : hit]]
        assert None not in found, f"group {g} lacks a page of a hit of {hit} pages"
        cost += supply.cost(found)
    for g in draft.full_groups:

        def is_idle(page: int, g: int = g) -> bool:
            block = supply.find(g, block_hashes[page])
            return block is None or supply.cost([block]) > 0

        cost += hit - bisect_left(range(hit), True, key=is_idle)
    return draft.fitting(sequence, start, hit, cost) > 0


def _plan_restore(draft: Draft, sequence: Sequence) -> bool:
    """Admit a sequence whose keys and values come back from the host."""
    end_page = sequence.first[0] + len(sequence.host[0])
    shared = ((),) * draft.num_groups
    return draft.admit(sequence, sequence.computed, end_page, tuple(sequence.first), shared)


def _plan_fork(draft: Draft, sequence: Sequence, parent: Sequence) -> bool:
    """Admit a fork at the prompt's last token: full pages are shared, the one being filled is
    copied.
    """
    start = parent.computed
    end_page, filled = divmod(start, draft.state.page_size)
    first = _first_visible(draft, start)
    tables = list(zip(parent.tables, parent.first, strict=True))
    shared = tuple(
        tuple(table[low - base : end_page - base])
        for (table, base), low in zip(tables, first, strict=True)
    )
    copy_from = tuple(table[end_page - base] for table, base in tables) if filled else ()
    return draft.admit(sequence, start, end_page, first, shared, copy_from)
