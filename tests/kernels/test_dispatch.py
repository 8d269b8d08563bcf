"""Where a call runs, what importing costs, and what stands in where Triton is missing."""

import subprocess
import sys

import pytest
import torch

import tcb.kernels
from tcb.kernels.dispatch import use_triton


def run(code):
    """Run Python on its own, without the interpreter; fails where it fails."""
    lines = ["import os, sys", "os.environ.pop('TRITON_INTERPRET', None)", *code]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)


@pytest.mark.parametrize(("value", "wanted"), [("1", True), ("0", False), (None, False)])
def test_a_cpu_meets_triton_only_in_its_interpreter(monkeypatch, value, wanted):
    if value is None:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    else:
        monkeypatch.setenv("TRITON_INTERPRET", value)
    assert use_triton(torch.zeros(1)) is wanted


def test_another_device_meets_triton(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert use_triton(torch.zeros(1, device="meta"))


@pytest.mark.parametrize("name", tcb.kernels.__all__)
def test_every_name_is_an_operation(name):
    # also where the file of the same name was imported first
    assert callable(getattr(tcb.kernels, name))
    assert name in dir(tcb.kernels)


def test_a_file_that_is_imported_does_not_hide_its_operation():
    run(
        [
            "import tcb.kernels.gpu.page_tables, tcb.kernels.gpu.paged_decode",
            "from tcb.kernels import operations",
            "for name in tcb.kernels.__all__:",
            "    assert getattr(tcb.kernels, name) is getattr(operations, name)",
        ]
    )


def test_an_unknown_name_is_no_attribute():
    with pytest.raises(AttributeError, match="no attribute 'paged_nothing'"):
        _ = tcb.kernels.paged_nothing


def test_the_package_loads_nothing():
    run(["import tcb.kernels", "assert not {'torch', 'triton'} & set(sys.modules)"])


def test_a_cpu_without_triton_has_its_tensors_checked():
    run(
        [
            "sys.modules['triton'] = None",
            "import tcb.kernels as kernels, torch",
            "key = torch.ones(1, 1, 8)",
            "try: kernels.write_kv(key, key, key, key, torch.tensor([5]))",
            "except ValueError as error: assert 'value_cache: expected shape' in str(error), error",
            "else: raise AssertionError('nothing was raised')",
        ]
    )


def test_a_cpu_needs_no_triton():
    run(
        [
            "sys.modules['triton'] = None",
            "import tcb.kernels as kernels, torch",
            "for name in kernels.__all__: assert callable(getattr(kernels, name))",
            "cache, key = torch.zeros(2, 4, 1, 8), torch.ones(1, 1, 8)",
            "kernels.write_kv(key, key, cache, cache, torch.tensor([5]))",
            "length = torch.tensor([1], dtype=torch.int32)",
            "table = torch.tensor([[1]], dtype=torch.int32)",
            "out = kernels.paged_decode(key, cache, cache, table, length + 1)",
            "assert torch.isfinite(out).all()",
            "assert not [name for name in sys.modules if name.startswith('tcb.kernels.gpu.')]",
        ]
    )
