"""Read the generation options of a call: each honoured as `generate` does, or refused by name.

Values a caller leaves out come from the model's generation config and then from transformers'
defaults, by the function that `generate` uses. Temperature, top-k, top-p and min-p are numbers of a
row, handed to the sampling kernel. An option that needs the history of a request becomes
transformers' own logits processors, built for each request as `generate` builds them.

It does not know the engine or its batches, draws nothing, and writes neither to the caller's
objects nor to any random state.
"""

import copy
import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation import logits_process

from tcb.planning.request import SamplingParams, end_tokens

_NATIVE = (
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.MinPLogitsWarper,
)
# options that the engine cannot honour: the values that mean "off", and what it says of them
_REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "num_beams": (lambda value: value in (None, 1), "1 (there is no beam search)"),
    "constraints": (lambda value: value is None, "None (there is no beam search)"),
    "force_words_ids": (lambda value: value is None, "None (there is no beam search)"),
    "stop_strings": (lambda value: value is None, "None (there is no tokenizer)"),
    "token_healing": (lambda value: not value, "False (there is no tokenizer)"),
    "max_time": (lambda value: value is None, "None"),
    "guidance_scale": (lambda value: value in (None, 1), "1 (there is no second forward)"),
    "penalty_alpha": (lambda value: not value, "None (there is no contrastive search)"),
    "dola_layers": (lambda value: value is None, "None"),
    "prompt_lookup_num_tokens": (lambda value: value is None, "None (nothing is speculated)"),
    "assistant_early_exit": (lambda value: value is None, "None (nothing is speculated)"),
    "use_mtp": (lambda value: not value, "False (nothing is speculated)"),
    "speculation_type": (lambda value: value is None, "None (nothing is speculated)"),
    "is_assistant": (lambda value: not value, "False (nothing is speculated)"),
    "output_attentions": (lambda value: not value, "False"),
    "output_hidden_states": (lambda value: not value, "False"),
    "output_scores": (lambda value: not value, "False"),
    "output_logits": (lambda value: not value, "False"),
    "return_dict_in_generate": (lambda value: not value, "False"),
    "cache_implementation": (
        lambda value: value in (None, "paged", "dynamic", "dynamic_full"),
        "None, 'paged', 'dynamic' or 'dynamic_full' (keys and values are always paged)",
    ),
    "cache_config": (lambda value: not value, "None (keys and values are always paged)"),
}
_MASK_64 = 2**64 - 1
_calls = itertools.count()


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """The generation options of a call or of one request.

    eos              ids that end a generation; none where `generate` would know none
    max_new_tokens   most new tokens; None: `max_length` says; both None: transformers' default
    seed             a seed of this request's own, or None
    needs_history    whether scores must pass the processors of `processors_for`, which then hold
                     temperature, top-k, top-p and min-p too, in the order of `generate`, and
                     `sampling_for` leaves those off
    """

    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    eos: frozenset[int]
    num_return_sequences: int
    max_new_tokens: int | None
    max_length: int | None
    needs_history: bool
    seed: int | None = None
    _config: GenerationConfig = field(kw_only=True, repr=False, compare=False)
    _model: PreTrainedModel = field(kw_only=True, repr=False, compare=False)

    def new_tokens_for(self, prompt_length: int) -> int:
        """Most new tokens after a prompt of this length.

        As `GenerationMixin._prepare_generated_length` has it (the same in transformers 5.17 and
        5.24): max_new_tokens, else max_length less the prompt, else 20, but no further than
        max_position_embeddings. ValueError where nothing is left, as
        `GenerationMixin._validate_generated_length` has it.
        """
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        name, limit = "max_length", self.max_length
        if limit is None:
            limit = prompt_length + GenerationConfig._get_default_generation_params()["max_length"]
            positions = getattr(self._model.config, "max_position_embeddings", None)
            if positions is not None and positions < limit:
                name, limit = "max_position_embeddings", positions
        if limit <= prompt_length:
            raise ValueError(
                f"{name} is {limit}, but the prompt has {prompt_length} tokens; "
                f"accepted: max_length > {prompt_length}, or max_new_tokens"
            )
        return limit - prompt_length

    def sampling_for(self, seed: int, child: int = 0) -> SamplingParams:
        """How the sampling kernel draws for a request; a seed of its own (`override`) goes before
        `seed`."""
        if not self.do_sample:
            return SamplingParams()
        if self.seed is not None:
            seed = request_seed(self.seed, 0, child)
        if self.needs_history:
            return SamplingParams(do_sample=True, seed=seed)
        return SamplingParams(
            do_sample=True,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=seed,
        )

    def override(self, **fields: Any) -> "GenerationOptions":
        """The options of one request: temperature, top_k, top_p, min_p, do_sample and seed, None to
        leave as is.

        ValueError names a field of a wrong type or range, TypeError an unknown one.
        """
        unknown = fields.keys() - _OVERRIDES.keys()
        if unknown:
            raise TypeError(
                f"unknown sampling option {sorted(unknown)[0]!r}; accepted: {', '.join(_OVERRIDES)}"
            )
        given = {name: value for name, value in fields.items() if value is not None}
        for name, value in given.items():
            accepts, accepted = _OVERRIDES[name]
            if not accepts(value):
                raise ValueError(f"{name} is {value!r}; accepted: {accepted}")
        seed = given.pop("seed", self.seed)
        if not given:
            return replace(self, seed=seed)
        config = copy.copy(self._config)
        for name, value in given.items():
            setattr(config, name, _OPTION_TYPES[name](value))
        return _options(self._model, config, seed)

    def processors_for(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        eos: Iterable[int] | None = None,
        device: torch.device | str | None = None,
    ) -> LogitsProcessorList | None:
        """The logits processors of one request, fresh (some keep state), for `apply_history`; None
        if none is needed.

        device   where the scores will be; the model's if None
        eos      ids that end this generation; those of the options if None
        """
        if not self.needs_history:
            return None
        eos = self.eos if eos is None else eos
        device = self._model.device if device is None else device
        return _processors(self._model, self._config, prompt, max_new_tokens, eos, device)


