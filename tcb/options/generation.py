"""Read the generation options of a call once: each honoured as `generate` does, or refused by name.

Values a caller leaves out come from the model's generation config and then from transformers'
defaults, by the function that `generate` uses. An option that needs the history of a request
becomes transformers' own logits processors (`processors`); every other one is a number of the
request. Nothing that a caller hands in is written.
"""

import copy
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from operator import index, not_
from typing import Any

from torch import nn
from transformers import GenerationConfig, LogitsProcessorList

from tcb.options.own_code import OWN_CODE, OwnCode, Stop, may_stop, stop_strings
from tcb.options.processors import build_processors, need_history
from tcb.options.seeds import request_seed
from tcb.planning.request import SamplingParams
from tcb.planning.rules import Rule, is_integer, is_number
from tcb.planning.tokens import end_tokens

logger = logging.getLogger("ContinuousBatchingLogger")


def _is_none(value: Any) -> bool:
    return value is None


def _is_one(value: Any) -> bool:
    return value in (None, 1)


def _is_length(value: Any) -> bool:
    try:
        return value is None or (not isinstance(value, bool) and index(value) > 0)
    except TypeError:
        return False


def _is_duration(value: Any) -> bool:
    return value is None or (is_number(value) and value > 0)


# which values of an option are honoured
_RULES = {
    "num_beams": Rule("1 (there is no beam search)", _is_one),
    "constraints": Rule("None (there is no beam search)", _is_none),
    "force_words_ids": Rule("None (there is no beam search)", _is_none),
    "token_healing": Rule("False (prompts are taken as they are)", not_),
    "max_time": Rule("seconds > 0", _is_duration),
    "guidance_scale": Rule("1 (there is no second forward)", _is_one),
    "penalty_alpha": Rule("None (there is no contrastive search)", not_),
    "dola_layers": Rule("None", _is_none),
    "prompt_lookup_num_tokens": Rule("None (nothing is speculated)", _is_none),
    "assistant_early_exit": Rule("None (nothing is speculated)", _is_none),
    "use_mtp": Rule("False (nothing is speculated)", not_),
    "speculation_type": Rule("None (nothing is speculated)", _is_none),
    "is_assistant": Rule("False (nothing is speculated)", not_),
    "output_attentions": Rule("False", not_),
    "output_hidden_states": Rule("False", not_),
    "cache_implementation": Rule(
        "None, 'paged', 'dynamic' or 'dynamic_full' (keys and values are always paged)",
        lambda value: value in (None, "paged", "dynamic", "dynamic_full"),
    ),
    "cache_config": Rule("None (keys and values are always paged)", not_),
    "max_new_tokens": Rule("integers > 0", _is_length),
    "max_length": Rule("integers > 0", _is_length),
    "num_return_sequences": Rule("integers > 0", _is_length),
}
# what asks `generate` for a record in place of tokens: outputs are records anyway
ASKS_FOR_RECORD = ("output_scores", "output_logits", "return_dict_in_generate")
# sampling options of a config: the values that mean off
_OFF: dict[str, Any] = {each.name: each.default for each in fields(SamplingParams)}
del _OFF["seed"]
# what one request may have of its own; any integer is a seed, for seeds are hashed
_OF_A_REQUEST = {
    **{each.name: each.metadata["rule"] for each in fields(SamplingParams)},
    "seed": Rule("integers", is_integer),
    "max_new_tokens": _RULES["max_new_tokens"],
    "eos_token_id": Rule("an integer, integers", lambda value: True),
    "stop_strings": Rule("a string, strings", lambda value: True),
    "max_time": _RULES["max_time"],
    **dict.fromkeys(OWN_CODE, Rule("as in `generate`", lambda value: True)),
}


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """The generation options of a call or of one request.

    sampling            how its rows draw; the seed comes with `sampling_for`
    eos                 ids that end a generation; none where `generate` would know none
    max_new_tokens      most new tokens; None: `max_length` says; both None: transformers' default
    seed                a seed of this request's own, or None
    needs_history       whether scores must pass the processors of `processors_for`, which then hold
                        temperature, top-k, top-p and min-p too, in the order of `generate`, and
                        `sampling` leaves those off
    generation_config   a copy of what was given, with the call's keywords set; no default filled in
    own                 what the caller brings that runs between two tokens
    """

    sampling: SamplingParams
    eos: frozenset[int]
    num_return_sequences: int
    max_new_tokens: int | None
    max_length: int | None
    needs_history: bool
    seed: int | None = None
    generation_config: GenerationConfig = field(kw_only=True, repr=False, compare=False)
    own: OwnCode = field(kw_only=True, repr=False, compare=False)
    _config: GenerationConfig = field(kw_only=True, repr=False, compare=False)
    _model: Any = field(kw_only=True, repr=False, compare=False)

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
        """How the row of a request draws; a seed of its own (`override`) goes before `seed`."""
        if not self.sampling.do_sample:
            return self.sampling
        own = seed if self.seed is None else request_seed(self.seed, 0, child)
        return replace(self.sampling, seed=own)

    def processors_for(
        self, prompt: Sequence[int], max_new_tokens: int
    ) -> LogitsProcessorList | None:
        """The logits processors of one request, fresh (some keep state), for `apply_history`; None
        if none is needed."""
        if not self.needs_history:
            return None
        return build_processors(
            self._model, self._config, prompt, max_new_tokens, self.eos, own=self.own
        )

    def stop_now(self) -> Stop | None:
        """What ends one request before its length and its end tokens do, fresh: clocks run from
        now on. None if nothing does.
        """
        if not may_stop(self._config, self.own):
            return None
        return Stop(self._config, self.own, self._model.device)

    def override(self, **request_options: Any) -> "GenerationOptions":
        """The options of one request, None to leave as is: every field of `SamplingParams`,
        max_new_tokens, eos_token_id, stop_strings, max_time and the fields of `OwnCode`.

        ValueError names an option of a wrong type or range, TypeError an unknown one.
        """
        for name in sorted(request_options.keys() - _OF_A_REQUEST.keys()):
            accepted = ", ".join(_OF_A_REQUEST)
            raise TypeError(f"unknown option of a request {name!r}; accepted: {accepted}")
        given = {name: value for name, value in request_options.items() if value is not None}
        for name, value in given.items():
            _require(name, value, _OF_A_REQUEST[name])
        own: dict[str, Any] = {}
        if "eos_token_id" in given:
            own["eos"] = end_tokens(given["eos_token_id"])
        for name in given.keys() & {"seed", "max_new_tokens"}:
            own[name] = index(given[name])
        own["own"] = code = self.own.replace(_subset(given, OWN_CODE))
        if sampling := given.keys() & {*_OFF, "stop_strings", "max_time", *OWN_CODE}:
            config = copy.copy(self._config)
            for name in sampling - {*OWN_CODE}:
                setattr(config, name, type(_OFF.get(name, given[name]))(given[name]))
            stop_strings(config, code.tokenizer)
            own |= {"_config": config, **_read_sampling(self._model, config, self.eos, code)}
        return replace(self, **own)

    def without_processing(self) -> "GenerationOptions":
        """These options with nothing that changes logits before a token is chosen."""
        plain = self.override(**(_OFF | {"do_sample": None}))
        own = replace(self.own, logits_processor=None, prefix_allowed_tokens_fn=None)
        return replace(plain, own=own, needs_history=False)


