"""Read token ids as users hand them in: prompts, and the ids that end a generation."""

from collections.abc import Iterable, Mapping, Set
from operator import index
from typing import Any


def check_prompt(tokens: Iterable[int], vocab_size: int) -> tuple[int, ...]:
    """The token ids of a prompt as plain integers, each in [0, vocab_size).

    Takes lists, tuples, other ordered iterables, and one-dimensional arrays and tensors. An element
    is an integer or something that stands for one (`__index__`); booleans are not integers.
    Raises ValueError that says what is wrong, and at which place of the prompt.
    """
    if tokens is None or isinstance(tokens, str | bytes | bytearray | Mapping | Set):
        kind = type(tokens).__name__
        raise ValueError(f"prompt is a {kind}; accepted: a one-dimensional sequence of token ids")
    plain = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    if not isinstance(plain, Iterable):
        raise ValueError(f"prompt is {plain!r}; accepted: a one-dimensional sequence of token ids")
    prompt = tuple(plain)
    if not prompt:
        raise ValueError("prompt is empty; accepted: at least one token id")
    # the set of types is a third of the price of a look at every element
    if set(map(type, prompt)) != {int}:
        prompt = tuple(
            _plain_integer(f"prompt[{place}]", token) for place, token in enumerate(prompt)
        )
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        place = next(i for i, token in enumerate(prompt) if not 0 <= token < vocab_size)
        raise ValueError(
            f"prompt[{place}] is {prompt[place]}; accepted: token ids in [0, {vocab_size})"
        )
    return prompt


def end_tokens(value: Any) -> frozenset[int]:
    """The ids that an `eos_token_id` names: an integer, several of them, an array or tensor, None.

    Negative ids match no token and are left out. Raises ValueError for anything else.
    """
    plain = value.tolist() if hasattr(value, "tolist") else value
    plain = [] if plain is None else plain
    several = isinstance(plain, Iterable) and not isinstance(plain, str | bytes | Mapping)
    accepted = "an integer, integers, None"
    tokens = plain if several else [plain]
    ids = [_plain_integer("eos_token_id", token, accepted) for token in tokens]
    return frozenset(token for token in ids if token >= 0)


def _plain_integer(name: str, token: Any, accepted: str = "integers") -> int:
    """The integer that a token id stands for; `item` opens scalars of arrays."""
    try:
        plain = token.item() if hasattr(token, "item") else token
        if isinstance(plain, bool):
            raise TypeError
        return index(plain)
    except (TypeError, ValueError, RuntimeError):
        shown = f"{token!r} of type {type(token).__name__}"
        raise ValueError(f"{name} is {shown:.200}; accepted: {accepted}") from None
