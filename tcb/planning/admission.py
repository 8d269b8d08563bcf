"""Who is let in from the queue: prefix hits, forks, sequences back from preemption.

Reads the draft's `State`, writes only the draft.
"""

from bisect import bisect_left

from tcb.planning.draft import Draft
from tcb.planning.groups import first_visible_page
from tcb.planning.plan import Blocks, Chunk
from tcb.planning.state import Sequence


def plan_waiting(draft: Draft) -> None:
    """Let waiting sequences in, in order, until the first that does not fit; nobody while running
    ones lack blocks.
    """
    if draft.preemptions or draft.lacks_blocks or not draft.state.waiting:
        return
    state = draft.state
    coming = {block_hash for chunk in draft.chunks for block_hash in _computes(draft, chunk)}
    for sequence in state.waiting.values():
        if draft.is_full or draft.prompts_wait or draft.rows_left == 0:
            return
        # whoever comes in needs a page of every group at least
        if draft.supply.left < draft.num_groups:
            return
        if len(sequence.generated) + sequence.in_flight >= sequence.limit:
            continue
        parent = state.find(sequence.parent)
        if parent is not None and parent.computed < parent.num_prompt - 1:
            continue
        if parent is not None and parent.computed == parent.num_prompt - 1 and parent.tables[0]:
            fits = _plan_fork(draft, sequence, parent)
        elif sequence.host is not None:
            fits = _plan_restore(draft, sequence)
        else:
            fits = _plan_prompt(draft, sequence, coming)
        if not fits:
            return


