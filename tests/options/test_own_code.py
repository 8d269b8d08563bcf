"""What callers bring that runs between two tokens gives the tokens of `model.generate`."""

import threading
import time

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import MaxTimeCriteria

import tcb
from tests.support.families import FAMILIES
from tests.support.reference import prompts_of

NEW = 16
SETTINGS = {"page_size": 4, "num_blocks": 64, "max_batch_tokens": 16}


@pytest.fixture(scope="module")
def model():
    return FAMILIES["llama"]()


@pytest.fixture(scope="module")
def tokenizer(model):
    """One to three letters a token, so that strings begin and end within tokens."""
    letters = "abcdef"
    pairs = [first + second for first in letters[:4] for second in letters[:4]]
    words = [*letters, *pairs, *(pair + letter for pair in pairs for letter in letters[:4])]
    vocab = {(words[i] if i < len(words) else f"<{i}>"): i for i in range(model.config.vocab_size)}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def alone(model, prompt, **options):
    """The new tokens of `model.generate` for this prompt."""
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None, **options}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, ids.shape[1] :]


def batch(model, prompts, depth=False, **options):
    settings = tcb.ContinuousBatchingConfig(**SETTINGS, use_async_batching=depth)
    options = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None, **options}
    outputs = tcb.generate_batch(model, prompts, None, settings, **options)
    return list(outputs.values())


def text(tokenizer, tokens):
    return "".join(tokenizer.convert_ids_to_tokens(tokens))


PROMPTS = prompts_of((5, 23, 12, 1, 40), vocab=84)


# stop strings


@pytest.mark.parametrize("depth", [False, True], ids=["depth 0", "depth 1"])
def test_stop_strings_end_where_generate_does(model, tokenizer, depth):
    texts = [text(tokenizer, alone(model, prompt).tolist()) for prompt in PROMPTS]
    # the beginning, the middle and the end of tokens, and across borders of several
    strings = [texts[0][6:9], texts[1][4:12], texts[2][9:10] + texts[2][10:13], "fefefe"]
    expected = [
        alone(model, prompt, stop_strings=strings, tokenizer=tokenizer).tolist()
        for prompt in PROMPTS
    ]
    assert sum(len(tokens) < NEW for tokens in expected) >= 3
    found = batch(model, PROMPTS, depth, stop_strings=strings, tokenizer=tokenizer)
    assert [output.generated_tokens for output in found] == expected
    assert not any(output.error for output in found)


def test_a_stop_string_may_begin_in_the_prompt(model, tokenizer):
    for prompt in PROMPTS:
        first = alone(model, prompt, max_new_tokens=1).tolist()
        string = text(tokenizer, [prompt[-1], *first])
        options = {"stop_strings": string, "tokenizer": tokenizer}
        expected = alone(model, prompt, **options).tolist()
        (output,) = batch(model, [prompt], **options)
        assert output.generated_tokens == expected


def test_stop_strings_of_one_request(model, tokenizer):
    config = GenerationConfig(do_sample=False, max_new_tokens=NEW)
    prompt = PROMPTS[1]
    plain = alone(model, prompt).tolist()
    string = text(tokenizer, plain[3:5])
    expected = alone(model, prompt, stop_strings=string, tokenizer=tokenizer).tolist()
    assert len(expected) < NEW
    with tcb.continuous_batching_context_manager(
        model, config, continuous_batching_config=dict(SETTINGS)
    ) as manager:
        own = {"stop_strings": [string], "tokenizer": tokenizer}
        stopped = manager.add_request(prompt, streaming=True, **own)
        other = manager.add_request(prompt)
        streamed = list(manager.request_id_iter(stopped))
        assert manager.get_result(other).generated_tokens == plain
    assert [output.generated_tokens for output in streamed] == [
        expected[: n + 1] for n in range(len(expected))
    ]
    assert streamed[-1].status is tcb.RequestStatus.FINISHED


