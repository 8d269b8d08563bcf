"""From admission to sampling the host never waits for a device, and a batch is one transfer.

Seen on a CPU: calls that would wait, were their tensors on an accelerator. What kernels do within
themselves is left out, since there torch operations stand in for Triton.
"""

import sys
from array import array
from collections import Counter

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tcb.device.runner import Runner
from tcb.device.sampling import SamplingTensors
from tcb.device.upload import upload
from tcb.planning.request import Request, SamplingParams
from tests.support.families import FAMILIES
from tests.support.reference import alone, new_engine, prompts_of, run

# the host reads a value, or needs one to know a shape
READS = {"item", "tolist", "cpu", "numpy", "nonzero", "masked_select", "unique"}
READS |= {"__bool__", "__int__", "__float__", "__index__"}
# values of the host in pageable memory, whose copy to a device waits
UPLOADS = {"tensor", "as_tensor"}
NEW_TOKENS = 12


class Waits(TorchFunctionMode):
    """Counts, by name, the calls that would make the host wait."""

    def __init__(self):
        super().__init__()
        self.waits = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        callers = list(_callers())
        is_kernel = any("/tcb/kernels/" in caller for caller in callers)
        waits = name in READS | UPLOADS or _moves(name, args, kwargs, callers[0])
        self.waits[name] += waits and not is_kernel
        return func(*args, **kwargs)


def _callers():
    frame = sys._getframe(3)
    while frame is not None:
        yield frame.f_code.co_filename
        frame = frame.f_back


def _moves(name, args, kwargs, caller):
    """Whether a call takes values of the host as an index, or may copy between host and device
    without `non_blocking`; casts of the model itself stay where they are.
    """
    if name in ("__getitem__", "__setitem__"):
        return isinstance(args[1], list)
    if kwargs.get("non_blocking") or ("/tcb/" not in caller and caller != __file__):
        return False
    places = [*args[1:], kwargs.get("device")]
    return name == "copy_" or (
        name == "to" and any(isinstance(place, (str, torch.device)) for place in places)
    )


FAULTS = {
    "item": lambda t: t[0].item(),
    "tolist": lambda t: t.tolist(),
    "__bool__": lambda t: bool(t[0]),
    "tensor": lambda t: torch.tensor([1, 2], device=t.device),
    "copy_": lambda t: t.copy_(t),
    "to": lambda t: t.to("cpu"),
    "cpu": lambda t: t.cpu(),
    "__getitem__": lambda t: t[[0, 1]],
    "nonzero": lambda t: t.nonzero(),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_waits_are_seen(fault):
    values = torch.arange(3)
    with Waits() as seen:
        FAULTS[fault](values)
    assert +seen.waits == Counter({fault: 1})


@pytest.mark.parametrize("asynchronous", [False, True], ids=["depth 0", "depth 1"])
def test_no_step_waits_and_each_uploads_once(asynchronous, monkeypatch):
    kinds, found, original = Counter(), Counter(), Runner.launch
    read_buffer = torch.frombuffer

    def upload_once(*args, **options):
        kinds["uploads"] += 1
        return read_buffer(*args, **options)

    def launch(runner, packed, histories):
        with Waits() as seen:
            batch = original(runner, packed, histories)
        found.update(seen.waits)
        kinds["steps"] += 1
        for kind in ("admitted", "offload", "restore", "copies", "sample_row"):
            kinds[kind] += bool(getattr(packed, kind))
        kinds["mixed"] += 0 < packed.num_decodes < len(packed.rows)
        return batch

    monkeypatch.setattr(Runner, "launch", launch)
    monkeypatch.setattr(torch, "frombuffer", upload_once)
    model = FAMILIES["gemma3"]()
    prompts = prompts_of([18, 15, 17], seed=4)
    expected = [alone(model, prompt, NEW_TOKENS) for prompt in prompts]
    engine = new_engine(
        model,
        page_size=4,
        num_blocks=24,
        max_batch_tokens=24,
        use_async_batching=asynchronous,
        cpu_offload_space=0.001,
    )
    for name, prompt in zip("abc", prompts, strict=True):
        engine.submit(Request(name, tuple(prompt), NEW_TOKENS))
        engine.submit(Request(name + "'", tuple(prompt), NEW_TOKENS, parent=name))
    tokens = run(engine)
    for name, of_prompt in zip("abc", expected, strict=True):
        assert tokens[name] == tokens[name + "'"] == of_prompt
    assert +found == Counter()
    assert kinds["uploads"] == kinds["steps"]
    assert min(kinds.values()) > 0, kinds


def test_an_upload_keeps_every_value_of_every_width():
    wide, floats, ints = [-(2**63), 2**63 - 1, -1], [0.1, -2.5, 1e-30], [-1, 2**31 - 1]
    parts = [array("q", wide), array("q"), array("f", floats), array("i", ints), array("i")]
    tensors = upload(parts, torch.device("cpu"))
    assert [tensor.tolist() for tensor in tensors] == [
        wide,
        [],
        torch.tensor(floats).tolist(),
        ints,
        [],
    ]
    dtypes = [torch.int64, torch.int64, torch.float32, torch.int32, torch.int32]
    assert [tensor.dtype for tensor in tensors] == dtypes


def test_admitted_rows_sample_as_they_ask_and_others_as_before():
    columns = SamplingTensors(5, torch.device("cpu"))
    own = SamplingParams(True, 0.7, 40, 0.9, 0.05, -(2**62) - 1)
    for admitted in ([(3, own), (1, SamplingParams())], [(1, SamplingParams(seed=2**63 - 1))], []):
        columns.admit(upload(columns.pack(admitted), torch.device("cpu")))
    found = {name: column.tolist() for name, column in columns.of(torch.arange(5)).items()}
    assert found["seed"] == [0, 2**63 - 1, 0, own.seed, 0]
    assert found["do_sample"] == [False, False, False, True, False]
    assert found["top_k"] == [0, 0, 0, 40, 0]
    for name, off in (("temperature", 1.0), ("top_p", 1.0), ("min_p", 0.0)):
        asked = torch.tensor(getattr(own, name)).item()
        assert found[name] == [off, off, off, asked, off]
