"""What each public operation means: plain torch and einops, dense and slow, in any dtype.

    page   = position // page_size; column  page % columns  of a block table names its block
    slot   = block * page_size + position % page_size
    score  = scale * q . k, or softcap * tanh(scale * q . k / softcap)
    out    = sum of softmax(score) * v over the keys that q sees; a sink is a score without a v

A query sees the keys up to its own position, with a window only the last `window` of these. Names,
shapes and order are those of the public operations; nothing is checked, and no `out` is taken.
"""

from collections.abc import Sequence
from typing import Any

import torch
from einops import einsum, rearrange, repeat
from torch import Tensor


def scores(
    query: Tensor, keys: Tensor, *, softcap: float | None = None, scale: float | None = None
) -> Tensor:
    """Scores [heads, tokens, length] before any mask; heads of a group share a key-value head."""
    grouped = rearrange(query, "t (kv group) dim -> kv group t dim", kv=keys.shape[1])
    score = einsum(grouped, keys, "kv group t dim, key kv dim -> kv group t key")
    score = rearrange(score, "kv group t key -> (kv group) t key")
    score = score * (query.shape[2] ** -0.5 if scale is None else scale)
    return score if softcap is None else softcap * torch.tanh(score / softcap)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    window: int | None = None,
    sinks: Tensor | None = None,
    **factors: float | None,
) -> Tensor:
    """Attention of the last tokens of one sequence over all its keys: [tokens, heads, value_dim].

    query [tokens, heads, dim]   keys [length, kv_heads, dim]   values [length, kv_heads, value_dim]
    """
    tokens, length = len(query), len(keys)
    position = torch.arange(length - tokens, length, device=query.device)
    distance = rearrange(position, "t -> t 1") - torch.arange(length, device=query.device)
    seen = (distance >= 0) & (distance < (length if window is None else window))
    score = scores(query, keys, **factors).masked_fill(~seen, float("-inf"))
    if sinks is not None:
        sink = repeat(sinks.to(score.dtype), "head -> head t 1", t=tokens)
        score = torch.cat([score, sink], dim=-1)
    weight = score.softmax(-1)[..., :length]
    weight = rearrange(weight, "(kv group) t key -> kv group t key", kv=keys.shape[1])
    out = einsum(weight, values, "kv group t key, key kv dim -> t kv group dim")
    return rearrange(out, "t kv group dim -> t (kv group) dim")


def read(cache: Tensor, blocks: Tensor, end: int, most: int | None) -> Tensor:
    """Keys or values of the last `most` positions before `end`; blocks [columns] of a sequence."""
    first = 0 if most is None else max(0, end - most)
    position = torch.arange(first, end, device=cache.device)
    page, within = position // cache.shape[1], position % cache.shape[1]
    return cache[blocks[page % len(blocks)].long(), within]


def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    *,
    window: int | None = None,
    **options: Any,
) -> Tensor:
    """New tokens of each sequence over its context and themselves; tokens of no sequence give 0."""
    out = query.new_zeros(*query.shape[:2], value.shape[2])
    most, starts = None if window is None else window - 1, query_start.tolist()
    for i, context in enumerate(context_len.tolist()):
        own, blocks = slice(starts[i], starts[i + 1]), block_table[i]
        keys = torch.cat([read(key_cache, blocks, context, most), key[own]])
        values = torch.cat([read(value_cache, blocks, context, most), value[own]])
        out[own] = attend(query[own], keys, values, window=window, **options)
    return out


def paged_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_len: Tensor,
    *,
    window: int | None = None,
    **options: Any,
) -> Tensor:
    """The newest token of each sequence over all that the cache holds of it; 0 if that is none."""
    out = query.new_zeros(*query.shape[:2], value_cache.shape[3])
    for i, length in enumerate(context_len.tolist()):
        keys = read(key_cache, block_table[i], length, window)
        values = read(value_cache, block_table[i], length, window)
        out[i] = attend(query[[i]], keys, values, **options)[0]
    return out


