"""A remembered value is used for the integers it was worked out from, and for no others."""

import torch

from tcb.kernels.cpu.step_cache import StepMemo


class Counted:
    """Builds a new value at every call."""

    def __init__(self):
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return self.calls


def test_same_tensors_are_worked_out_once():
    memo, build = StepMemo(), Counted()
    tensors = torch.tensor([1, 2]), torch.tensor([[3]])
    assert [memo.recall("a", tensors, build) for _ in range(3)] == [1, 1, 1]


def test_settings_tell_values_apart():
    memo, build = StepMemo(), Counted()
    tensor = torch.tensor([1])
    assert [memo.recall(name, (tensor,), build) for name in "abab"] == [1, 2, 1, 2]


def test_what_was_written_in_place_is_seen():
    memo, build = StepMemo(), Counted()
    tensor = torch.tensor([1, 2])
    memo.recall("a", (tensor,), build)
    tensor.numpy()[1] = 5
    assert [memo.recall("a", (tensor,), build) for _ in range(2)] == [2, 2]


def test_shapes_tell_tensors_of_one_address_apart():
    memo, build = StepMemo(), Counted()
    tensor = torch.zeros(4, dtype=torch.int64)
    views = tensor, tensor.view(2, 2), tensor[:2]
    assert [memo.recall("a", (view,), build) for view in views] == [1, 2, 3]


def test_it_forgets_what_was_used_longest_ago():
    memo, build = StepMemo(), Counted()
    tensor = torch.tensor([1])
    for name in range(16):
        memo.recall(name, (tensor,), build)
    memo.recall(0, (tensor,), build)
    memo.recall("one more", (tensor,), build)
    assert memo.recall(0, (tensor,), build) == 1
    assert memo.recall(1, (tensor,), build) == 18
