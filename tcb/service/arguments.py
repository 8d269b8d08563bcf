"""Reads what a user hands to a function of this package: models, generation options, prompts.

It changes nothing it is given, and knows nothing of managers.
"""

import logging
from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any

from torch import nn

from tcb.planning.limits import WorkloadHints

logger = logging.getLogger("ContinuousBatchingLogger")


def choose_generation_config(
    model: nn.Module, generation_config: Any, options: dict[str, Any] | None = None
) -> Any:
    """A copy of the generation config, or of the model's own, with these options set.

    Raises TypeError for an option that is no field of it, ValueError where there is no config.
    """
    given = generation_config
    if given is None:
        given = getattr(model, "generation_config", None)
    if given is None:
        kind = type(model).__name__
        raise ValueError(f"generation_config is None, and a {kind} has none; accepted: a config")
    if not hasattr(given, "max_new_tokens"):
        kind = type(given).__name__
        raise TypeError(f"generation_config is a {kind}; accepted: a GenerationConfig, and None")
    config, fields = deepcopy(given), vars(type(given)())
    for name, value in (options or {}).items():
        if name not in fields or name.startswith("_"):
            raise TypeError(
                f"generate_batch() got an unexpected keyword argument {name!r}; accepted beside "
                "its own: the fields of GenerationConfig"
            )
        if value is not None:
            setattr(config, name, value)
    return config


def list_of_prompts(inputs: Any) -> list[Any]:
    """The prompts one by one, whatever is in them. Raises TypeError for what holds no prompts."""
    if isinstance(inputs, str | bytes | Mapping) or not isinstance(inputs, Iterable):
        kind = type(inputs).__name__
        raise TypeError(
            f"inputs is a {kind}; accepted: prompts, each a list of token ids, such as the "
            "'input_ids' of a tokenizer's output"
        )
    return list(inputs)


def config_within(generation_config: Any) -> Any:
    """The continuous batching config that a generation config carries, the old way; or None."""
    config = getattr(generation_config, "continuous_batching_config", None)
    if config is not None:
        logger.warning(
            "the continuous batching config comes inside the generation config, which transformers "
            "deprecates; it is honoured, but better passed as continuous_batching_config"
        )
    return config


def hints_of(prompts: Iterable[Any], generation_config: Any, for_more: bool) -> WorkloadHints:
    """What a call foretells of its requests; with `for_more`, others may follow that differ."""
    lengths = [_length(prompt) for prompt in prompts]
    outputs = getattr(generation_config, "num_return_sequences", None) or 1
    return WorkloadHints(
        max_prompt_length=max(lengths, default=0),
        max_generated_length=getattr(generation_config, "max_new_tokens", None) or 0,
        num_requests=0 if for_more else len(lengths) * outputs,
    )


def _length(prompt):
    """Tokens of a prompt; 0 for what is none, which is refused later, alone."""
    try:
        return len(prompt)
    except TypeError:
        return 0
