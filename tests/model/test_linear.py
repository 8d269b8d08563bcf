"""Large linear layers of a twin give what they gave, by another library."""

import pytest
import torch
from torch import nn

from tcb.model.linear import use_onednn

WIDTH, LARGE = 256, 4096


@pytest.fixture
def calls(monkeypatch):
    """Counts the products that oneDNN was asked for."""
    seen = []
    real = torch.ops.mkldnn._linear_pointwise

    def count(*arguments):
        seen.append(arguments[0].shape)
        return real(*arguments)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", count)
    return seen


def layer(bias=True, out=LARGE, **options) -> nn.Linear:
    torch.manual_seed(0)
    made = nn.Linear(WIDTH, out, bias=bias, **options)
    use_onednn(made)
    return made


def expected(made: nn.Linear, rows: torch.Tensor) -> torch.Tensor:
    exact = rows.double() @ made.weight.double().t()
    return exact if made.bias is None else exact + made.bias.double()


def assert_is_product(made: nn.Linear, rows: torch.Tensor) -> None:
    """Within the error of a sum of WIDTH products of fp32 in any order: n * eps * sum |a||b|."""
    with torch.no_grad():
        result = made(rows)
        bound = rows.abs().double() @ made.weight.abs().double().t() + 1.0
        bound *= (WIDTH + 1) * torch.finfo(torch.float32).eps
        assert result.isfinite().all()
        assert ((result.double() - expected(made, rows)).abs() <= bound).all()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, WIDTH), (1, 7, WIDTH), (128, WIDTH), (WIDTH,)])
def test_few_rows_go_to_onednn(bias, shape, calls):
    assert_is_product(layer(bias), torch.randn(shape))
    assert len(calls) == 1


def test_rows_may_be_a_keyword_as_with_any_linear_layer(calls):
    made, rows = layer(), torch.randn(3, WIDTH)
    with torch.no_grad():
        assert torch.equal(made(input=rows), made(rows))
    assert len(calls) == 2


def test_rows_may_be_a_view(calls):
    assert_is_product(layer(), torch.randn(9, 2 * WIDTH)[::2, 1::2])
    assert len(calls) == 1


def test_many_rows_and_no_rows_do_not(calls):
    made = layer()
    assert_is_product(made, torch.randn(129, WIDTH))
    with torch.no_grad():
        assert made(torch.empty(0, WIDTH)).shape == (0, LARGE)
    assert not calls


def test_small_weights_are_left_alone(calls):
    made = layer(out=LARGE - 1)
    assert "forward" not in made.__dict__
    assert_is_product(made, torch.randn(3, WIDTH))
    assert not calls


def test_other_dtypes_and_gradients_take_the_usual_way(calls):
    made = layer()
    rows = torch.randn(3, WIDTH, requires_grad=True)
    made(rows).sum().backward()
    assert rows.grad is not None
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert made(rows).dtype is torch.bfloat16
    with torch.no_grad():
        assert made.double()(rows.double()).dtype is torch.float64
    assert not calls


def test_a_weight_that_changes_is_seen():
    made = layer()
    rows = torch.randn(3, WIDTH)
    with torch.no_grad():
        made.weight.mul_(2.0)
    assert_is_product(made, rows)
    made.weight = nn.Parameter(torch.randn(LARGE, WIDTH))
    assert_is_product(made, rows)


def test_layers_of_their_own_making_are_left_alone():
    class Doubled(nn.Linear):
        def forward(self, rows):
            return 2 * super().forward(rows)

    doubled, patched = Doubled(WIDTH, LARGE), nn.Linear(WIDTH, LARGE)
    patched.forward = lambda rows: rows
    mine = patched.forward
    use_onednn(nn.Sequential(doubled, patched))
    assert "forward" not in doubled.__dict__
    assert patched.forward is mine
