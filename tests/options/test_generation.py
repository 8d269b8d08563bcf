"""Generation options: what is read from where, what is refused by name, and how seeds are made."""

import copy
import math

import pytest
import torch
from transformers import GenerationConfig, WatermarkingConfig

from tcb.options.generation import ASKS_FOR_RECORD, _say_what_outputs_hold
from tcb.options.processors import apply_history
from tcb.options.seeds import draw_base_seed
from tcb.planning.request import SamplingParams
from tests.support.options import HISTORY, PROMPT, VOCAB, WARPERS, build, generate, read


@pytest.fixture(scope="module")
def shared_model():
    return build()


@pytest.fixture
def model(shared_model):
    """The tiny model with the generation config it came with, whatever a test does to that."""
    original = copy.deepcopy(shared_model.generation_config)
    yield shared_model
    shared_model.generation_config = original


# what is read


def test_plain_options_need_no_history(model):
    options = read(model, max_new_tokens=3)
    assert not options.needs_history
    assert options.processors_for(PROMPT, 3) is None
    assert options.sampling_for(9) == SamplingParams()
    assert options.eos == {2}


def test_sampling_defaults_are_those_of_generate(model):
    options = read(model, do_sample=True)
    assert options.sampling_for(9) == SamplingParams(do_sample=True, top_k=50, seed=9)


def test_the_options_of_a_checkpoint_come_before_defaults_and_after_the_caller(model):
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.6, top_p=0.95, top_k=20, eos_token_id=[2, 7]
    )
    assert read(model).sampling_for(0) == SamplingParams(True, 0.6, 20, 0.95)
    assert read(model).eos == {2, 7}
    given = GenerationConfig(temperature=0.8, top_k=0, eos_token_id=-1)
    options = read(model, given, top_p=1.0)
    assert options.sampling_for(0) == SamplingParams(True, 0.8, 0, 1.0)
    assert options.eos == frozenset()


@pytest.mark.parametrize(
    "eos, wanted",
    [(None, {2}), (5, {5}), ([5, 6], {5, 6}), (torch.tensor([5]), {5}), (-1, set()), ([], set())],
)
def test_end_tokens(model, eos, wanted):
    options = read(model, GenerationConfig(eos_token_id=eos))
    assert options.eos == wanted


def test_a_model_without_end_tokens_has_none(model):
    model.generation_config.eos_token_id = None
    assert read(model).eos == frozenset()


@pytest.mark.parametrize(
    "fields",
    [{}, {"max_length": 20}, {"max_length": 15, "max_new_tokens": 4}, {"max_new_tokens": 1}],
    ids=str,
)
@pytest.mark.parametrize("own", [{}, {"max_length": 9}, {"max_new_tokens": 3}], ids=str)
def test_lengths_are_those_of_generate(model, fields, own):
    # ids are told apart from the end token, so that the length alone ends a generation
    model.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=0, **own)
    options = read(model, GenerationConfig(**fields))
    made = generate(model, generation_config=GenerationConfig(**fields)).shape[1] - len(PROMPT)
    assert options.new_tokens_for(len(PROMPT)) == made


def test_the_default_length_stops_at_the_positions_of_the_model(model):
    prompt = torch.arange(60)[None] % VOCAB
    options = read(model)
    with pytest.warns(UserWarning, match="max_length"):
        made = model.generate(prompt, eos_token_id=-1).shape[1] - 60
    assert options.new_tokens_for(60) == made == 4
    with pytest.raises(ValueError, match="max_position_embeddings is 64"):
        options.new_tokens_for(64)


def test_a_prompt_beyond_max_length_is_refused_as_generate_does(model):
    options = read(model, max_length=6)
    with pytest.raises(ValueError, match="max_length"):
        generate(model, max_length=6)
    with pytest.raises(ValueError, match="max_length is 6"):
        options.new_tokens_for(len(PROMPT))


# what is refused