def read_options(
    model: PreTrainedModel, generation_config: GenerationConfig | None = None, **fields: Any
) -> GenerationOptions:
    """The options that `model.generate(generation_config=..., **fields)` would use.

    fields   generation options that go before those of the config; None leaves the config's value
    Raises ValueError that names an option the engine cannot honour, or one that `generate` would
    not accept, and TypeError for a field that is no generation option. Writes nothing.
    """
    base = generation_config if generation_config is not None else GenerationConfig()
    fields = {name: value for name, value in fields.items() if value is not None}
    for name in fields:
        if name not in vars(base) or name.startswith("_"):
            raise TypeError(f"unknown generation option {name!r}")
    sources = (fields.get("max_length"), base.max_length, model.generation_config.max_length)
    has_length = any(length is not None for length in sources)
    config, _ = model._prepare_generation_config(copy.deepcopy(base), **fields)
    if not has_length:
        config.max_length = None
    return _options(model, config, None)


def apply_history(
    processors: LogitsProcessorList, input_ids: Sequence[int], scores: torch.Tensor
) -> torch.Tensor:
    """The scores [vocab] fp32 of one request after its processors; `scores` [vocab] (any floating
    dtype) is unchanged.

    input_ids   prompt and generated tokens so far
    Raises what a processor raises: it concerns this request alone.
    """
    history = torch.tensor([input_ids], dtype=torch.long, device=scores.device)
    processed = processors(history, scores[None].to(torch.float32, copy=True))
    if processed.shape != (1, *scores.shape):
        raise ValueError(
            f"the logits processors gave scores of shape {list(processed.shape)}; "
            f"accepted: {[1, *scores.shape]}"
        )
    return processed[0]


def draw_base_seed(seed: int | None) -> int:
    """The seed of a run, in [-2^63, 2^63): `seed` if given, else one made of torch's CPU random
    state and a call count.

    The state is read, not advanced. After `torch.manual_seed` a program draws the same seeds from
    run to run, and two calls in a row draw different ones.
    """
    if seed is not None:
        if not _is_integer(seed):
            raise ValueError(f"seed is {seed!r}; accepted: integers")
        return _signed(int(seed))
    state = torch.random.default_generator.get_state().numpy().tobytes()
    digest = hashlib.blake2b(state, digest_size=8, salt=next(_calls).to_bytes(8, "little"))
    return _signed(int.from_bytes(digest.digest(), "little"))


def request_seed(base_seed: int, ordinal: int, child: int = 0) -> int:
    """The seed of one request, in [-2^63, 2^63): the base seed mixed with the request's ordinal and
    child number.

    Three rounds of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", 2014).
    """
    mixed = 0
    for word in (base_seed, ordinal, child):
        mixed = _splitmix(mixed ^ (word & _MASK_64))
    return _signed(mixed)


