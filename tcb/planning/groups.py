"""Which layers share block tables, and how many pages a sequence needs in each group."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer that keeps keys and values.

    layer             index of the decoder layer
    window            a query at position i sees the positions j with i - window < j <= i; None: all
    kv_heads          key and value heads (of this rank)
    dim, value_dim    elements of one key and of one value

    Raises ValueError.
    """

    layer: int
    window: int | None
    kv_heads: int
    dim: int
    value_dim: int

    def __post_init__(self) -> None:
        for name, least in (("layer", 0), ("kv_heads", 1), ("dim", 1), ("value_dim", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; accepted: integers >= {least}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is {self.window}; accepted: None and integers >= 1")

    @property
    def row_elements(self) -> int:
        """Elements that one token takes in this layer, key and value together."""
        return self.kv_heads * (self.dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one window and one KV shape that share a block table; fields as in `Layer`."""

    layers: tuple[int, ...]
    window: int | None
    kv_heads: int
    dim: int
    value_dim: int

    @property
    def row_elements(self) -> int:
        """Elements that one token takes in all layers of the group, without padding."""
        return len(self.layers) * self.kv_heads * (self.dim + self.value_dim)


def group_layers(layers: Iterable[Layer], max_padding: float = 0.15) -> tuple[LayerGroup, ...]:
    """Split the layers into groups whose blocks, all of one size, are filled well.

    Layers of one kind (one window and one KV shape) are split evenly, in layer order. The block is
    as large as the largest group, what a smaller group leaves of it is padding. The answer has the
    fewest groups for which padding takes no more than `max_padding` of the elements of any kind;
    where no split reaches that, it has the least. The bound is per kind, not for the sum, because
    the mix of blocks changes with the context: in a long sequence only the full layers count.
    Groups come in the order of their first layer. Raises ValueError.
    """
    kinds = _kinds(layers)
    choices = [_split(kinds, size) for size in _sizes(kinds)]
    # of two splits into as many groups, the one with smaller blocks leaves less unused
    tight = [split for split in choices if split.padding <= max_padding]
    if tight:
        best = min(tight, key=lambda split: (split.num_groups, split.size))
    else:
        best = min(choices, key=lambda split: (split.padding, split.num_groups, split.size))
    groups: list[LayerGroup] = []
    for kind, num_groups in zip(kinds, best.groups_of_kind, strict=True):
        groups.extend(_split_evenly(kind, num_groups))
    return tuple(sorted(groups, key=lambda group: group.layers))


def block_elements(groups: Sequence[LayerGroup], page_size: int) -> int:
    """Elements of one block of the pool: the pages of the largest group."""
    return page_size * max(group.row_elements for group in groups)


def num_columns(window: int | None, page_size: int, max_chunk: int, max_length: int) -> int:
    """Columns of a group's block table, for chunks of up to `max_chunk` tokens.

    A full group has a column for every page of `max_length` positions. In a sliding group a chunk
    that starts at position s reads from s - window + 1 and writes up to s + max_chunk - 1; a page
    before those has left the window, and its column may take a new page.
    """
    num_pages = -(-max_length // page_size)
    if window is None:
        return num_pages
    return min(num_pages, _pages_spanned(window - 1 + max_chunk, page_size))


def pages_needed(length: int, window: int | None, page_size: int) -> int:
    """Most pages that a sequence of `length` positions holds at once, computed token by token.

    That is the least with which the sequence can be computed at all; larger chunks hold more.
    """
    num_pages = -(-length // page_size)
    return num_pages if window is None else min(num_pages, _pages_spanned(window, page_size))


def first_visible_page(position: int, window: int | None, page_size: int) -> int:
    """The first page that a query at `position` may read."""
    return 0 if window is None else max(0, position - window + 1) // page_size


def _pages_spanned(num_positions: int, page_size: int) -> int:
    """Most pages that so many neighbouring positions touch: the first one is the last of a page."""
    return (num_positions - 2) // page_size + 2


@dataclass(frozen=True, slots=True)
class _Split:
    """A way to split the kinds; `size` is the elements of one token in a block, with padding."""

    size: int
    groups_of_kind: tuple[int, ...]
    padding: float

    @property
    def num_groups(self) -> int:
        return sum(self.groups_of_kind)


def _split(kinds: list[list[Layer]], size: int) -> _Split:
    """The fewest groups of each kind in blocks of `size`, and the padding of the worst kind."""
    row_elements = [kind[0].row_elements for kind in kinds]
    counts = tuple(
        -(-len(kind) // (size // one)) for kind, one in zip(kinds, row_elements, strict=True)
    )
    filled = [
        len(kind) * one / (count * size)
        for kind, one, count in zip(kinds, row_elements, counts, strict=True)
    ]
    return _Split(size, counts, 1 / min(filled) - 1)


def _kinds(layers: Iterable[Layer]) -> list[list[Layer]]:
    """The layers by kind, each kind in layer order."""
    layers = sorted(layers, key=lambda layer: layer.layer)
    if not layers:
        raise ValueError("layers is empty; accepted: at least one layer with keys and values")
    indices = [layer.layer for layer in layers]
    if len(set(indices)) < len(indices):
        raise ValueError(f"layers names a layer twice: {indices}; accepted: every layer once")
    kinds: dict[tuple[int | None, ...], list[Layer]] = {}
    for layer in layers:
        shape = (layer.window, layer.kv_heads, layer.dim, layer.value_dim)
        kinds.setdefault(shape, []).append(layer)
    return list(kinds.values())


def _sizes(kinds: list[list[Layer]]) -> list[int]:
    """Every block size worth a look: a whole number of layers of some kind, room for any layer."""
    least = max(kind[0].row_elements for kind in kinds)
    sizes = {n * kind[0].row_elements for kind in kinds for n in range(1, len(kind) + 1)}
    return sorted(size for size in sizes if size >= least)


def _split_evenly(kind: list[Layer], num_groups: int) -> Iterator[LayerGroup]:
    """The layers of one kind in `num_groups` runs whose lengths differ by at most one."""
    first = kind[0]
    borders = [len(kind) * i // num_groups for i in range(num_groups + 1)]
    for start, end in pairwise(borders):
        indices = tuple(layer.layer for layer in kind[start:end])
        yield LayerGroup(indices, first.window, first.kv_heads, first.dim, first.value_dim)
