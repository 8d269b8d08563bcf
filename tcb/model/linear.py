"""Gives the large linear layers of a twin on a CPU the product that is measured to be the fastest.

Which one that is depends on the machine, the shape and the rows, so each shape is timed once a
process (`tcb.model.products`), and a layer asks for its product by its rows. Layers for which a
prepared copy of the weight wins get one, as long as all copies fit.

A copy is used only while its weight is the very tensor it was made of, at the same version. Writes
past the version (`.data`) are seen where weights are compared: `prepare` then drops the copies of
the old twin with `drop_copies` before it makes new ones.
"""

from collections.abc import Iterator, Mapping
from itertools import count
from weakref import WeakValueDictionary

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tcb.model.products import Choice, choose, is_available, multiply, prepared_copy

# elements of a weight below which a choice costs more than it saves
_LARGE = 2**14
# copies take at most this share of the memory that is free
_SHARE = 0.5

# the products of this process, as compiled programs name them
_numbers = count()
_by_number: "WeakValueDictionary[int, Product]" = WeakValueDictionary()


class Product:
    """The forward of one linear layer: what `nn.Linear` returns, by the chosen product.

    It holds the layer's dictionary of parameters, not the layer, so that a twin holds no circle.
    """

    def __init__(self, parameters: Mapping[str, Tensor | None], choice: Choice) -> None:
        self._parameters, self._choice = parameters, choice
        self._dtype = self.weight.dtype
        self._copy: Tensor | None = None
        self._source: tuple[int, int, int] | None = None
        self._number = next(_numbers)
        _by_number[self._number] = self

    def __call__(self, input: Tensor) -> Tensor:
        """The weight is looked at each time, as it may have been replaced."""
        weight, bias = self._parameters["weight"], self._parameters.get("bias")
        assert weight is not None
        if torch.compiler.is_compiling():
            return torch.ops.tcb.product.default(input, weight, bias, self._number)
        if not _is_served(input, weight, bias, self._dtype):
            return F.linear(input, weight, bias)
        rows = input.numel() // input.shape[-1]
        copy = self._copy if self._source == _source(weight) else None
        return multiply(self._choice.of(rows, copy is not None), input, weight, bias, copy)

    @property
    def weight(self) -> Tensor:
        """The layer's weight, now."""
        weight = self._parameters["weight"]
        assert weight is not None
        return weight

    @property
    def wants_copy(self) -> bool:
        """Whether a prepared copy of the weight is worth its memory."""
        return self._choice.wants_copy

    def use_copy(self, copy: Tensor | None) -> None:
        """Multiply with this copy of the present weight; with None, with the weight as it lies."""
        self._copy = copy
        self._source = None if copy is None else _source(self.weight)


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None, number: int) -> Tensor:
    return _by_number[number](rows)


def _product_fake(rows: Tensor, weight: Tensor, bias: Tensor | None, number: int) -> Tensor:
    return rows.new_empty((*rows.shape[:-1], weight.shape[0]))


# compiled programs call the product of a layer as one operator
_LIBRARY = torch.library.Library("tcb", "FRAGMENT")
_LIBRARY.define("product(Tensor rows, Tensor weight, Tensor? bias, int number) -> Tensor")
_LIBRARY.impl("product", _product, "CompositeExplicitAutograd")
torch.library.register_fake("tcb::product", _product_fake, lib=_LIBRARY)


def use_fast_products(twin: nn.Module) -> None:
    """Give the large linear layers of a twin their forward; of layers that have one of their own
    making (wrapped, patched, quantised, adapted) none is touched. Nothing without oneDNN.

    Copies are made of each weight once, however many layers share it, and of none if all of them
    take more than half of the free memory.
    """
    if not is_available():
        return
    for module in twin.modules():
        if not isinstance(module, nn.Linear) or "forward" in module.__dict__:
            continue
        weight = module._parameters.get("weight")
        plain = type(module).forward is nn.Linear.forward
        if not (plain and weight is not None and _is_large(weight)):
            continue
        if (choice := choose(weight)) is not None:
            module.__dict__["forward"] = Product(module._parameters, choice)
    wanting: dict[int, list[Product]] = {}
    for product in _products(twin):
        if product.wants_copy:
            wanting.setdefault(id(product.weight), []).append(product)
    size = sum(4 * products[0].weight.numel() for products in wanting.values())
    if size > _SHARE * psutil.virtual_memory().available:
        return
    for products in wanting.values():
        copy = prepared_copy(products[0].weight)
        for product in products:
            product.use_copy(copy)


def drop_copies(twin: nn.Module) -> None:
    """Give the memory of all copies back; the layers go on with their weights as they lie."""
    for product in _products(twin):
        product.use_copy(None)


def _products(twin: nn.Module) -> Iterator[Product]:
    for module in twin.modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, Product):
            yield forward


def _is_large(weight: Tensor) -> bool:
    return (
        type(weight) is nn.Parameter
        and weight.is_cpu
        and weight.numel() >= _LARGE
        and weight.is_contiguous()
        and not weight.is_inference()
    )


def _is_served(rows: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> bool:
    return (
        type(weight) is nn.Parameter
        and rows.dtype is weight.dtype is dtype
        and (bias is None or bias.dtype is dtype)
        and rows.device.type == weight.device.type == "cpu"
        and weight.is_contiguous()
        and rows.numel() > 0
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
    )


def _source(weight: Tensor) -> tuple[int, int, int]:
    version = -1 if weight.is_inference() else weight._version
    return id(weight), version, weight.data_ptr()
