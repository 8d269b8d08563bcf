"""Tells whether a model's weights may have changed, without keeping or reading all of them.

Version counters miss writes through `.data` and those of fused optimizers (torch 2.13), so a
content sample of every parameter and buffer is compared bit for bit as well. It does not know who
changes weights, or what is to be done when they did.

What it cannot see: a write through `.data` (or by a fused optimizer) that touches no sampled
element of any tensor. Tensors of at most 4,096 elements are compared whole; of a larger one 64
elements are, its first, its last and others evenly between. An optimizer's step changes elements
everywhere: if only one in a thousand moved, all 17,000 samples of a model with 272 tensors would be
spared with a probability of e**-17. Weights that an offloading hook keeps elsewhere are not read.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tcb.model.parallel import is_sharded, local_part, tensor_parallel
from tcb.model.twin import modules_of

_WHOLE = 4096
_SAMPLES = 64
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a model's weights looked like.

    facts     one tuple a tensor: address, dtype, shape, device, and its version if not read whole
    samples   for each device, dtype and way of sampling, the elements of all such tensors, as
              integers
    """

    facts: tuple[tuple, ...]
    samples: dict[tuple[torch.device, torch.dtype, int], Tensor]

    def matches(self, other: "Fingerprint") -> bool:
        """Whether nothing distinguishes the two. Waits for the device that holds the samples."""
        return (
            self.facts == other.facts
            and self.samples.keys() == other.samples.keys()
            and all(torch.equal(self.samples[key], other.samples[key]) for key in self.samples)
        )


def fingerprint(model: nn.Module) -> Fingerprint:
    """Look at every parameter and buffer of `model` once, tied ones and frozen ones included.

    Allocates the samples only: at most 16 KiB of fp32 a tensor. About a millisecond for 272
    tensors on a CPU.
    """
    facts: list[tuple] = []
    samples: dict[tuple[torch.device, torch.dtype, int], list[Tensor]] = {}
    parallel = tensor_parallel(model)
    with torch.no_grad():
        for tensor in _tensors(model):
            if is_sharded(tensor):
                if parallel is None or not parallel.holds(tensor):
                    raise ValueError(
                        f"{type(model).__name__} cannot be served: its weights are sharded "
                        "(DTensor) by other means than transformers' tensor parallelism; accepted: "
                        "weights that are whole, and a model loaded with a tp_plan"
                    )
                tensor = local_part(tensor)
            readable = tensor.layout is torch.strided and not tensor.is_meta
            whole = readable and tensor.numel() <= _WHOLE
            version = -1 if whole or tensor.is_inference() else tensor._version
            dtype, device = tensor.dtype, tensor.device
            address = tensor.data_ptr() if readable else 0
            facts.append((address, version, dtype, tensor.shape, device))
            if readable:
                sample = _sample(tensor)
                samples.setdefault((device, dtype, sample.dim()), []).append(sample)
        joined = {key: _bits(torch.cat(parts)) for key, parts in samples.items()}
    return Fingerprint(tuple(facts), joined)


def _tensors(model: nn.Module) -> list[Tensor]:
    """Every parameter and buffer once; of wrapping tensors (sharded, quantised) what they hold."""
    found = {
        id(tensor): tensor
        for module in modules_of(model)
        for own in (module._parameters, module._buffers)
        for tensor in own.values()
        if tensor is not None
    }
    return [plain for tensor in found.values() for plain in _plain(tensor)]


def _plain(tensor: Tensor) -> list[Tensor]:
    is_plain = type(tensor) in (nn.Parameter, Tensor) or is_sharded(tensor)
    if is_plain or not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [plain for name in names for plain in _plain(getattr(tensor, name))]


def _sample(tensor: Tensor) -> Tensor:
    """All elements [count] or some of them [2, 32]; a view where the memory is dense.

    Some are two runs with one odd step, from the first element on and up to the last: an odd step
    does not stay in one column of a matrix whose width is a power of two.
    """
    if tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point:
        tensor = tensor.view(torch.uint8)
    count = tensor.numel()
    if count <= _WHOLE:
        if tensor.dim() == 1:
            return tensor
        return tensor.as_strided((count,), (1,)) if _is_dense(tensor) else tensor.reshape(-1)
    half = _SAMPLES // 2
    step = ((count - 1) // (_SAMPLES - 1) - 1) | 1
    second = count - 1 - (half - 1) * step
    if _is_dense(tensor):
        return tensor.as_strided((2, half), (second, step))
    steps = torch.arange(half, device=tensor.device) * step
    index = torch.stack([steps, steps + second])
    return tensor[torch.unravel_index(index, tensor.shape)]


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one stretch of memory, in whatever order of the axes."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _bits(values: Tensor) -> Tensor:
    """As integers: NaN equals itself, and 0 is not -0."""
    if values.dtype.is_complex or values.dtype.is_floating_point:
        return values.view(_INTEGERS[values.dtype.itemsize])
    return values
