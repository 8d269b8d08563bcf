"""Who is let in from the queue: prefix hits, forks, sequences back from relief.

Reads the draft's `State`, writes only the draft.
"""

from tcb.planning.draft import Draft
from tcb.planning.groups import first_visible_page
from tcb.planning.plan import Blocks, Chunk
from tcb.planning.state import Sequence


def plan_waiting(draft: Draft) -> None:
    """Let waiting sequences in, in order, until the first that does not fit; nobody while running
    ones lack blocks.
    """
    if draft.relief or draft.starving:
        return
    state = draft.state
    coming = {digest for chunk in draft.chunks for digest in _computes(draft, chunk)}
    for sequence in state.waiting.values():
        if draft.is_full or draft.keeps_margin or draft.rows_left == 0:
            return
        if sequence.length >= sequence.limit:
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
    digests = draft.state.find(chunk.key).digests
    return digests[chunk.start // page_size : chunk.end // page_size]


def _plan_prompt(draft: Draft, sequence: Sequence, coming: set[bytes]) -> bool:
    """A fresh prompt, or one to be computed again: behind the longest prefix that the cache
    holds.
    """
    state, groups = draft.state, draft.state.groups
    hit = _hit_pages(draft, sequence) if state.share else 0
    last_hit = (sequence.length - 1) // state.page_size
    if hit < min(last_hit, len(sequence.digests)) and sequence.digests[hit] in coming:
        # this batch computes the next page of the same content: one step later it is a hit
        return True
    start = hit * state.page_size
    first = tuple(first_visible_page(start, group.window, state.page_size) for group in groups)
    shared = tuple(
        tuple(draft.supply.find(g, digest) for digest in sequence.digests[first[g] : hit])
        for g in range(len(groups))
    )
    chunk = _admit(draft, sequence, start, hit, first, shared)
    if chunk is None:
        return False
    coming.update(_computes(draft, chunk))
    return True


def _hit_pages(draft: Draft, sequence: Sequence) -> int:
    """Pages of the longest prefix that can be read instead of computed; at least one token is left
    to compute.

    Every full group must hold all its pages, every sliding group the pages that the next query's
    window reaches.
    """
    state, find, digests = draft.state, draft.supply.find, sequence.digests
    hit = min((len(sequence.tokens) - 1) // state.page_size, len(digests))
    for g, group in enumerate(state.groups):
        if group.window is None:
            hit = next((page for page in range(hit) if find(g, digests[page]) is None), hit)
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
    for g, group in enumerate(state.groups):
        if group.window is None:
            continue
        lowest = first_visible_page(hit * state.page_size, group.window, state.page_size)
        for page in range(hit - 1, lowest - 1, -1):
            if draft.supply.find(g, sequence.digests[page]) is None:
                missing = page if missing is None else min(missing, page)
                break
    return missing


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
    state, start = draft.state, parent.computed
    end_page, filled = divmod(start, state.page_size)
    first = tuple(
        first_visible_page(start, group.window, state.page_size) for group in state.groups
    )
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
    supply, num_groups = draft.supply, draft.num_groups
    restored = tuple(map(len, sequence.host)) if sequence.host is not None else (0,) * num_groups
    count = draft.wanted(sequence, start)
    shared_cost = supply.cost(block for blocks in shared for block in blocks)
    left = supply.left - shared_cost - sum(restored)
    num_sliding = num_groups - draft.num_full
    need = draft.num_full * draft.new_pages(sequence.length, end_page)
    need += num_sliding * draft.new_pages(start + count, end_page)
    # who was relieved comes back when the others have a page each to grow into, else it would be
    # relieved again
    reserve = len(draft.state.running) * num_groups if sequence.relieved else 0
    if need + reserve + draft.owed > left:
        if draft.state.running or draft.is_started:
            return None
        count = min(count, draft.reach(end_page, left) - start)
        assert count > 0, f"{sequence.request.id!r} fits nowhere: {left} blocks left"
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
        num_fresh=tuple(pages + new_pages for pages in restored),
        copy_from=copy_from,
    )