REFUSED = {
    "num_beams": 2,
    "constraints": ["x"],
    "force_words_ids": [[1]],
    "token_healing": True,
    "max_time": 0.0,
    "guidance_scale": 1.5,
    "penalty_alpha": 0.6,
    "dola_layers": "high",
    "prompt_lookup_num_tokens": 3,
    "assistant_early_exit": 2,
    "is_assistant": True,
    "output_attentions": True,
    "output_hidden_states": True,
    "cache_implementation": "static",
    "cache_config": {"nbits": 4},
    "max_new_tokens": 0,
    "max_length": 2.5,
    "eos_token_id": "x",
    "num_return_sequences": 2,
    "bad_words_ids": [],
    "repetition_penalty": -1.0,
    "no_repeat_ngram_size": 2.5,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(model, name):
    with pytest.raises(ValueError, match=name):
        read(model, GenerationConfig(**{name: REFUSED[name]}))


@pytest.mark.parametrize(
    "name, value",
    [
        ("temperature", 0.0),
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("top_k", -3),
        ("top_k", 2.5),
        ("top_p", -0.1),
        ("min_p", 1.5),
    ],
)
def test_sampling_options_out_of_range_are_refused_by_name_when_sampling(model, name, value):
    with pytest.raises(ValueError, match=f"{name} is"):
        read(model, do_sample=True, **{name: value})
    assert read(model, **{name: value}).sampling_for(0) == SamplingParams()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("num_return_sequences", 0, "num_return_sequences is 0; accepted: integers > 0"),
        ("num_return_sequences", -1, "num_return_sequences is -1; accepted: integers > 0"),
        ("num_return_sequences", 1.5, "num_return_sequences is 1.5; accepted: integers > 0"),
        ("min_new_tokens", "x", "'min_new_tokens': 'x'"),
    ],
)
def test_what_would_break_a_request_is_refused_by_name(model, name, value, words):
    with pytest.raises(ValueError, match=words):
        read(model, do_sample=True, **{name: value})


@pytest.mark.parametrize("name", ASKS_FOR_RECORD)
def test_what_asks_for_a_record_is_logged_once(model, caplog, name):
    _say_what_outputs_hold.cache_clear()
    config = GenerationConfig(**{name: True})
    assert read(model, config) == read(model, config) == read(model)
    lines = [line.message for line in caplog.records if line.name == "ContinuousBatchingLogger"]
    assert [line.partition(" ")[0] for line in lines] == [name]


def test_what_generate_ignores_is_ignored(model):
    harmless = GenerationConfig(
        early_stopping=True,
        length_penalty=2.0,
        use_cache=False,
        num_assistant_tokens=3,
        return_dict_in_generate=False,
        output_scores=False,
        guidance_scale=1.0,
        pad_token_id=7,
    )
    assert read(model, harmless) == read(model)


def test_every_option_of_transformers_has_an_answer(model):
    known = {
        *HISTORY,
        *WARPERS,
        *REFUSED,
        *("temperature", "top_k", "top_p", "min_p", "do_sample", "use_mtp", "speculation_type"),
        "stop_strings",
    }
    # no say in the tokens of one sequence that is decoded greedily or by sampling
    silent = {
        *("early_stopping", "length_penalty", "num_beam_groups", "diversity_penalty"),
        *("use_cache", "max_cache_len", "low_memory", "prefill_chunk_size"),
        *("pad_token_id", "bos_token_id", "decoder_start_token_id"),
        *("num_assistant_tokens", "num_assistant_tokens_schedule", "max_matching_ngram_size"),
        *("assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind"),
        *("assistant_ensemble_weight", "compile_config", "disable_compile"),
        *("continuous_batching_config", "transformers_version", *ASKS_FOR_RECORD),
    }
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert fields - known - silent == set()


def test_an_unknown_option_is_a_type_error(model):
    with pytest.raises(TypeError, match="'temprature'"):
        read(model, temprature=0.5)
    with pytest.raises(TypeError, match="'update'"):
        read(model, update=1)


# options of one request


