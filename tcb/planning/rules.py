"""Rules: which values a field accepts, in words and as two questions."""

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from numbers import Integral, Real
from typing import Any


def _always(value: Any) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Rule:
    """What is accepted: `is_kind` asks for the type, `is_in_range` for a value of that type."""

    accepted: str
    is_kind: Callable[[Any], bool]
    is_in_range: Callable[[Any], bool] = _always

    def holds(self, value: Any) -> bool:
        """Whether the value is accepted."""
        return self.is_kind(value) and self.is_in_range(value)


def is_integer(value: Any) -> bool:
    """Whether a value is a whole number of any integer type; booleans are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether a value is a finite real number of any type; booleans are none."""
    return _is_real(value) and isfinite(value)


def integers(least: int, most: int | None = None, accepted: str | None = None) -> Rule:
    """Integers from `least` to `most`, both included."""
    if most is None:
        return Rule(accepted or f"integers >= {least}", is_integer, lambda value: value >= least)
    accepted = accepted or f"integers in [{least}, {most}]"
    return Rule(accepted, is_integer, lambda value: least <= value <= most)


def numbers(accepted: str, holds: Callable[[Any], bool]) -> Rule:
    """Finite numbers for which `holds`."""
    return Rule(accepted, _is_real, lambda value: isfinite(value) and holds(value))


def words(*words: str) -> Rule:
    """One of these strings."""
    accepted = " or ".join(map(repr, words))
    return Rule(accepted, lambda value: isinstance(value, str), lambda value: value in words)


def none_or(rule: Rule) -> Rule:
    """None, and what the rule accepts."""
    return Rule(
        f"None and {rule.accepted}",
        lambda value: value is None or rule.is_kind(value),
        lambda value: value is None or rule.is_in_range(value),
    )


def _is_real(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


BOOLEANS = Rule("True and False", lambda value: isinstance(value, bool))
SHARES = numbers("numbers in [0, 1]", lambda value: 0 <= value <= 1)
