"""Prompts are read from what users have at hand: rows, a tokenizer's output, texts."""

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

from tcb.options.inputs import list_of_prompts

ROWS = [[0, 0, 11, 12, 13], [21, 22, 0, 0, 0], [31, 32, 33, 34, 35]]
MASK = [[0, 0, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 1, 1]]
PROMPTS = [[11, 12, 13], [21, 22], [31, 32, 33, 34, 35]]


def plain(prompts):
    return [list(map(int, prompt)) for prompt in prompts]


@pytest.mark.parametrize("kind", [dict, BatchEncoding])
@pytest.mark.parametrize("array", [list, torch.tensor, np.array])
def test_what_a_tokenizer_returns_is_read_without_its_padding(kind, array):
    inputs = kind({"input_ids": array(ROWS), "attention_mask": array(MASK)})
    assert plain(list_of_prompts(inputs)) == PROMPTS
    assert plain(list_of_prompts(kind({"input_ids": array(ROWS)}))) == ROWS


def test_texts_go_through_the_tokenizer():
    def tokenizer(texts):
        return {"input_ids": [[len(text)] for text in texts]}

    assert list_of_prompts(["a", "bcd"], tokenizer) == [[1], [3]]
    assert list_of_prompts([[5], [6]], tokenizer) == [[5], [6]]


def test_rows_that_are_all_padding_are_empty_prompts():
    assert list_of_prompts({"input_ids": [[1, 2]], "attention_mask": [[0, 0]]}) == [[]]


@pytest.mark.parametrize("inputs", [[[5]], [torch.tensor([5])], [np.array([5])], [[1, 2], 3]])
def test_prompts_of_one_token_are_prompts(inputs):
    assert len(list_of_prompts(inputs)) == len(inputs)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ([1, 2, 3], "inputs is one prompt of 3 token ids"),
        (torch.tensor([1, 2, 3]), "inputs is one prompt of 3 token ids"),
        (np.array([7]), "inputs is one prompt of 1 token ids"),
        (iter([1, 2]), "inputs is one prompt of 2 token ids"),
        ({"input_ids": [1, 2]}, "input_ids is one prompt of 2 token ids"),
        ({"input_ids": 5}, "input_ids is a int"),
        (torch.tensor(5), "inputs is a Tensor"),
        ("text", "inputs is a str"),
        (["a", "b"], "inputs is 2 texts without a tokenizer"),
        ({"inputs": []}, "inputs is a dict"),
    ],
)
def test_what_holds_no_prompts_is_refused_as_a_whole(inputs, words):
    with pytest.raises(TypeError, match=words):
        list_of_prompts(inputs)


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        ([[1, 1, 1, 1, 1]], "attention_mask has 1 rows; accepted: 3"),
        ([[1], [1], [1]], r"attention_mask\[0\] has 1 entries; accepted: 5"),
        ([MASK[0], [1, 0, 1, 1, 1], MASK[2]], r"attention_mask\[1\] has a hole"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused_by_name(mask, words):
    with pytest.raises(ValueError, match=words):
        list_of_prompts({"input_ids": ROWS, "attention_mask": mask})
