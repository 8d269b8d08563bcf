"""Layer groups and page counts: examples of real models, and brute force."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tcb.planning.groups import (
    Layer,
    LayerGroup,
    block_elements,
    first_visible_page,
    group_layers,
    num_columns,
    pages_needed,
)

WINDOW = 512


def model(pattern, full=(4, 64, 64), sliding=(4, 64, 64)):
    """Layers by letter, f full and s sliding; the shapes are kv_heads, dim, value_dim."""
    return [
        Layer(i, *((None, *full) if letter == "f" else (WINDOW, *sliding)))
        for i, letter in enumerate(pattern)
    ]


def counts(groups, window):
    return sorted(len(group.layers) for group in groups if group.window == window)


def padding(layers, groups, window="any"):
    """Elements of one block for each group over the elements of their layers, less one."""
    spent = sum(block_elements(groups, 1) for g in groups if window in ("any", g.window))
    real = sum(layer.row_elements for layer in layers if window in ("any", layer.window))
    return spent / real - 1


@pytest.mark.parametrize(
    ("name", "layers", "full", "sliding"),
    [
        ("Llama, 30 layers", model("f" * 30), [30], []),
        ("Mistral with a window, 32 layers", model("s" * 32), [], [32]),
        ("GPT-OSS, 12 and 12", model("sf" * 12), [12], [12]),
        ("Gemma-3-270M, 15 and 3", model("sssssf" * 3), [3], [3] * 5),
        ("Gemma-3-1B, 22 and 4", model("sssssf" * 4 + "ss"), [4], [3, 3, 4, 4, 4, 4]),
        ("Gemma-3-4B, 29 and 5", model("sssssf" * 5 + "ssss"), [5], [4, 5, 5, 5, 5, 5]),
        ("Gemma-3-27B, 52 and 10", model("sssssf" * 10 + "ss"), [10], [10, 10, 10, 11, 11]),
        ("9 and 39", model("s" * 39 + "f" * 9), [9], [9, 10, 10, 10]),
        (
            "head dims 512 and 256, half the bytes in a full layer",
            model("sssssf" * 10, full=(4, 512, 512), sliding=(16, 256, 256)),
            [10],
            [5] * 10,
        ),
        (
            "head dims 512 and 256, twice the bytes in a full layer",
            model("ssssf" * 3, full=(1, 512, 512), sliding=(1, 256, 256)),
            [3],
            [6, 6],
        ),
        ("key and value of different size", model("ffff", full=(1, 192, 128)), [4], []),
        ("one layer", model("f"), [1], []),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_models(name, layers, full, sliding):
    groups = group_layers(layers)
    assert (counts(groups, None), counts(groups, WINDOW)) == (full, sliding)
    for window in {layer.window for layer in layers}:
        assert padding(layers, groups, window) <= 0.15


def test_least_padding_where_the_bound_cannot_be_held():
    # 5 full layers of 1 and 25 sliding ones of 2: no block size keeps both within 15 %
    layers = model("sssssf" * 5, full=(2, 512, 512), sliding=(8, 256, 256))
    groups = group_layers(layers)
    assert counts(groups, None) == [5]
    assert counts(groups, WINDOW) == [2, 2, 3, 3, 3, 3, 3, 3, 3]
    assert padding(layers, groups, None) == pytest.approx(0.2)


def test_max_padding_trades_memory_for_fewer_groups():
    layers = model("sssssf" * 4 + "ss")
    assert [len(group_layers(layers, p)) for p in (0.0, 0.15, 5.0)] == [13, 7, 2]


def test_groups_come_in_layer_order_with_layers_in_order():
    groups = group_layers(reversed(model("sssssf" * 3)))
    assert [group.layers for group in groups] == [
        (0, 1, 2),
        (3, 4, 6),
        (5, 11, 17),
        (7, 8, 9),
        (10, 12, 13),
        (14, 15, 16),
    ]
    assert groups[0] == LayerGroup((0, 1, 2), WINDOW, 4, 64, 64)


def test_block_is_as_large_as_its_largest_group():
    groups = group_layers(model("sssssf" * 4 + "ss"))
    assert block_elements(groups, 16) == 4 * 16 * 4 * (64 + 64)
    assert max(group.row_elements for group in groups) == 4 * 4 * 128


LAYERS = st.lists(
    st.tuples(st.sampled_from([None, 4, 9]), st.integers(1, 3), st.sampled_from([8, 16])),
    min_size=1,
    max_size=12,
).map(lambda kinds: [Layer(2 * i, w, h, d, d) for i, (w, h, d) in enumerate(kinds)])


@given(LAYERS)
def test_every_layer_is_in_one_group_of_its_kind_that_fits_the_block(layers):
    groups = group_layers(layers)
    kind_of = {layer.layer: (layer.window, layer.kv_heads, layer.dim) for layer in layers}
    assert sorted(i for group in groups for i in group.layers) == sorted(kind_of)
    for group in groups:
        assert {kind_of[i] for i in group.layers} == {(group.window, group.kv_heads, group.dim)}
        assert group.row_elements <= block_elements(groups, 1)
    assert group_layers(layers) == groups


@given(LAYERS)
def test_no_block_size_does_better(layers):
    groups = group_layers(layers)
    kinds = {}
    for layer in layers:
        kinds.setdefault((layer.window, layer.kv_heads, layer.dim), []).append(layer.row_elements)
    least = max(rows[0] for rows in kinds.values())
    splits = []
    for size in range(least, max(sum(rows) for rows in kinds.values()) + 1):
        num_groups = [-(-len(rows) // (size // rows[0])) for rows in kinds.values()]
        worst = max(
            n * size / sum(rows) for n, rows in zip(num_groups, kinds.values(), strict=True)
        )
        splits.append((sum(num_groups), worst - 1))
    size = block_elements(groups, 1)
    mine = max(
        size * sum((g.window, g.kv_heads, g.dim) == kind for g in groups) / sum(rows) - 1
        for kind, rows in kinds.items()
    )
    within = [num_groups for num_groups, worst in splits if worst <= 0.15]
    if within:
        assert mine <= 0.15 + 1e-9
        assert len(groups) == min(within)
    else:
        assert mine == pytest.approx(min(worst for _, worst in splits))


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ([], "layers is empty"),
        ([Layer(1, None, 1, 8, 8), Layer(1, 4, 1, 8, 8)], "names a layer twice"),
    ],
)
def test_bad_layers_are_refused(layers, says):
    with pytest.raises(ValueError, match=says):
        group_layers(layers)


@pytest.mark.parametrize(
    ("field", "value"),
    [("layer", -1), ("window", 0), ("kv_heads", 0), ("dim", 0), ("value_dim", -8)],
)
def test_layer_out_of_range_is_refused(field, value):
    fields = {"layer": 0, "window": 4, "kv_heads": 1, "dim": 8, "value_dim": 8} | {field: value}
    with pytest.raises(ValueError, match=f"{field} is {value}; accepted: .*integers >= [01]"):
        Layer(**fields)


@pytest.mark.parametrize(
    ("length", "window", "page_size", "pages"),
    [
        (0, None, 4, 0),
        (1, None, 4, 1),
        (4, None, 4, 1),
        (5, None, 4, 2),
        (100, 1, 4, 1),
        (100, 2, 4, 2),
        (100, 5, 4, 2),
        (100, 6, 4, 3),
        (4, 6, 4, 1),
        (0, 6, 4, 0),
    ],
)
def test_pages_needed(length, window, page_size, pages):
    assert pages_needed(length, window, page_size) == pages


LENGTHS = range(24)
WINDOWS = [None, *range(1, 12)]
PAGE_SIZES = range(1, 6)


def pages_read(start, end, window, page_size):
    """The pages that a chunk of the positions [start, end) reads or writes, one by one."""
    first = 0 if window is None else max(0, start - window + 1)
    return {position // page_size for position in range(first, end)}


@pytest.mark.parametrize("window", WINDOWS)
def test_pages_needed_is_the_most_that_any_single_token_step_touches(window):
    for page_size in PAGE_SIZES:
        for length in LENGTHS:
            steps = [len(pages_read(s, s + 1, window, page_size)) for s in range(length)]
            assert pages_needed(length, window, page_size) == max(steps, default=0)


@pytest.mark.parametrize("window", WINDOWS)
def test_columns_are_the_most_pages_that_any_chunk_touches(window):
    for page_size in PAGE_SIZES:
        for chunk in range(1, 8):
            for length in LENGTHS[1:]:
                steps = [
                    len(pages_read(s, min(s + chunk, length), window, page_size))
                    for s in range(length)
                ]
                assert num_columns(window, page_size, chunk, length) == max(steps)


@pytest.mark.parametrize("window", WINDOWS)
def test_first_visible_page_is_the_page_of_the_oldest_visible_position(window):
    for page_size in PAGE_SIZES:
        for position in LENGTHS:
            pages = pages_read(position, position + 1, window, page_size)
            assert first_visible_page(position, window, page_size) == min(pages)
