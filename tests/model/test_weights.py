"""Whatever is written into a model's weights is noticed, and nothing else is."""

import pytest
import torch
from torch import nn

from tcb.model.weights import fingerprint
from tests.support.families import FAMILIES


def changed(before, model):
    return not before.matches(fingerprint(model))


class Some(nn.Module):
    """One large and one small parameter, and a buffer."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        values = torch.arange(128 * 96).reshape(128, 96) % 97
        self.large = nn.Parameter(values.to(dtype), requires_grad=dtype.is_floating_point)
        self.small = nn.Parameter(values[0].to(dtype), requires_grad=dtype.is_floating_point)
        self.register_buffer("table", torch.zeros(5, dtype=torch.int64))


def write_one(model):
    model.small.data[37] += 1


def write_buffer(model):
    model.table[4] = 7


def write_first(model):
    model.large.data[0, 0] += 1


def write_last(model):
    model.large.data[-1, -1] += 1


def write_all(model):
    model.large.data += 1


def write_in_place(model):
    with torch.no_grad():
        model.large[63, 17] += 1


def replace_parameter(model):
    model.large = nn.Parameter(model.large.detach().clone())


def replace_storage(model):
    model.large.data = model.large.data.clone()


def cast(model):
    model.to(torch.float64)


def add_parameter(model):
    model.more = nn.Parameter(torch.zeros(3))


@pytest.mark.parametrize(
    "change",
    [
        write_one,
        write_buffer,
        write_first,
        write_last,
        write_all,
        write_in_place,
        replace_parameter,
        replace_storage,
        cast,
        add_parameter,
    ],
)
def test_a_change_is_noticed(change):
    model = Some()
    before = fingerprint(model)
    assert not changed(before, model)
    change(model)
    assert changed(before, model)


@pytest.mark.parametrize("fused", [False, True])
def test_one_step_of_an_optimizer_is_noticed(fused):
    model = FAMILIES["llama"]()
    before = fingerprint(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=fused)
    model(input_ids=torch.tensor([[3, 4]]), labels=torch.tensor([[3, 4]])).loss.backward()
    assert not changed(before, model)
    optimizer.step()
    assert changed(before, model)


def test_reading_and_generating_change_nothing():
    model = FAMILIES["gemma3"]()
    before = fingerprint(model)
    model.train()
    model(input_ids=torch.tensor([[3, 4]])).logits.sum().backward()
    model.eval()
    model.generate(torch.tensor([[3, 4]]), max_new_tokens=3, do_sample=False)
    assert not changed(before, model)


def test_a_small_tensor_written_with_what_it_held_is_unchanged():
    """It is compared whole, so its version does not count: rotary embeddings write theirs."""
    model = Some()
    before = fingerprint(model)
    model.table.copy_(model.table.clone())
    assert not changed(before, model)


def test_samples_lie_in_many_columns_and_rows():
    model = nn.Module()
    model.weight = nn.Parameter(torch.arange(1024.0 * 1024).reshape(1024, 1024))
    (sample,) = fingerprint(model).samples.values()
    position = sample.view(torch.float32).long().flatten()
    assert position.min() == 0 and position.max() == 1024 * 1024 - 1
    assert len(set(position.tolist())) == 64
    assert len(set((position % 1024).tolist())) > 32
    assert len(set((position // 1024).tolist())) == 64
    assert position.diff().max() < 3 * 1024 * 1024 / 63


@pytest.mark.parametrize("count", [1, 4096, 4097, 4098, 4160, 5000, 8191])
def test_samples_stay_inside_tensors_of_any_size(count):
    model = nn.Module()
    # the tensor lies inside a larger one that is filled with something else
    model.weight = nn.Parameter(torch.cat([torch.full((7,), -1.0), torch.arange(count * 1.0)])[7:])
    (sample,) = fingerprint(model).samples.values()
    position = sample.view(torch.float32).flatten()
    assert position.numel() == (count if count <= 4096 else 64)
    assert position.min() == 0 and position.max() == count - 1
    assert position.unique().numel() == position.numel()


@pytest.mark.parametrize("transform", ["transpose", "narrow", "expand"])
@pytest.mark.parametrize("width", [8, 200])
def test_any_strides(transform, width):
    base = torch.arange(200.0 * width).reshape(200, width)
    model = nn.Module()
    model.weight = nn.Parameter(
        {
            "transpose": lambda: base.t(),
            "narrow": lambda: base[:, : width // 2],
            "expand": lambda: base[:, :1].expand(-1, width),
        }[transform]()
    )
    before = fingerprint(model)
    assert not changed(before, model)
    base[-1, 0] += 1
    base[0, 0] += 1
    assert changed(before, model)


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.uint8, torch.bool],
)
def test_any_dtype(dtype):
    model = Some(dtype)
    before = fingerprint(model)
    assert not changed(before, model)
    model.large.data = model.large.data.flip(0)
    model.large.data.view(torch.uint8)[0, 0] = 1
    assert changed(before, model)


def test_not_a_number_equals_itself_and_signed_zeros_differ():
    model = Some()
    model.small.data[0] = float("nan")
    model.small.data[1] = 0.0
    before = fingerprint(model)
    assert not changed(before, model)
    model.small.data[1] = -0.0
    assert changed(before, model)


def test_inference_tensors_have_no_version():
    with torch.inference_mode():
        model = Some()
    before = fingerprint(model)
    assert not changed(before, model)
    with torch.inference_mode():
        model.large += 1
    assert changed(before, model)


def test_tensors_without_memory_are_told_by_their_shape():
    with torch.device("meta"):
        model, same = Some(), Some()
        same.more = nn.Parameter(torch.zeros(3))
    before = fingerprint(model)
    assert not changed(before, model)
    assert changed(before, same)


def test_tied_weights_are_read_once_and_frozen_ones_too():
    model = Some()
    count = len(fingerprint(model).facts)
    model.tied = Some()
    model.tied.large, model.tied.small = model.large, model.small
    assert len(fingerprint(model).facts) == count + 1
    model.requires_grad_(False)
    before = fingerprint(model)
    write_one(model)
    assert changed(before, model)


def test_wrapped_tensors_are_read_through():
    from torch.testing._internal.two_tensor import TwoTensor

    one, two = torch.zeros(70, 70), torch.zeros(70, 70)
    model = nn.Module()
    model.weight = nn.Parameter(TwoTensor(one, two), requires_grad=False)
    before = fingerprint(model)
    assert not changed(before, model)
    two.data[0, 0] = 1
    assert changed(before, model)


def test_little_is_allocated():
    model = nn.Module()
    model.weights = nn.ParameterList(torch.zeros(1 << 20) for _ in range(4))
    samples = fingerprint(model).samples.values()
    assert sum(sample.numel() for sample in samples) == 4 * 64
    assert sum(sample.untyped_storage().nbytes() for sample in samples) == 4 * 64 * 4