@pytest.mark.parametrize("strings", [["x"], "x"])
def test_stop_strings_need_a_tokenizer(model, strings):
    with pytest.raises(ValueError, match=r"stop_strings is .*x.*; accepted: None without `token"):
        batch(model, PROMPTS, stop_strings=strings)
    manager = tcb.init_continuous_batching(model, None, dict(SETTINGS))
    with pytest.raises(ValueError, match="stop_strings"):
        manager.add_request(PROMPTS[0], stop_strings=strings)


@pytest.mark.parametrize("strings", [[""], [5], ["a", ""]])
def test_stop_strings_that_are_none_are_refused(model, tokenizer, strings):
    with pytest.raises(ValueError, match=r"stop_strings is .*accepted: non-empty strings"):
        batch(model, PROMPTS, stop_strings=strings, tokenizer=tokenizer)


# criteria and time


class After(StoppingCriteria):
    """Ends after a number of calls, and remembers them."""

    def __init__(self, calls):
        self.left = calls

    def __call__(self, input_ids, scores, **_):
        assert scores is None and input_ids.shape[0] == 1
        self.left -= 1
        return torch.tensor([self.left <= 0])


class Until(StoppingCriteria):
    """Ends with a token of a kind; holds a model, which nobody copies."""

    def __init__(self, model):
        self.model = model

    def __call__(self, input_ids, scores, **_):
        assert isinstance(self.model, torch.nn.Module) and not hasattr(self.model, "copied")
        return input_ids[:, -1] % 5 == 0

    def __deepcopy__(self, memo):
        assert memo[id(self.model)] is self.model
        return Until(self.model)


@pytest.mark.parametrize("depth", [False, True], ids=["depth 0", "depth 1"])
def test_criteria_end_where_generate_does(model, depth):
    makers = [lambda: [After(3)], lambda: [Until(model)], lambda: [After(9), Until(model)]]
    for make in makers:
        expected = [
            alone(model, prompt, stopping_criteria=StoppingCriteriaList(make())).tolist()
            for prompt in PROMPTS
        ]
        assert any(len(tokens) < NEW for tokens in expected)
        given = StoppingCriteriaList(make())
        found = batch(model, PROMPTS, depth, stopping_criteria=given)
        assert [output.generated_tokens for output in found] == expected
        # what was handed in is not written
        assert all(each.left in (3, 9) for each in given if isinstance(each, After))


class Locked(After):
    """Holds what cannot be copied."""

    def __init__(self):
        super().__init__(3)
        self.lock = threading.Lock()


@pytest.mark.parametrize("name", ["stopping_criteria", "logits_processor"])
def test_what_cannot_be_copied_is_refused_by_name(model, name):
    options = {name: [Locked()]}
    with pytest.raises(ValueError, match=r"Locked.* cannot be copied for each request: .*lock"):
        raise ValueError(batch(model, PROMPTS, **options)[0].error)
    manager = tcb.init_continuous_batching(model, None, dict(SETTINGS))
    with pytest.raises(ValueError, match="cannot be copied for each request"):
        manager.add_request(PROMPTS[0], **options)


def test_a_criterion_that_raises_ends_its_request_alone(model):
    def fails_for_long_ones(input_ids, scores):
        if input_ids.shape[1] > 30:
            raise KeyError("too long")
        return torch.tensor([False])

    found = batch(model, PROMPTS, stopping_criteria=[fails_for_long_ones])
    for prompt, output in zip(PROMPTS, found, strict=True):
        wanted = alone(model, prompt).tolist()
        if len(prompt) + NEW <= 30:
            assert output.error is None and output.generated_tokens == wanted
        else:
            assert output.error == "stopping criterion: KeyError: 'too long'"
            assert output.generated_tokens == wanted[: max(1, 31 - len(prompt))]


def test_the_callers_criterion_goes_before_its_like(model, tokenizer):
    own = [StopStringCriteria(tokenizer, ["fefefe"]), MaxTimeCriteria(60.0)]
    string = text(tokenizer, alone(model, PROMPTS[0]).tolist()[:1])
    options = {"stop_strings": string, "tokenizer": tokenizer, "stopping_criteria": own}
    (output,) = batch(model, PROMPTS[:1], max_time=1e-9, **options)
    assert len(output.generated_tokens) == NEW


