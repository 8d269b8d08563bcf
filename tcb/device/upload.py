"""The one way of values from the host to the device: one transfer, for which the host does not
wait.
"""

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

_DTYPE = {"f": torch.float32, "q": torch.int64}


def upload(parts: Sequence[array], device: torch.device) -> list[Tensor]:
    """Arrays of C ints, floats and 64-bit ints as int32, fp32 and int64 tensors on the device, in
    one transfer; on a CPU without a copy of each.

    Words of 8 bytes are views of pairs of 4, so an even number of words lies before each of them.
    """
    flat = array("i")
    for part in parts:
        if part.typecode == flat.typecode:
            flat.extend(part)
        else:
            flat.frombytes(part.tobytes())
    counts = [len(part) * part.itemsize // flat.itemsize for part in parts]
    if flat:
        words = torch.frombuffer(flat, dtype=torch.int32)
        if device.type != "cpu":
            words = words.pin_memory().to(device, non_blocking=True)
    else:
        words = torch.empty(0, dtype=torch.int32, device=device)
    return [
        tensor if part.typecode == "i" else tensor.view(_DTYPE[part.typecode])
        for part, tensor in zip(parts, words.split(counts), strict=True)
    ]