def _computes(draft: Draft, chunk: Chunk) -> list[bytes]:
    """Digests of the full pages that this chunk completes."""
    page_size = draft.state.page_size
    block_hashes = draft.state.find(chunk.seq_id).block_hashes
    return block_hashes[chunk.start // page_size : chunk.end // page_size]


def _plan_prompt(draft: Draft, sequence: Sequence, coming: set[bytes]) -> bool:
    """A fresh prompt, or one to be computed again: behind the longest prefix that the cache
    holds.
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
        shared = tuple(
            tuple([draft.supply.find(g, block_hash) for block_hash in block_hashes[low:hit]])
            for g, low in enumerate(first)
        )
        holes = [
            blocks.index(None) + low
            for blocks, low in zip(shared, first, strict=True)
            if None in blocks
        ]
        if not holes:
            break
        end = min(holes)
    chunk = _admit(draft, sequence, hit * page_size, hit, first, shared)
    if chunk is not None:
        coming.update(_computes(draft, chunk))
    return chunk is not None


def _first_visible(draft: Draft, position: int) -> tuple[int, ...]:
    page_size, groups = draft.state.page_size, draft.state.groups
    return tuple([first_visible_page(position, group.window, page_size) for group in groups])


def _hit_pages(draft: Draft, sequence: Sequence, end: int) -> int:
    """Pages of the longest prefix, of up to `end` pages, that can be read instead of computed.

    Every full group must hold all its pages, every sliding group the pages that the next query's
    window reaches. Full groups are taken to hold no page without those before it: who reads a page
    reads these too, and gives them back later.
    """
    find, block_hashes, hit = draft.supply.find, sequence.block_hashes, end
    for g in draft.full:
        hit = bisect_left(
            range(hit), True, key=lambda page, g=g: find(g, block_hashes[page]) is None
        )
    while hit:
        missing = _missing_page(draft, sequence, hit)
        if missing is None:
            return hit
        # a longer prefix than `missing` pages would need the missing page too, or one further right
        hit = missing
    return 0


def _missing_page(draft: Draft, sequence: Sequence, hit: int) -> int | None:
    """The last page below `hit` that a sliding group would need and does not hold."""
    state, missing = draft.state, None
    for g in state.sliding:
        lowest = first_visible_page(hit * state.page_size, state.groups[g].window, state.page_size)
        for page in range(hit - 1, lowest - 1, -1):
            if draft.supply.find(g, sequence.block_hashes[page]) is None:
                missing = page if missing is None else min(missing, page)
                break
    return missing


def _may_fit(draft: Draft, sequence: Sequence, hit: int) -> bool:
    """Whether the sequence fits behind `hit` pages; in full groups the idle ones are taken to be
    the last.
    """
    supply, block_hashes, start = draft.supply, sequence.block_hashes, hit * draft.state.page_size
    first, cost = _first_visible(draft, start), 0
    for g in draft.state.sliding:
        cost += supply.cost(
            [supply.find(g, block_hash) for block_hash in block_hashes[first[g] : hit]]
        )
    for g in draft.full:

        def is_idle(page: int, g: int = g) -> bool:
            block = supply.find(g, block_hashes[page])
            return block is None or supply.cost([block]) > 0

        cost += hit - bisect_left(range(hit), True, key=is_idle)
    return _fitting(draft, sequence, start, hit, cost) > 0


def _plan_restore(draft: Draft, sequence: Sequence) -> bool:
    """A sequence whose keys and values come back from the host."""
    end_page = sequence.first[0] + len(sequence.host[0])
    shared = ((),) * draft.num_groups
    first = tuple(sequence.first)
    return _admit(draft, sequence, sequence.computed, end_page, first, shared) is not None


def _plan_fork(draft: Draft, sequence: Sequence, parent: Sequence) -> bool:
    """A fork starts at the prompt's last token: full pages are shared, the page being filled is
    copied.
    """
    start = parent.computed
    end_page, filled = divmod(start, draft.state.page_size)
    first = _first_visible(draft, start)
    tables = [(table, parent.first[g]) for g, table in enumerate(parent.tables)]
    shared = tuple(
        tuple(table[low - base : end_page - base])
        for (table, base), low in zip(tables, first, strict=True)
    )
    copy_from = tuple(table[end_page - base] for table, base in tables) if filled else ()
    return _admit(draft, sequence, start, end_page, first, shared, copy_from) is not None


def _admit(
    draft: Draft,
    sequence: Sequence,
    start: int,
    end_page: int,
    first: tuple[int, ...],
    shared: tuple[Blocks, ...],
    copy_from: Blocks = (),
) -> Chunk | None:
    """Add the first chunk of a waiting sequence, if the blocks for its whole known length are
    there.

    Alone, a sequence takes what there is: limits promise that it can always go on page by page.
    """
    supply = draft.supply
    cost = supply.cost(block for blocks in shared for block in blocks)
    count = _fitting(draft, sequence, start, end_page, cost)
    if not count:
        return None
    for blocks in shared:
        supply.claim(blocks)
    new_pages = draft.new_pages(start + count, end_page)
    draft.rows_left -= 1
    return draft.add_chunk(
        sequence,
        next(draft.rows),
        start,
        count,
        first=first,
        shared=shared,
        num_fresh=tuple([pages + new_pages for pages in _restored_pages(draft, sequence)]),
        copy_from=copy_from,
    )


def _fitting(draft: Draft, sequence: Sequence, start: int, end_page: int, cost: int) -> int:
    """How many tokens a waiting sequence may compute from `start`, when what it reads takes `cost`
    blocks out of the supply; 0 if it is to wait.
    """
    num_groups, running = draft.num_groups, len(draft.state.running)
    count = draft.tokens_within_budget(sequence, start)
    left = draft.supply.left - cost - sum(_restored_pages(draft, sequence))
    need = len(draft.full) * draft.new_pages(sequence.length, end_page)
    need += (num_groups - len(draft.full)) * draft.new_pages(start + count, end_page)
    # who was preempted comes back when the others have a page each to grow into, else it would be
    # preempted again
    reserve = running * num_groups if sequence.preempted else 0
    if need + reserve + draft.reserved_blocks <= left:
        return count
    if not draft.has_pool_to_itself:
        return 0
    count = min(count, draft.room_with(end_page, left) - start)
    assert count > 0, f"{sequence.request.id!r} fits nowhere: {left} blocks left"
    return count


def _restored_pages(draft: Draft, sequence: Sequence) -> list[int]:
    """Pages that come back from the host, by group."""
    return [0] * draft.num_groups if sequence.host is None else [len(h) for h in sequence.host]