def test_max_time_ends_after_a_token(model):
    found = batch(model, PROMPTS, max_time=1e-9)
    for prompt, output in zip(PROMPTS, found, strict=True):
        assert output.generated_tokens == alone(model, prompt, max_time=1e-9).tolist()
        assert len(output.generated_tokens) == 1 and output.error is None
    assert len(batch(model, PROMPTS[:1], max_time=60.0)[0].generated_tokens) == NEW


def test_max_time_of_one_request_runs_from_its_submission(model):
    manager = tcb.init_continuous_batching(
        model, GenerationConfig(max_new_tokens=NEW, do_sample=False), dict(SETTINGS)
    )
    short, long = (manager.add_request(PROMPTS[0], max_time=limit) for limit in (0.05, 600.0))
    time.sleep(0.1)
    with manager.session():
        outputs = {each: manager.get_result(each) for each in (short, long)}
    assert len(outputs[short].generated_tokens) == 1
    assert len(outputs[long].generated_tokens) == NEW


# processors


class Alternate(LogitsProcessor):
    """Keeps state: bans even tokens at every second call."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        scores = scores.clone()
        if self.calls % 2:
            scores[:, ::2] = -torch.inf
        return scores


class NoRepeat(LogitsProcessor):
    """Bans every token that there was."""

    def __call__(self, input_ids, scores):
        return scores.scatter(1, input_ids, -torch.inf)


def odd_after_even(batch_id, input_ids):
    assert batch_id == 0
    return list(range(1 - int(input_ids[-1]) % 2, 200, 2))


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"logits_processor": LogitsProcessorList([Alternate(), NoRepeat()])},
        lambda: {"prefix_allowed_tokens_fn": odd_after_even},
        lambda: {"logits_processor": [NoRepeat()], "repetition_penalty": 1.5},
    ],
    ids=["two processors", "allowed tokens", "beside an option"],
)
def test_processors_give_the_tokens_of_generate(model, make):
    expected = [alone(model, prompt, **make()).tolist() for prompt in PROMPTS]
    assert expected != [alone(model, prompt).tolist() for prompt in PROMPTS]
    found = batch(model, PROMPTS, **make())
    assert [output.generated_tokens for output in found] == expected


def test_processors_of_one_request(model):
    config = GenerationConfig(do_sample=False, max_new_tokens=NEW)
    prompt = PROMPTS[2]
    with tcb.continuous_batching_context_manager(
        model, config, continuous_batching_config=dict(SETTINGS)
    ) as manager:
        own = manager.add_request(prompt, logits_processor=[Alternate()])
        other = manager.add_request(prompt)
        outputs = {each: manager.get_result(each).generated_tokens for each in (own, other)}
    assert outputs[own] == alone(model, prompt, logits_processor=[Alternate()]).tolist()
    assert outputs[other] == alone(model, prompt).tolist()


def test_paged_generate_takes_them(model):
    rows = torch.tensor([PROMPTS[0], PROMPTS[0][::-1]])
    options = {"do_sample": False, "max_new_tokens": NEW}
    tcb.install()
    try:
        paged = model.generate(
            rows, None, [Alternate()], [After(4)], cache_implementation="paged", **options
        )
    finally:
        tcb.uninstall()
    for row, prompt in zip(paged[0], rows.tolist(), strict=True):
        wanted = alone(model, prompt, logits_processor=[Alternate()], max_new_tokens=4)
        assert row[len(prompt) :].tolist() == wanted.tolist()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"logits_processor": NoRepeat()}, "logits_processor is a NoRepeat; accepted: a list"),
        ({"stopping_criteria": [5]}, "stopping_criteria holds a int; accepted: callables"),
        ({"prefix_allowed_tokens_fn": 5}, "prefix_allowed_tokens_fn holds a int"),
    ],
)
def test_what_cannot_be_called_is_refused(model, options, words):
    with pytest.raises(TypeError, match=words):
        batch(model, PROMPTS, **options)
    manager = tcb.init_continuous_batching(model, None, dict(SETTINGS))
    with pytest.raises(TypeError, match=words):
        manager.add_request(PROMPTS[0], **options)
