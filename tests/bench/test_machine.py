"""The device under measurement: names of torch that only an accelerator meets, and a CPU."""

import inspect

import torch
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention

from bench.lib import machine

CPU = torch.device("cpu")


def test_torch_has_the_names_that_are_used_on_accelerators():
    assert SDPBackend.CUDNN_ATTENTION.name == "CUDNN_ATTENTION"
    assert "enable_gqa" in (scaled_dot_product_attention.__doc__ or "")
    for module, graph in ((torch.cuda, "CUDAGraph"), (torch.xpu, "XPUGraph")):
        for name in ("mem_get_info", "empty_cache", "current_stream", "Stream", "stream", graph):
            assert hasattr(module, name), (module, name)
        first = list(inspect.signature(module.graph.__init__).parameters)[1]
        assert first in ("cuda_graph", "xpu_graph")
        assert hasattr(getattr(module, graph), "replay")
    for name in ("is_available", "current_accelerator", "synchronize"):
        assert hasattr(torch.accelerator, name)
    for name in ("record", "synchronize", "elapsed_time"):
        assert hasattr(torch.Event, name)


def test_a_cpu_answers_through_the_same_interface():
    ran = []
    replay, reason = machine.capture(lambda: ran.append(1), CPU)
    assert not ran and "no graphs" in reason
    assert machine.seconds(replay, 3, CPU) > 0
    with machine.side_stream(CPU, replay):
        ran.append(2)
    assert ran == [1, 1, 1, 2, 1]
    assert machine.free_memory(CPU) > 0
