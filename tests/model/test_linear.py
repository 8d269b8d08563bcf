"""Large linear layers of a twin give what they gave, by the product that was chosen."""

import gc
import time
import weakref

import pytest
import torch
from torch import nn

from tcb.model import linear, products
from tcb.model.linear import Product, drop_copies, use_fast_products
from tcb.model.products import AS_IT_LIES, PLAIN, PREPARED_COPY, Choice

WIDTH, LARGE = 256, 1024
ALWAYS = {
    PLAIN: Choice((1,), (PLAIN,), (PLAIN,)),
    AS_IT_LIES: Choice((1,), (AS_IT_LIES,), (AS_IT_LIES,)),
    PREPARED_COPY: Choice((1,), (PREPARED_COPY,), (AS_IT_LIES,)),
}


@pytest.fixture(params=list(ALWAYS))
def product(request, monkeypatch):
    """All layers use this product."""
    monkeypatch.setattr(linear, "choose", lambda weight: ALWAYS[request.param])
    return request.param


@pytest.fixture
def copying(monkeypatch):
    """All layers multiply with a copy; without one, bf16 has torch's own product only."""
    choice = Choice((1,), (PREPARED_COPY,), (PLAIN,))
    monkeypatch.setattr(linear, "choose", lambda weight: choice)


@pytest.fixture
def calls(monkeypatch):
    """Counts the products that oneDNN was asked for."""
    seen = []
    real = torch.ops.mkldnn._linear_pointwise

    def count(*arguments):
        seen.append(arguments[1].is_mkldnn)
        return real(*arguments)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", count)
    return seen


def layer(bias=True, out=LARGE, **options) -> nn.Linear:
    torch.manual_seed(0)
    made = nn.Linear(WIDTH, out, bias=bias, **options)
    use_fast_products(made)
    return made


def expected(made: nn.Linear, rows: torch.Tensor) -> torch.Tensor:
    exact = rows.double() @ made.weight.double().t()
    return exact if made.bias is None else exact + made.bias.double()


def assert_is_product(made: nn.Linear, rows: torch.Tensor) -> None:
    """Within the error of a sum of WIDTH products of fp32 in any order: n * eps * sum |a||b|; and
    of one rounding to the dtype of the rows.
    """
    with torch.no_grad():
        result, exact = made(rows), expected(made, rows)
        bound = rows.abs().double() @ made.weight.abs().double().t() + 1.0
        bound *= (WIDTH + 1) * torch.finfo(torch.float32).eps
        if rows.dtype is not torch.float32:
            bound += exact.abs() * torch.finfo(rows.dtype).eps
        assert result.isfinite().all() and result.dtype is rows.dtype
        assert ((result.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, WIDTH), (1, 7, WIDTH), (128, WIDTH), (WIDTH,)])
def test_the_chosen_product_is_used(bias, shape, product, calls):
    assert_is_product(layer(bias), torch.randn(shape))
    assert calls == {PLAIN: [], AS_IT_LIES: [False], PREPARED_COPY: [True]}[product]


def test_rows_may_be_a_keyword_as_with_any_linear_layer(product):
    made, rows = layer(), torch.randn(3, WIDTH)
    with torch.no_grad():
        assert torch.equal(made(input=rows), made(rows))


def test_rows_may_be_a_view_and_none(product):
    assert_is_product(layer(), torch.randn(9, 2 * WIDTH)[::2, 1::2])
    with torch.no_grad():
        assert layer()(torch.empty(0, WIDTH)).shape == (0, LARGE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
def test_half_precision_is_summed_in_fp32_and_rounded_once(dtype, bias, copying, calls):
    made = layer(bias, dtype=dtype)
    assert_is_product(made, torch.randn(5, WIDTH).to(dtype))
    assert calls == [True]


def test_rows_have_their_own_product():
    choice = Choice((1, 32), (PLAIN, PREPARED_COPY), (PLAIN, AS_IT_LIES))
    assert [choice.of(rows, True) for rows in (1, 2, 32, 900)] == [PLAIN] + 3 * [PREPARED_COPY]
    assert [choice.of(rows, False) for rows in (1, 2, 900)] == [PLAIN, AS_IT_LIES, AS_IT_LIES]
    assert choice.wants_copy and not ALWAYS[AS_IT_LIES].wants_copy


@pytest.mark.parametrize("fastest", [PLAIN, AS_IT_LIES, PREPARED_COPY])
def test_the_fastest_is_chosen_once_a_shape_and_dtype(fastest, monkeypatch):
    asked = []

    def seconds(candidates, rows, weight, copy, clock):
        asked.append((len(rows), weight.dtype))
        assert (AS_IT_LIES in candidates) == (weight.dtype is torch.float32)
        return {product: 1.0 - 0.5 * (product == fastest) for product in candidates}

    monkeypatch.setattr(products, "_seconds", seconds)
    monkeypatch.setattr(products, "_chosen", {})
    weight = torch.randn(1024, 300)
    choice = products.choose(weight)
    assert set(choice.with_copy) == {fastest}
    assert (PREPARED_COPY in choice.without) is False
    assert products.choose(weight + 1) is choice
    once = len(asked)
    products.choose(weight.bfloat16())
    assert len(asked) == 2 * once
    assert products.choose(weight.double()) is None


@pytest.mark.parametrize(
    ("dtype", "threads", "processor", "clock", "chosen"),
    [
        (torch.float32, 2, (1.0, 1.0, 1.0), (3.0, 2.0, 1.0), PREPARED_COPY),
        (torch.float32, 2, (1.0, 1.0, 1.0), (3.0, 2.0, 1.96), AS_IT_LIES),
        (torch.float32, 2, (3.0, 1.0, 1.0), (1.0, 9.0, 8.0), PREPARED_COPY),
        (torch.float32, 2, (1.0, 1.0, 3.0), (9.0, 9.5, 1.0), PLAIN),
        (torch.bfloat16, 2, (5.0, 1.0), (1.0, 9.0), PREPARED_COPY),
        (torch.bfloat16, 2, (1.5, 1.0), (1.0, 2.0), PLAIN),
        (torch.bfloat16, 1, (1.5, 1.0), (1.0, 9.0), PREPARED_COPY),
    ],
)
def test_waiting_for_a_processor_decides_nothing(
    dtype, threads, processor, clock, chosen, monkeypatch
):
    """What is far behind by the processor's time of one thread is out, whatever the clock says."""
    of = {time.thread_time: processor, time.perf_counter: clock}
    order = (PLAIN, AS_IT_LIES, PREPARED_COPY) if len(clock) == 3 else (PLAIN, PREPARED_COPY)

    def seconds(candidates, rows, weight, copy, by):
        assert torch.get_num_threads() == (1 if by is time.thread_time else threads)
        return {name: of[by][order.index(name)] for name in candidates}

    monkeypatch.setattr(products, "_seconds", seconds)
    monkeypatch.setattr(products, "_chosen", {})
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        choice = products.choose(torch.zeros(512, 512, dtype=dtype))
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert set(choice.with_copy) == {chosen}


def test_timing_is_bounded_by_the_work_of_a_product():
    asked = []
    weight = torch.randn(2**15, 1024)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "_chosen", {})
        patch.setattr(
            products,
            "_seconds",
            lambda names, rows, weight, copy, clock: (
                asked.append(len(rows) * weight.numel()) or dict.fromkeys(names, 1.0)
            ),
        )
        products.choose(weight)
    assert asked and max(asked) <= products._MOST_WORK