def write_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot: Tensor
) -> None:
    """Store token i in slot[i]; a negative slot is padding."""
    for new, cache in ((key, key_cache), (value, value_cache)):
        for token, at in zip(new, slot.tolist(), strict=True):
            if at >= 0:
                cache[divmod(at, cache.shape[1])] = token.to(cache.dtype)


def page_tables(
    tables: Sequence[Tensor],
    edit: Tensor,
    edit_start: Tensor,
    edit_page: Tensor,
    row: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    page_size: int,
    *,
    num_pages: int | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Enter new blocks into the rows of a batch; its tokens' slots, and its block tables.

    Sequence i has row row[i] of each group's table; a negative one is padding and holds no block.
    Of group g it gets the blocks edit[edit_start[e]:edit_start[e + 1]], e = g * sequences + i, for
    its pages from edit_page[e] on. A token whose page has no block has slot -1.
    """
    starts, contexts = query_start.tolist(), context_len.tolist()
    slots: list[list[int]] = [[] for _ in tables]
    seen = []
    for g, table in enumerate(tables):
        columns = table.shape[1]
        for i, at in enumerate(row.tolist()):
            entry = g * len(row) + i
            new = edit[edit_start[entry] : edit_start[entry + 1]]
            for page, block in enumerate(new, int(edit_page[entry])):
                table[at, page % columns] = block
            for position in range(contexts[i], contexts[i] + starts[i + 1] - starts[i]):
                page, within = divmod(position, page_size)
                block = -1 if at < 0 else int(table[at, page % columns])
                slots[g].append(-1 if block < 0 else block * page_size + within)
        seen.append(torch.where(rearrange(row, "i -> i 1") < 0, -1, table[row])[:, :num_pages])
    return torch.tensor(slots, dtype=torch.int64), tuple(seen)


def copy_blocks(cache: Tensor, source: Tensor, target: Tensor) -> None:
    """cache[target[i]] = cache[source[i]]; no block is both read and written."""
    cache[target] = cache[source]


def gather_blocks(cache: Tensor, block: Tensor, out: Tensor) -> None:
    """out[i] = cache[block[i]]."""
    out.copy_(cache[block])


def scatter_blocks(data: Tensor, cache: Tensor, block: Tensor) -> None:
    """cache[block[i]] = data[i]."""
    cache[block] = data


def sample(
    logits: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
    do_sample: Tensor,
) -> tuple[Tensor, Tensor]:
    """One token a row and its log-probability, in the dtype of the logits [rows, vocab].

    A row with do_sample takes the first id up to which probabilities sum to more than its number of
    `uniform` in [0, 1), which seed and position key; other rows take the lowest id of the highest.
    """
    tokens, logprobs = [], []
    for row, logit in enumerate(logits):
        logprob, token = logit.log_softmax(-1), logit.argmax()
        if do_sample[row]:
            limits = int(top_k[row]), float(top_p[row]), float(min_p[row])
            logprob = filtered(logit, float(temperature[row]), *limits)
            token = (logprob.exp().cumsum(-1) > uniform[row]).int().argmax()
        tokens.append(token)
        logprobs.append(logprob[token])
    return torch.stack(tokens), torch.stack(logprobs)


def filtered(logit: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """The log-probabilities [vocab] that a row draws from; those of removed tokens are -inf.

    top-k keeps what is no lower than the k-th highest; top-p the fewest best tokens, lowest ids
    first where they tie, that reach top_p; min-p what has min_p of the highest probability.
    """
    score = logit / temperature
    if 0 < top_k < len(score):
        score = score.masked_fill(score < score.topk(top_k).values[-1], float("-inf"))
    if top_p < 1:
        order = score.argsort(descending=True, stable=True)
        probability = score.softmax(-1)[order]
        is_lost = probability.cumsum(-1) - probability >= top_p
        is_lost[0] = False
        score = score.index_fill(0, order[is_lost], float("-inf"))
    probability = score.softmax(-1)
    score = score.masked_fill(probability < min_p * probability.max(), float("-inf"))
    return score.log_softmax(-1)
