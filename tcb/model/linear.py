"""Let the large linear layers of a twin on a CPU multiply with oneDNN where rows are few.

torch multiplies fp32 with MKL there, which prepares a large weight anew for every product; oneDNN
reads it as it lies. 32 rows times [49152, 576]: 22 ms against 40; times [4864, 896]: 3.6 against
7.4; from 256 rows on there is no difference (torch 2.13.0, two cores of an AMD EPYC with AVX2).
No copy of a weight is made, so what the weights become is seen at once.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# elements of a weight that outgrows a core's own cache, and rows up to which preparing it shows
_LARGE, _FEW_ROWS = 2**20, 128


def use_onednn(twin: nn.Module) -> None:
    """Give the large linear layers of a twin their forward; of layers that have one of their own
    making (wrapped, patched, quantised, adapted) none is touched. Nothing without oneDNN.
    """
    if not (
        torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    ):
        return
    for module in twin.modules():
        if not isinstance(module, nn.Linear) or "forward" in module.__dict__:
            continue
        plain = type(module).forward is nn.Linear.forward
        if plain and module.weight.is_cpu and module.weight.numel() >= _LARGE:
            module.__dict__["forward"] = partial(_forward, module)


def _forward(module: nn.Linear, input: Tensor) -> Tensor:
    """What `nn.Linear` returns; the weight is looked at each time, as it may have been replaced."""
    weight, bias = module.weight, module.bias
    if _is_served(input, weight) and (bias is None or bias.dtype is torch.float32):
        return torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")
    return F.linear(input, weight, bias)


def _is_served(rows: Tensor, weight: Tensor) -> bool:
    return (
        type(weight) is nn.Parameter
        and rows.dtype is weight.dtype is torch.float32
        and rows.device.type == weight.device.type == "cpu"
        and weight.is_contiguous()
        and 0 < rows.numel() <= _FEW_ROWS * rows.shape[-1]
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
    )
