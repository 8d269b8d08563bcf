"""A device without tensors: a slot holds a hash of all that its token could see, and the next token
is a hash of what the block tables read back.

It knows nothing of plans or of the state, only `PackedBatch`: what that does not say is not done.
"""

from collections.abc import Iterable, Sequence

from tcb.planning.groups import LayerGroup
from tcb.planning.packing import PackedBatch
from tcb.planning.request import Request

VOCAB = 211
# about a tenth of the vocabulary, so that some requests end early
EOS = frozenset(range(3, VOCAB, 11))
UNWRITTEN = -1


class ToyModel:
    """What stands in for a transformer: `weights` is the salt of every hash."""

    def __init__(self, groups: Sequence[LayerGroup], weights: int = 0):
        self.windows = [group.window for group in groups]
        self.weights = weights

    def extend(self, contexts: list[list[int]], tokens: Iterable[int], start: int) -> None:
        """Append the values of tokens from position `start`; contexts end there, with at least a
        window each.

        A value depends on its group, its token, its position and on everything that a query at that
        position sees.
        """
        for position, token in enumerate(tokens, start):
            seen = (self._seen(contexts, g, 1) for g in range(len(contexts)))
            value = hash((self.weights, position, token, *seen))
            for g, context in enumerate(contexts):
                context.append(hash((value, g)))

    def next_token(self, contexts: list[list[int]]) -> int:
        """The token that follows the last position of the contexts."""
        return hash(tuple(self._seen(contexts, g, 0) for g in range(len(contexts)))) % VOCAB

    def _seen(self, contexts, group, reserved):
        context, window = contexts[group], self.windows[group]
        if window is None:
            return hash(tuple(context))
        return hash(tuple(context[max(0, len(context) - window + reserved) :]))


def alone(
    groups: Sequence[LayerGroup],
    request: Request,
    weights: int = 0,
    changes: Sequence[tuple[int, int]] = (),
) -> list[int]:
    """All tokens of a request served by itself; changes are (tokens known, weights then on)."""
    model, contexts, tokens = ToyModel(groups, weights), [[] for _ in groups], list(request.prompt)
    changes = list(changes)
    while True:
        while changes and changes[0][0] == len(tokens):
            model = ToyModel(groups, changes.pop(0)[1])
            contexts = [[] for _ in groups]
        done = len(contexts[0])
        model.extend(contexts, tokens[done:], done)
        tokens.append(model.next_token(contexts))
        if tokens[-1] in request.eos or len(tokens) - len(request.prompt) >= request.max_new_tokens:
            return tokens


class ToyDevice:
    """Block tables, one pool of slots for all groups, host slots, the last token of every row."""

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        page_size: int,
        num_blocks: int,
        rows: int,
        columns: Sequence[int],
        host_blocks: int,
    ):
        self.model = ToyModel(groups)
        self.page_size = page_size
        self.columns = columns
        self.tables = [[[UNWRITTEN] * width for _ in range(rows)] for width in columns]
        self.memory = [[UNWRITTEN] * page_size for _ in range(num_blocks)]
        self.host = [[UNWRITTEN] * page_size for _ in range(host_blocks)]
        self.last_token = [UNWRITTEN] * rows
        # row by block that the last launch wrote
        self.written: dict[int, int] = {}

    def launch(self, batch: PackedBatch) -> list[int]:
        """Carry the batch out; returns one token for each of its samples."""
        self._move(batch)
        self._enter_new_blocks(batch)
        spans = [self._span(batch, i) for i in range(len(batch.rows))]
        before = [self._read(row, start) for row, start, _ in spans]
        values = [self._compute(batch, i, spans[i], before[i]) for i in range(len(spans))]
        self.written = {}
        for (row, start, end), contexts in zip(spans, values, strict=True):
            self._write(row, start, end, contexts)
        # layer by layer, a batch's writes come before its reads: none may fall on what others read
        for (row, start, end), contexts in zip(spans, values, strict=True):
            assert self._read(row, end, start) == contexts, f"row {row} is overwritten and read"
        return self._sample(batch, spans, values)

    def _move(self, batch):
        for block, slot in batch.offload:
            self.host[slot] = self.memory[block].copy()
        for slot, block in batch.restore:
            self.memory[block] = self.host[slot].copy()
        contents = [self.memory[source].copy() for source, _ in batch.copies]
        for (_, target), content in zip(batch.copies, contents, strict=True):
            self.memory[target] = content

    def _enter_new_blocks(self, batch):
        assert len(batch.new_block_start) == len(self.tables) * len(batch.rows) + 1
        assert len(batch.new_block) == batch.new_block_start[-1]
        entry = 0
        for table, columns in zip(self.tables, self.columns, strict=True):
            for row in batch.rows:
                blocks = batch.new_block[
                    batch.new_block_start[entry] : batch.new_block_start[entry + 1]
                ]
                assert len(blocks) <= columns, f"{len(blocks)} new pages in {columns} columns"
                for page, block in enumerate(blocks, batch.first_new_page[entry]):
                    table[row][page % columns] = block
                entry += 1

    def _span(self, batch, i):
        """Row and half-open interval of the positions that sequence i computes."""
        start, end = batch.query_start[i], batch.query_start[i + 1]
        first = batch.context_len[i]
        assert list(batch.positions[start:end]) == list(range(first, first + end - start))
        assert (end - start == 1) == (i < batch.num_decodes), "decodes come first"
        assert end > start and first + end - start <= batch.max_seq_len
        return batch.rows[i], first, first + end - start

    def _read(self, row, end, start=None):
        """What queries from `start` (default: `end`) see below `end` through the block tables."""
        contexts, page_size = [], self.page_size
        for g, window in enumerate(self.model.windows):
            oldest = end if start is None else start
            position = 0 if window is None else max(0, oldest - window + 1)
            context = []
            while position < end:
                page, offset = divmod(position, page_size)
                block = self.tables[g][row][page % self.columns[g]]
                assert block >= 0, f"row {row} has no block for page {page} of group {g}"
                content = self.memory[block][offset : offset + end - position]
                context += content
                position += len(content)
            contexts.append(context)
        return contexts

    def _compute(self, batch, i, span, contexts):
        row, start, _ = span
        ids = batch.token_ids[batch.query_start[i] : batch.query_start[i + 1]]
        assert all(token >= 0 for token in ids[:-1]), "only the last can be unknown to the host"
        tokens = [self.last_token[row] if token < 0 else token for token in ids]
        values = [context.copy() for context in contexts]
        self.model.extend(values, tokens, start)
        return values

    def _write(self, row, start, end, contexts):
        for g, context in enumerate(contexts):
            for position, value in zip(range(start, end), context[start - end :], strict=True):
                page, offset = divmod(position, self.page_size)
                block = self.tables[g][row][page % self.columns[g]]
                assert block >= 0, f"row {row} has no block for page {page} of group {g}"
                assert self.written.setdefault(block, row) == row, f"block {block} has two writers"
                self.memory[block][offset] = value

    def _sample(self, batch, spans, values):
        last = {batch.query_start[i + 1] - 1: i for i in range(len(spans))}
        tokens = []
        for index, row in zip(batch.sample_index, batch.sample_row, strict=True):
            i = last[index]
            assert row == spans[i][0], "a sample is of its sequence's last token"
            self.last_token[row] = self.model.next_token(values[i])
            tokens.append(self.last_token[row])
        return tokens