def _splitmix(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & _MASK_64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return state ^ (state >> 31)


def _signed(word: int) -> int:
    """The int64 that has the low 64 bits of `word`."""
    return ((word + 2**63) & _MASK_64) - 2**63


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


_OPTION_TYPES = {
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "do_sample": bool,
}
_OVERRIDES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (lambda value: _is_number(value) and value > 0, "finite numbers > 0"),
    "top_k": (lambda value: _is_integer(value) and value >= 0, "integers >= 0 (0 is off)"),
    "top_p": (lambda value: _is_number(value) and 0 <= value <= 1, "numbers in [0, 1]"),
    "min_p": (lambda value: _is_number(value) and 0 <= value <= 1, "numbers in [0, 1]"),
    "do_sample": (lambda value: isinstance(value, bool), "True, False"),
    "seed": (_is_integer, "integers"),
}


def _options(
    model: PreTrainedModel, config: GenerationConfig, seed: int | None
) -> GenerationOptions:
    """The options of a config in which every default is filled in, but for a max_length that nobody
    gave."""
    for name, (is_off, accepted) in _REFUSED.items():
        value = getattr(config, name, None)
        if not is_off(value):
            raise ValueError(f"{name} is {value!r}; accepted: {accepted}")
    for name in ("max_new_tokens", "max_length"):
        value = getattr(config, name)
        if value is not None and not (_is_integer(value) and value > 0):
            raise ValueError(f"{name} is {value!r}; accepted: integers > 0")
    sampling = _sampling_fields(config) if config.do_sample else SamplingParams()
    eos = end_tokens(config.eos_token_id)
    processors = _processors(model, config, (0,), 1, eos, torch.device("cpu"))
    return GenerationOptions(
        do_sample=bool(config.do_sample),
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        eos=eos,
        num_return_sequences=config.num_return_sequences,
        max_new_tokens=config.max_new_tokens,
        max_length=config.max_length,
        needs_history=any(type(processor) not in _NATIVE for processor in processors),
        seed=seed,
        _config=config,
        _model=model,
    )


def _sampling_fields(config: GenerationConfig) -> SamplingParams:
    """Temperature, top-k, top-p and min-p with the values of "off" that the kernel knows; writes
    whole temperatures into the config as floats, which is all that transformers' warper takes."""
    if _is_integer(config.temperature):
        config.temperature = float(config.temperature)
    top_p = 1.0 if config.top_p is None else config.top_p
    return SamplingParams(
        do_sample=True,
        temperature=1.0 if config.temperature is None else config.temperature,
        top_k=0 if config.top_k is None else config.top_k,
        # as in `generate`, a top_p of 1 and more is off
        top_p=min(top_p, 1.0) if _is_number(top_p) else top_p,
        min_p=0.0 if config.min_p is None else config.min_p,
    )


def _processors(
    model: PreTrainedModel,
    config: GenerationConfig,
    prompt: Sequence[int],
    max_new_tokens: int,
    eos: Iterable[int],
    device: torch.device | str,
) -> LogitsProcessorList:
    """What `GenerationMixin.generate` builds for this prompt alone: its steps 3 (special tokens), 6
    (lengths) and 8."""
    config = copy.copy(config)
    config.eos_token_id = sorted(eos) or None
    config.max_length = len(prompt) + max_new_tokens
    if config.min_new_tokens is not None:
        config.min_length = len(prompt) + config.min_new_tokens
    try:
        model._prepare_special_tokens(config, True, device=device, batch_size=1)
        return model._get_logits_processor(
            generation_config=config,
            input_ids_seq_length=len(prompt),
            encoder_input_ids=torch.tensor([prompt], dtype=torch.long, device=device),
            logits_processor=LogitsProcessorList(),
            device=device,
            model_kwargs={},
        )
    except (ValueError, TypeError, AttributeError, RuntimeError, IndexError) as error:
        raise ValueError(f"generation options {_active(config)} are refused: {error}") from error


def _active(config: GenerationConfig) -> dict[str, Any]:
    """The options of a config that are not transformers' defaults."""
    defaults = {**GenerationConfig().to_dict(), **GenerationConfig._get_default_generation_params()}
    return {
        name: value
        for name, value in config.to_dict().items()
        if not name.startswith("_")
        and not name.endswith("_token_id")
        and name != "max_length"
        and value is not None
        and value != defaults.get(name)
    }