def test_a_request_overrides_the_options_of_the_call(model):
    options = read(model, do_sample=True, temperature=0.5, top_k=7)
    own = options.override(temperature=2, top_p=0.5, top_k=None)
    assert own.sampling_for(1) == SamplingParams(True, 2.0, 7, 0.5, seed=1)
    assert isinstance(own.sampling.temperature, float)
    assert options.sampling_for(1) == SamplingParams(True, 0.5, 7, seed=1)
    assert options.override(do_sample=False).sampling_for(1) == SamplingParams()
    assert options.override(do_sample=True, min_p=0.1).sampling.min_p == 0.1


def test_a_request_that_samples_in_a_greedy_call_gets_the_warpers_of_generate(model):
    options = read(model, typical_p=0.5)
    assert not options.needs_history
    own = options.override(do_sample=True)
    assert own.needs_history
    assert [type(p).__name__ for p in own.processors_for(PROMPT, 3)] == [
        "TopKLogitsWarper",
        "TypicalLogitsWarper",
    ]


def test_a_seed_of_its_own_goes_before_that_of_the_run(model):
    options = read(model, do_sample=True)
    own = options.override(seed=5)
    assert own.sampling_for(1) == own.sampling_for(2) != options.sampling_for(1)
    assert own.sampling_for(1, child=1) != own.sampling_for(1)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": "1"},
        {"temperature": True},
        {"temperature": math.inf},
        {"top_k": -1},
        {"top_k": 1.0},
        {"top_p": 1.01},
        {"min_p": -0.1},
        {"do_sample": 1},
        {"seed": 0.5},
    ],
    ids=str,
)
def test_an_override_out_of_range_is_refused_by_name(model, fields):
    (name,) = fields
    with pytest.raises(ValueError, match=f"{name} is"):
        read(model).override(**fields)


def test_an_unknown_override_is_a_type_error(model):
    with pytest.raises(TypeError, match="'repetition_penalty'"):
        read(model).override(repetition_penalty=1.2)


def test_a_request_has_a_length_and_end_tokens_of_its_own(model):
    options = read(model, max_new_tokens=9, do_sample=True)
    own = options.override(max_new_tokens=torch.tensor(3), eos_token_id=[4, -1])
    assert (own.max_new_tokens, own.eos, own.sampling) == (3, {4}, options.sampling)
    assert own.new_tokens_for(500) == 3
    assert options.override(max_new_tokens=None, eos_token_id=None) == options
    for name, value in {"max_new_tokens": 0, "eos_token_id": "x"}.items():
        with pytest.raises(ValueError, match=f"{name} is {value!r}"):
            options.override(**{name: value})


def test_nothing_is_left_that_changes_logits(model):
    options = read(model, do_sample=True, temperature=0.5, repetition_penalty=1.3)
    plain = options.without_processing()
    assert options.needs_history and not plain.needs_history
    assert plain.sampling == SamplingParams(do_sample=True)
    assert plain.processors_for(PROMPT, 3) is None


def test_the_config_in_use_is_what_was_given_with_the_keywords_set(model):
    given = GenerationConfig(top_k=7)
    kept = read(model, given, temperature=0.5).generation_config
    assert kept is not given
    assert (kept.top_k, kept.temperature, kept.eos_token_id) == (7, 0.5, None)
    assert read(model).generation_config.eos_token_id == 2


# nothing is touched


def test_neither_configs_nor_random_state_change(model):
    given = GenerationConfig(do_sample=True, watermarking_config=WatermarkingConfig(), top_k=5)
    before = given.to_dict(), model.generation_config.to_dict(), model.config.to_dict()
    state = torch.get_rng_state()
    options = read(model, given, temperature=3)
    own = options.override(temperature=2, seed=3)
    apply_history(own.processors_for(PROMPT, 3), PROMPT, torch.zeros(VOCAB))
    draw_base_seed(None)
    after = given.to_dict(), model.generation_config.to_dict(), model.config.to_dict()
    assert before == after
    assert torch.equal(torch.get_rng_state(), state)
    warpers = options.override(top_k=3).processors_for(PROMPT, 3)
    assert 3.0 in [getattr(warper, "temperature", None) for warper in warpers]