def test_products_are_timed_for_real():
    weight = torch.randn(64, 64)
    found = products._seconds(
        (PLAIN, AS_IT_LIES, PREPARED_COPY),
        torch.ones(2, 64),
        weight,
        products.prepared_copy(weight),
        time.thread_time,
    )
    assert len(found) == 3 and all(0 < value < 10 for value in found.values())


def test_small_weights_are_left_alone(product):
    made = layer(out=linear._LARGE // WIDTH - 1)
    assert "forward" not in made.__dict__
    assert_is_product(made, torch.randn(3, WIDTH))


def test_other_dtypes_and_gradients_take_the_usual_way(product, calls):
    made = layer()
    rows = torch.randn(3, WIDTH, requires_grad=True)
    made(rows).sum().backward()
    assert rows.grad is not None
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert made(rows).dtype is torch.bfloat16
    with torch.no_grad():
        assert made.double()(rows.double()).dtype is torch.float64
    assert not calls


def test_a_weight_that_changes_is_seen(product):
    made = layer()
    rows = torch.randn(3, WIDTH)
    with torch.no_grad():
        made.weight.mul_(2.0)
    assert_is_product(made, rows)
    made.weight = nn.Parameter(torch.randn(LARGE, WIDTH))
    assert_is_product(made, rows)
    made.weight.data = torch.randn(LARGE, WIDTH)
    assert_is_product(made, rows)


def test_dropped_copies_give_their_memory_back(copying, calls):
    made = layer()
    gone = weakref.ref(made.forward._copy)
    drop_copies(made)
    assert gone() is None
    assert_is_product(made, torch.randn(3, WIDTH))
    assert not calls


def test_a_twin_holds_no_circle(copying):
    made = layer()
    gone = weakref.ref(made), weakref.ref(made.forward._copy)
    gc.disable()
    try:
        del made
        assert [ref() for ref in gone] == [None, None]
    finally:
        gc.enable()


def test_a_weight_of_two_layers_is_copied_once(copying, monkeypatch):
    made = []
    real = linear.prepared_copy
    monkeypatch.setattr(linear, "prepared_copy", lambda weight: made.append(1) or real(weight))
    first, second = nn.Linear(WIDTH, LARGE), nn.Linear(WIDTH, LARGE)
    second.weight = first.weight
    use_fast_products(nn.Sequential(first, second))
    assert first.forward._copy is second.forward._copy and len(made) == 1


def test_no_copy_is_made_where_all_do_not_fit(copying, monkeypatch):
    memory = type("Memory", (), {"available": 8 * WIDTH * LARGE - 1})
    monkeypatch.setattr(linear.psutil, "virtual_memory", lambda: memory)
    made = layer()
    assert made.forward._copy is None
    assert_is_product(made, torch.randn(3, WIDTH))


def test_layers_of_their_own_making_are_left_alone(product):
    class Doubled(nn.Linear):
        def forward(self, rows):
            return 2 * super().forward(rows)

    doubled, patched = Doubled(WIDTH, LARGE), nn.Linear(WIDTH, LARGE)
    patched.forward = lambda rows: rows
    mine = patched.forward
    weighed = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, LARGE))
    use_fast_products(nn.Sequential(doubled, patched, weighed))
    assert not any(isinstance(one.__dict__.get("forward"), Product) for one in (doubled, weighed))
    assert patched.forward is mine
