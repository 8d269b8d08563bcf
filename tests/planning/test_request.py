"""Requests, outputs and the check of prompts, without a model or an engine."""

import array
import dataclasses
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tcb.planning.limits import WorkloadHints
from tcb.planning.output import GenerationOutput, RequestStatus
from tcb.planning.request import Request, SamplingParams
from tcb.planning.tokens import check_prompt, end_tokens

VOCAB = 10


class Index:
    """Stands for an integer through `__index__` and nothing else."""

    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


class Scalar:
    """Stands for a value through `item`, as the scalars of arrays and tensors do."""

    def __init__(self, value):
        self.value = value

    def item(self):
        return self.value


class Array:
    """Gives its content through `tolist`, as arrays and tensors do."""

    def __init__(self, content):
        self.content = content

    def tolist(self):
        return self.content


@pytest.mark.parametrize(
    "prompt",
    [
        [1, 2, 3],
        (1, 2, 3),
        range(1, 4),
        iter([1, 2, 3]),
        array.array("i", [1, 2, 3]),
        Array([1, 2, 3]),
        [Index(1), 2, Scalar(3)],
    ],
    ids=["list", "tuple", "range", "iterator", "array", "tolist", "mixed"],
)
def test_prompt_becomes_a_tuple_of_integers(prompt):
    checked = check_prompt(prompt, VOCAB)
    assert checked == (1, 2, 3)
    assert set(map(type, checked)) == {int}


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([], "prompt is empty"),
        (Array([]), "prompt is empty"),
        (None, "prompt is a NoneType"),
        ("hello", "prompt is a str"),
        (b"hello", "prompt is a bytes"),
        ({1, 2}, "prompt is a set"),
        ({"input_ids": [1]}, "prompt is a dict"),
        (7, "prompt is 7"),
        (Array(7), "prompt is 7"),
        ([1, True], r"prompt\[1\] is True of type bool"),
        ([1, 2.0], r"prompt\[1\] is 2.0 of type float"),
        ([1, 2, "3"], r"prompt\[2\] is '3' of type str"),
        ([1, None], r"prompt\[1\] is None of type NoneType"),
        ([Scalar(True)], r"prompt\[0\] .* of type Scalar; accepted: integers"),
        ([Scalar(0.5)], r"prompt\[0\] .* of type Scalar; accepted: integers"),
        (Array([[1, 2]]), r"prompt\[0\] is \[1, 2\] of type list"),
        ([1, -1, 2], r"prompt\[1\] is -1; accepted: token ids in \[0, 10\)"),
        ([1, 2, 10], r"prompt\[2\] is 10; accepted: token ids in \[0, 10\)"),
    ],
)
def test_bad_prompt_is_named_with_its_place(prompt, says):
    with pytest.raises(ValueError, match=says):
        check_prompt(prompt, VOCAB)


@given(st.lists(st.integers(-2, 12)), st.integers(1, 12))
def test_prompt_is_accepted_exactly_if_every_id_is_in_the_vocabulary(prompt, vocab_size):
    if prompt and all(0 <= token < vocab_size for token in prompt):
        assert check_prompt(prompt, vocab_size) == tuple(prompt)
    else:
        with pytest.raises(ValueError, match="prompt"):
            check_prompt(prompt, vocab_size)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"temperature": 0.0}, "temperature is 0.0; accepted: finite numbers > 0"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"temperature": None}, "temperature is None"),
        ({"top_k": -1}, "top_k is -1; accepted: integers >= 0"),
        ({"top_k": 2.0}, "top_k is 2.0"),
        ({"top_p": 1.5}, r"top_p is 1.5; accepted: numbers in \[0, 1\]"),
        ({"top_p": float("nan")}, "top_p is nan"),
        ({"min_p": -0.1}, r"min_p is -0.1; accepted: numbers in \[0, 1\]"),
        ({"seed": 2**63}, "seed is 9223372036854775808"),
        ({"seed": True}, "seed is True"),
    ],
)
def test_sampling_out_of_range_is_refused_where_it_would_be_used(options, says):
    with pytest.raises(ValueError, match=says):
        SamplingParams(do_sample=True, **options)
    assert not SamplingParams(do_sample=False, **options).do_sample


@pytest.mark.parametrize(
    ("field", "value"),
    [("id", ""), ("id", 7), ("prompt", ()), ("max_new_tokens", 0), ("max_new_tokens", 1.0)],
)
def test_request_out_of_range_is_refused(field, value):
    fields = {"id": "req_0", "prompt": (1,), "max_new_tokens": 4} | {field: value}
    with pytest.raises(ValueError, match=f"{field} is"):
        Request(**fields)


def test_request_and_sampling_are_frozen():
    request = Request("req_0", (1,), 4)
    for value in (request, request.sampling):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, dataclasses.fields(value)[0].name, None)


def test_status_has_the_numbers_of_transformers():
    names = ["PENDING", "PREFILLING", "DECODING", "FINISHED", "FAILED"]
    assert {status.name: int(status) for status in RequestStatus} == {
        name: number for number, name in enumerate(names)
    }


def test_output_has_the_fields_and_defaults_of_transformers():
    output = GenerationOutput("req_0")
    shown = dataclasses.asdict(output)
    assert shown.pop("created_time") == pytest.approx(time.perf_counter(), abs=60)
    assert list(shown.items()) == [
        ("request_id", "req_0"),
        ("prompt_ids", []),
        ("generated_tokens", []),
        ("logprobs", []),
        ("error", None),
        ("status", RequestStatus.PENDING),
        ("lifespan", (-1, -1)),
        ("timestamps", None),
    ]
    assert output.generated_tokens is not GenerationOutput("req_1").generated_tokens


@pytest.mark.parametrize("status", RequestStatus)
def test_failed_is_finished_too(status):
    ended = {RequestStatus.FINISHED, RequestStatus.FAILED}
    assert GenerationOutput("req_0", status=status).is_finished() == (status in ended)


def test_hints_are_unknown_by_default():
    assert dataclasses.astuple(WorkloadHints()) == (0, 0, 0)


@pytest.mark.parametrize(
    ("value", "ids"),
    [
        (None, set()),
        (3, {3}),
        ([3, 4, 3], {3, 4}),
        ((), set()),
        ([-1, 5], {5}),
        (-1, set()),
        (array.array("q", [6, 7]), {6, 7}),
        (Index(8), {8}),
        ([Index(8), 2], {2, 8}),
    ],
)
def test_end_tokens(value, ids):
    assert end_tokens(value) == ids


@pytest.mark.parametrize("value", ["x", "12", True, [1, False], 2.0, [None], {"a": 1}, [[1]], b"1"])
def test_what_names_no_end_token_is_refused(value):
    message = r"eos_token_id is .* of type \w+; accepted: an integer, integers, None"
    with pytest.raises(ValueError, match=message):
        end_tokens(value)
