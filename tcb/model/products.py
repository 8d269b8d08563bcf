"""Knows the ways to multiply rows with a weight on a CPU, and times which of them is the fastest.

    plain      torch's own product
    as_it_lies oneDNN on the weight as it lies, fp32 only: where MKL prepares a large weight anew
               for every product
    prepared   oneDNN on an fp32 copy in the layout that it likes best; bf16 and fp16 rows are
               multiplied and summed in fp32 and rounded once, as their own products do

32 rows times [49152, 576] in fp32 take 58, 36 and 30 ms (torch 2.13.0, two cores of an AMD EPYC
with AVX2). It knows no layer.

Where other work is on the machine, seconds on the clock say who had to wait, not who is faster. So
the processor's time of one thread, of which waiting is no part, rules out what is far behind; the
clock of all threads decides among the others, which may use threads and memory differently.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

PLAIN, AS_IT_LIES, PREPARED_COPY = "plain", "as_it_lies", "prepared"
# numbers of rows that are timed, as long as their products stay below so many multiplications
_ROWS = (1, 8, 32, 128, 512)
_MOST_WORK = 2**28
# of a larger weight a part is timed; seconds after which a number of rows is timed no further
_MOST_ELEMENTS, _SECONDS = 2**22, 0.02
_REPEATS = 5
# what a copy must save to be worth its memory
_GAIN = 0.95
# of the processor's time of the fastest, what a product may take for the clock to be asked
_FAR = 2.0
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Choice:
    """The fastest product at each number of rows, with a copy at hand and without.

    rows   ascending; above the last, its products are used
    """

    rows: tuple[int, ...]
    with_copy: tuple[str, ...]
    without: tuple[str, ...]

    @property
    def wants_copy(self) -> bool:
        """Whether a copy is faster anywhere."""
        return PREPARED_COPY in self.with_copy

    def of(self, rows: int, has_copy: bool) -> str:
        """The product for so many rows."""
        products = self.with_copy if has_copy else self.without
        for most, product in zip(self.rows, products, strict=True):
            if rows <= most:
                return product
        return products[-1]


_chosen: dict[tuple[torch.Size, torch.dtype, int], Choice] = {}


def is_available() -> bool:
    """Whether this torch has oneDNN and the operations that prepare and multiply."""
    operations = torch.ops.mkldnn
    return (
        torch.backends.mkldnn.is_available()
        and hasattr(operations, "_linear_pointwise")
        and hasattr(operations, "_reorder_linear_weight")
    )


def choose(weight: Tensor) -> Choice | None:
    """The choice for weights of this shape and dtype; None where torch's own product is the only
    one. Timed once a process and number of threads, in some tens of milliseconds.
    """
    if weight.dtype not in _DTYPES:
        return None
    key = weight.shape, weight.dtype, torch.get_num_threads()
    if key not in _chosen:
        with torch.inference_mode(False), torch.no_grad():
            _chosen[key] = _time(weight.detach())
    return _chosen[key]


def prepared_copy(weight: Tensor) -> Tensor:
    """An fp32 copy of a weight in oneDNN's layout: as many bytes as its elements take in fp32."""
    with torch.inference_mode(False), torch.no_grad():
        return torch.ops.mkldnn._reorder_linear_weight(weight.detach().float())


def multiply(
    product: str, rows: Tensor, weight: Tensor, bias: Tensor | None, copy: Tensor | None
) -> Tensor:
    """rows @ weight.T + bias by one product, in the dtype of the rows."""
    if product == PLAIN:
        return F.linear(rows, weight, bias)
    if product == AS_IT_LIES:
        return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    if rows.dtype is torch.float32:
        return torch.ops.mkldnn._linear_pointwise(rows, copy, bias, "none", [], "")
    wide = None if bias is None else bias.float()
    result = torch.ops.mkldnn._linear_pointwise(rows.float(), copy, wide, "none", [], "")
    return result.to(rows.dtype)


def _time(weight: Tensor) -> Choice:
    weight = weight[: max(1, _MOST_ELEMENTS // weight.shape[1])]
    copy = prepared_copy(weight)
    own = (PLAIN, AS_IT_LIES) if weight.dtype is torch.float32 else (PLAIN,)
    timed = [rows for rows in _ROWS if rows * weight.numel() <= _MOST_WORK] or [1]
    with_copy, without = [], []
    for count in timed:
        seconds = _compare((*own, PREPARED_COPY), count, weight, copy)
        best = min(own, key=seconds.__getitem__)
        without.append(best)
        gains = seconds[PREPARED_COPY] < _GAIN * seconds[best]
        with_copy.append(PREPARED_COPY if gains else best)
    return Choice(tuple(timed), tuple(with_copy), tuple(without))


def _compare(
    products: tuple[str, ...], rows: int, weight: Tensor, copy: Tensor
) -> dict[str, float]:
    """Seconds of each product by the clock of all threads, infinite for what is far behind; by the
    processor's time of one thread where that leaves one product, or there is one thread.
    """
    ones = torch.ones(rows, weight.shape[1], dtype=weight.dtype)
    with _one_thread():
        seconds = _seconds(products, ones, weight, copy, time.thread_time)
    limit = _FAR * min(seconds.values())
    near = tuple(product for product in products if seconds[product] <= limit)
    if torch.get_num_threads() == 1 or len(near) == 1:
        return seconds
    far = dict.fromkeys(products, float("inf"))
    return far | _seconds(near, ones, weight, copy, time.perf_counter)


def _seconds(
    products: tuple[str, ...],
    rows: Tensor,
    weight: Tensor,
    copy: Tensor,
    clock: Callable[[], float],
) -> dict[str, float]:
    """The shortest time of each product; they take turns, so that a slow moment hits all."""
    best = dict.fromkeys(products, float("inf"))
    end = None
    for _ in range(1 + _REPEATS):
        for product in products:
            start = clock()
            multiply(product, rows, weight, None, copy)
            if end is not None:
                best[product] = min(best[product], clock() - start)
        # the first turn warms up
        if end is None:
            end = clock() + _SECONDS
        elif clock() > end:
            break
    return best


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