def read_options(
    model: nn.Module,
    generation_config: GenerationConfig | None = None,
    options: Mapping[str, Any] | None = None,
) -> GenerationOptions:
    """What `model.generate(generation_config=..., **options)` would use, the model's own config
    where none is given.

    options   go before those of the config; None leaves the config's value. The fields of `OwnCode`
              too
    Raises ValueError that names an option the engine cannot honour, or one that `generate` would
    not accept, and TypeError for an unknown option and for what is no generation config.
    """
    if not hasattr(model, "_prepare_generation_config"):
        raise TypeError(
            f"model is a {type(model).__name__}, which cannot generate; accepted: a language "
            "model, as AutoModelForCausalLM returns it"
        )
    options = options or {}
    own = OwnCode().replace(_subset(options, OWN_CODE))
    given = _given(
        model, generation_config, {name: options[name] for name in options if name not in OWN_CODE}
    )
    generator: Any = model
    lengths = given.max_length, generator.generation_config.max_length
    config, _ = generator._prepare_generation_config(given)
    if lengths == (None, None):
        # transformers' default is a length for each prompt (`new_tokens_for`)
        config.max_length = None
    for name, rule in _RULES.items():
        _require(name, getattr(config, name, None), rule)
    for name in ASKS_FOR_RECORD:
        if getattr(config, name, None):
            _say_what_outputs_hold(name)
    stop_strings(config, own.tokenizer)
    eos = end_tokens(config.eos_token_id)
    return GenerationOptions(
        eos=eos,
        num_return_sequences=_integer(config.num_return_sequences) or 1,
        max_new_tokens=_integer(config.max_new_tokens),
        max_length=_integer(config.max_length),
        generation_config=given,
        own=own,
        _config=config,
        _model=model,
        **_read_sampling(model, config, eos, own),
    )


