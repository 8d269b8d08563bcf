"""Logits processors that read a request's history, token by token against `model.generate`."""

import pytest
import torch
from transformers import GenerationConfig

from tcb.options.processors import apply_history
from tcb.planning.request import SamplingParams
from tests.support.options import HISTORY, NEW_TOKENS, PROMPT, VOCAB, WARPERS, build, generate, read


@pytest.fixture(scope="module")
def model():
    return build()


def follow(model, options, max_new_tokens):
    """Greedy tokens of the options under test; the model runs anew on the whole sequence."""
    processors = options.processors_for(PROMPT, max_new_tokens)
    tokens = list(PROMPT)
    for _ in range(max_new_tokens):
        with torch.no_grad():
            scores = model(torch.tensor([tokens])).logits[0, -1]
        if processors is not None:
            scores = apply_history(processors, tokens, scores)
        tokens.append(int(scores.argmax()))
        if tokens[-1] in options.eos:
            break
    return tokens


@pytest.mark.parametrize("eos", [2, [2, 38]], ids=["eos", "eos list"])
@pytest.mark.parametrize("option", HISTORY)
def test_greedy_tokens_are_those_of_generate(model, option, eos):
    fields = {"max_new_tokens": NEW_TOKENS, "eos_token_id": eos, **HISTORY[option]}
    options = read(model, GenerationConfig(**fields))
    assert options.needs_history
    wanted = generate(model, generation_config=GenerationConfig(**fields))[0].tolist()
    assert follow(model, options, options.new_tokens_for(len(PROMPT))) == wanted


CHANGING = [
    "repetition_penalty",
    "no_repeat_ngram_size",
    "bad_words_ids",
    "suppress_tokens",
    "begin_suppress_tokens",
    "sequence_bias",
    "forced_eos_token_id",
    "exponential_decay_length_penalty",
    "watermarking_config",
]
ENDING = ["min_length", "min_new_tokens"]


@pytest.mark.parametrize("option", CHANGING)
def test_the_cases_above_change_what_is_generated(model, option):
    plain = generate(model, max_new_tokens=NEW_TOKENS)[0].tolist()
    assert generate(model, max_new_tokens=NEW_TOKENS, **HISTORY[option])[0].tolist() != plain


@pytest.mark.parametrize("option", ENDING)
def test_the_cases_above_change_where_a_generation_ends(model, option):
    plain = generate(model, max_new_tokens=NEW_TOKENS, eos_token_id=38)[0].tolist()
    made = generate(model, max_new_tokens=NEW_TOKENS, eos_token_id=38, **HISTORY[option])
    assert made[0].tolist()[: len(plain) - 1] == plain[:-1]
    assert made.shape[1] > len(plain)


@pytest.mark.parametrize("option", [*HISTORY, *WARPERS])
def test_sampled_scores_are_those_of_generate(model, option):
    fields = {
        "max_new_tokens": NEW_TOKENS,
        "do_sample": True,
        **HISTORY.get(option, {}),
        **WARPERS.get(option, {}),
    }
    options = read(model, **fields)
    assert options.needs_history
    assert options.sampling_for(4) == SamplingParams(do_sample=True, seed=4)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        made = generate(model, return_dict_in_generate=True, output_scores=True, **fields)
    tokens = made.sequences[0].tolist()
    processors = options.processors_for(PROMPT, NEW_TOKENS)
    for place, wanted in enumerate(made.scores):
        history = tokens[: len(PROMPT) + place]
        with torch.no_grad():
            logits = model(torch.tensor([history])).logits[0, -1]
        scores = apply_history(processors, history, logits)
        # logits of about 10, computed with and without a cache: two or three roundings apart
        torch.testing.assert_close(scores, wanted[0], rtol=2e-5, atol=2e-5)


def test_processors_keep_scores_and_leave_errors_to_the_caller(model):
    options = read(model, repetition_penalty=1.5)
    processors = options.processors_for(PROMPT, 4)
    scores = torch.linspace(-1, 1, VOCAB)
    kept = scores.clone()
    apply_history(processors, PROMPT, scores)
    assert torch.equal(scores, kept)
    with pytest.raises(RuntimeError):
        apply_history(processors, [-VOCAB - 5], scores)
    processors.append(lambda input_ids, scores: scores[:, :1])
    with pytest.raises(ValueError, match="shape"):
        apply_history(processors, PROMPT, scores)


def test_requests_do_not_share_the_state_of_processors(model):
    options = read(model, repetition_penalty=1.5)
    first, second = options.processors_for(PROMPT, 4), options.processors_for(PROMPT, 4)
    assert first is not second
    assert all(a is not b for a, b in zip(first, second, strict=True))
