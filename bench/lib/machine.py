"""The device under measurement: graphs, the clock, memory and what it reaches at most.

Everything that depends on the kind of device is here and goes through torch's common calls; a CPU
answers through the same interface, with plain calls in place of graphs. It knows no kernel.
"""

import platform
import statistics
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import psutil
import torch

from bench.lib.results import describe

# exit code of a process whose device answers no more
BROKEN = 3
# what rotates through more than this many times the cache is read from memory each time
CACHE_FACTOR = 3
NOT_CAPTURABLE = "not capturable"
# where a device does not say how large its last cache is
_CACHE_BYTES = 128 * 2**20
_COPY_BYTES = 2**31
_PRODUCT_SIZE = 8192

Call = Callable[[], Any]


def current_device() -> torch.device:
    """The accelerator of this process, or the CPU."""
    if torch.accelerator.is_available():
        return torch.accelerator.current_accelerator()
    return torch.device("cpu")


def synchronize(device: torch.device) -> None:
    """Wait for the device; an error of a kernel started earlier is raised here."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def is_broken(device: torch.device) -> bool:
    """Whether an error has made the device unusable in this process."""
    try:
        synchronize(device)
        torch.zeros(1, device=device).item()
    except Exception:
        traceback.print_exc()
        return True
    return False


def release_memory(device: torch.device) -> None:
    """Give unused memory back, so that what is free is what can be had."""
    if device.type != "cpu":
        torch.accelerator.synchronize()
        torch.get_device_module(device).empty_cache()


def free_memory(device: torch.device) -> int:
    """Bytes that can be allocated now."""
    if device.type == "cpu":
        return psutil.virtual_memory().available
    module = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return module.get_device_properties(0).total_memory - module.memory_allocated()
    return module.mem_get_info()[0]


def cache_bytes(device: torch.device) -> int:
    """Size of the last cache before memory."""
    if device.type == "cpu":
        return 0
    properties = torch.get_device_module(device).get_device_properties(0)
    return getattr(properties, "L2_cache_size", 0) or _CACHE_BYTES


def capture(call: Call, device: torch.device) -> tuple[Call, str | None]:
    """A replay of what `call` starts, and None; or `call` itself, and why it is not captured.

    `call` runs twice before it is captured, so that all is compiled and allocated.
    """
    if not has_graphs(device):
        return call, f"no graphs on {device.type} with torch {torch.__version__}"
    for _ in range(2):
        call()
    synchronize(device)
    module = torch.get_device_module(device)
    graph = _graph_class(device)()
    try:
        with module.graph(graph):
            call()
    except Exception as error:
        # what the recording broke shows here, or not at all
        synchronize(device)
        return call, f"{NOT_CAPTURABLE}: {type(error).__name__}: {error}"
    synchronize(device)
    return graph.replay, None


def has_graphs(device: torch.device) -> bool:
    """Whether this torch captures graphs on such a device."""
    return device.type != "cpu" and _graph_class(device) is not None


def _graph_class(device: torch.device) -> Any:
    module = torch.get_device_module(device)
    kind = getattr(module, "CUDAGraph", None) or getattr(module, "XPUGraph", None)
    return kind if hasattr(module, "graph") else None


@contextmanager
def side_stream(device: torch.device, beside: Call | None = None) -> Iterator[None]:
    """Work started within runs on a stream of its own; `beside` is started on the main one.

    What follows waits for both. Without streams, `beside` runs after.
    """
    if device.type == "cpu":
        yield
        if beside:
            beside()
        return
    module = torch.get_device_module(device)
    main, side = module.current_stream(), module.Stream()
    side.wait_stream(main)
    with module.stream(side):
        yield
    if beside:
        beside()
    main.wait_stream(side)


def seconds(call: Call, repeats: int, device: torch.device) -> float:
    """Device time of one `call` of `repeats` in a row."""
    if device.type == "cpu":
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - start) / repeats
    begin, end = (torch.Event(device, enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeats


def repeats_for(call: Call, device: torch.device, at_least: float = 5e-3) -> int:
    """Calls in a row that take about `at_least` seconds, far above what the clock resolves."""
    if device.type == "cpu":
        return 1
    return max(1, min(2000, int(at_least / max(seconds(call, 1, device), 1e-6))))


@lru_cache(maxsize=1)
def ceilings(device: torch.device) -> dict[str, float]:
    """What this device reaches: copying and reading, bytes a second; bf16 products, FLOP a second.

    A copy counts what it reads and what it writes. Medians of graph replays on random data.
    """
    small = device.type == "cpu"
    count = (_COPY_BYTES >> (9 if small else 0)) // 2
    size = _PRODUCT_SIZE >> (6 if small else 0)
    source = torch.randn(count, device=device, dtype=torch.float32).to(torch.bfloat16)
    target = torch.empty_like(source)
    left, right = torch.randn(2, size, size, device=device, dtype=torch.float32).bfloat16()
    out = torch.empty_like(left)
    total = source.view(torch.int32)
    return {
        "copy_bytes_per_second": 4 * count / _median(lambda: target.copy_(source), device),
        "read_bytes_per_second": 2 * count / _median(lambda: total.amax(), device),
        "bf16_flop_per_second": 2
        * size**3
        / _median(lambda: torch.mm(left, right, out=out), device),
    }


def _median(call: Call, device: torch.device) -> float:
    replay, _ = capture(call, device)
    return statistics.median(seconds(replay, 3, device) for _ in range(5))


def driver(device: torch.device) -> str:
    """Version of the driver as its own tool or the runtime says it."""
    if device.type == "cpu":
        return f"none, {platform.machine()}"
    if device.type == "cuda" and torch.version.cuda:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=20)
        except OSError as error:
            return f"unknown: {error}"
        return f"{done.stdout.split()[0] if done.stdout.split() else 'unknown'}"
    properties = torch.get_device_module(device).get_device_properties(0)
    return str(getattr(properties, "driver_version", "unknown"))


def facts_line(device: torch.device, with_ceilings: bool = False) -> dict[str, Any]:
    """The line of a record that says where it was made: device, driver, versions, commit."""
    try:
        found = facts(device) | ({"ceilings": ceilings(device)} if with_ceilings else {})
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    return {"state": "facts", "unit": "", "record": found}


def facts(device: torch.device) -> dict[str, Any]:
    """Where this runs: device, driver, versions, commit."""
    found = describe(device) | {"driver": driver(device)}
    found |= {"cuda": torch.version.cuda, "hip": torch.version.hip}
    if device.type != "cpu":
        found["cache_bytes"] = cache_bytes(device)
        found["free_memory"] = free_memory(device)
    return found