def config_within(generation_config: Any) -> Any:
    """The continuous batching config that a generation config carries, the old way; or None."""
    config = getattr(generation_config, "continuous_batching_config", None)
    if config is not None:
        logger.warning(
            "the continuous batching config comes inside the generation config, which transformers "
            "deprecates; it is honoured, but better passed as continuous_batching_config"
        )
    return config


def _given(model: nn.Module, generation_config: Any, options: Mapping[str, Any]) -> Any:
    """A copy of the generation config, or of the model's own, with these options set."""
    own = getattr(model, "generation_config", None)
    given = copy.deepcopy(own if generation_config is None else generation_config)
    if given is None:
        kind = type(model).__name__
        raise ValueError(f"generation_config is None, and a {kind} has none; accepted: a config")
    if not hasattr(given, "max_new_tokens"):
        kind = type(given).__name__
        raise TypeError(f"generation_config is a {kind}; accepted: a GenerationConfig, and None")
    known = vars(type(given)())
    for name, value in options.items():
        if name not in known or name.startswith("_"):
            raise TypeError(
                f"generate_batch() got an unexpected keyword argument {name!r}; accepted beside "
                f"its own: the fields of GenerationConfig, {', '.join(OWN_CODE)}"
            )
        if value is not None:
            setattr(given, name, value)
    return given


@cache
def _say_what_outputs_hold(name: str) -> None:
    """Log, once in the life of the process, that an option changes no output."""
    logger.warning(
        "%s has no effect: an output is a record of its tokens and, with return_logprobs=True in "
        "the continuous batching config, of their log-probabilities",
        name,
    )


def _subset(options: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: options[name] for name in names if options.get(name) is not None}


def _require(name: str, value: Any, rule: Rule) -> None:
    if not rule.holds(value):
        raise ValueError(f"{name} is {value!r}; accepted: {rule.accepted}")


def _integer(value: Any) -> int | None:
    return None if value is None else index(value)


def _read_sampling(
    model: nn.Module, config: GenerationConfig, eos: Iterable[int], own: OwnCode
) -> dict[str, Any]:
    """The fields `sampling` and `needs_history` of these options. Writes whole numbers into the
    config as floats where floats are meant: transformers' warpers take nothing else."""
    sampling = SamplingParams()
    if config.do_sample:
        values: dict[str, Any] = {name: getattr(config, name, None) for name in _OFF}
        for name, value in values.items():
            if isinstance(_OFF[name], float) and is_integer(value):
                values[name] = float(value)
                setattr(config, name, values[name])
        if is_number(values["top_p"]):
            # as in `generate`, 1 and more is off
            values["top_p"] = min(values["top_p"], _OFF["top_p"])
        given = {name: value for name, value in values.items() if value is not None}
        sampling = SamplingParams(**given | {"do_sample": True})
    needs_history = bool(own.logits_processor or own.prefix_allowed_tokens_fn) or need_history(
        build_processors(model, config, (0,), 1, eos, "cpu")
    )
    if needs_history:
        sampling = SamplingParams(do_sample=sampling.do_sample)
    return {"sampling": sampling, "needs_history": needs_history}
