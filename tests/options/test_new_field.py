"""A new sampling field is a line of `SamplingParams`: options, overrides and columns follow."""

import importlib.util
import inspect
from dataclasses import field, fields, make_dataclass

import pytest
import torch
from transformers import GenerationConfig

import tcb.options.generation
import tcb.planning.request
from tcb import kernels
from tcb.device.sampling import SamplingTensors
from tcb.device.upload import upload
from tcb.planning.request import SamplingParams
from tcb.planning.rules import SHARES
from tests.support.options import build

DAMPING = field(default=0.0, metadata={"rule": SHARES})


@pytest.fixture
def wider(monkeypatch):
    """`SamplingParams` with one more field, and the options' module as it is with that record."""
    new = [("damping", float, DAMPING)]
    record = make_dataclass("Wider", new, bases=(SamplingParams,), frozen=True, slots=True)
    monkeypatch.setattr(tcb.planning.request, "SamplingParams", record)
    place = tcb.options.generation.__file__
    spec = importlib.util.spec_from_file_location("generation_with_a_wider_record", place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return record, module


def test_a_new_field_is_read_overridden_checked_and_a_column_without_another_edit(wider):
    record, generation = wider
    config = GenerationConfig(do_sample=True)
    config.damping = 0.25
    options = generation.read_options(build(), config)
    assert options.sampling_for(3) == record(do_sample=True, top_k=50, seed=3, damping=0.25)
    own = options.override(damping=1).sampling_for(3)
    assert own.damping == 1.0 and isinstance(own.damping, float)
    with pytest.raises(ValueError, match=r"damping is 2; accepted: numbers in \[0, 1\]"):
        options.override(damping=2)
    with pytest.raises(TypeError, match="seed, damping"):
        options.override(dampinng=1)
    assert options.without_processing().sampling.damping == 0.0

    columns = SamplingTensors(4, torch.device("cpu"), record)
    columns.admit(upload(columns.pack([(2, own)]), torch.device("cpu")))
    column = columns.of(torch.tensor([1, 2]))["damping"]
    assert column.tolist() == [0.0, 1.0] and column.dtype == torch.float32


def test_columns_are_keywords_of_the_sampling_kernel():
    columns = SamplingTensors(1, torch.device("cpu")).of(torch.tensor([0]))
    assert list(columns) == [each.name for each in fields(SamplingParams)]
    assert columns.keys() <= inspect.signature(kernels.sample).parameters.keys()
    dtypes = {name: column.dtype for name, column in columns.items()}
    assert dtypes["do_sample"] == torch.bool and dtypes["seed"] == torch.int64
