"""What a case comes to: the type of the error, and the facts that its message states.

Facts outlive a better wording: names, numbers and quoted words; of errors in our usual forms also
which field it is, its value, and what is accepted.
"""

import logging
import re
import sys
from collections.abc import Callable
from typing import Any

_LOGGER = logging.getLogger("ContinuousBatchingLogger")
_FORMS = (
    re.compile(r"(?P<field>[\w\[\]]+) is (?P<value>.*); accepted: (?P<accepted>.*)", re.DOTALL),
    re.compile(r"(?P<field>[\w\[\]]+): expected (?P<accepted>.*), got (?P<value>.*)", re.DOTALL),
)
_FACT = re.compile(r"'[^']*'|[A-Za-z_][\w.#]*|-?\d+(?:\.\d+)?(?:e[+-]?\d+)?|[<>]=?")
_WORDS = {"True", "False", "None", "integers", "numbers", "integer", "finite", "inf", "nan"}
_WORDS |= {"temperature", "seed", "streamer", "pause", "CPU", "GiB"}
# bytes of this machine
_MACHINE = re.compile(r"\b(?!2147483647\b)\d{6,}\b|\b\d+\.\d{3,}\b|\b\d+(?= bytes)")


def facts_of(message: str) -> list[str]:
    """The names, numbers and quoted words of a message, without what depends on the machine or on
    the release of transformers."""
    message, _, _ = message.partition(" are refused: ")
    message = re.sub(r"\b0x[0-9a-f]+\b", "", message).replace("integers > 0", "integers >= 1")
    found = _FACT.findall(_MACHINE.sub("", message))
    return sorted({fact for fact in found if _is_fact(fact)})


def _is_fact(word: str) -> bool:
    is_name = word[0].isalpha() and ("_" in word or any(c.isupper() for c in word[1:]))
    return is_name or not word[0].isalpha() or word in _WORDS


def observe(case: Callable[[Any], Any], world: Any) -> dict[str, Any]:
    """The error that a case raises, and the warnings and errors that it logs."""
    lines: list[str] = []
    handler = _Lines(lines)
    for module in [m for name, m in sys.modules.items() if name.startswith("tcb.planning")]:
        # a setting without effect is logged once a process
        for value in vars(module).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()
    _LOGGER.addHandler(handler)
    seen: dict[str, Any] = {}
    try:
        case(world)
    except Exception as error:
        seen = _facts_of_error(error)
    finally:
        _LOGGER.removeHandler(handler)
    return seen | ({"log": [facts_of(line) for line in lines]} if lines else {})


def _facts_of_error(error: Exception) -> dict[str, Any]:
    message = str(error)
    seen: dict[str, Any] = {"error": type(error).__name__, "facts": facts_of(message)}
    for match in filter(None, (form.fullmatch(message) for form in _FORMS)):
        seen |= {"field": match["field"], "value": _MACHINE.sub("", match["value"])}
        seen["accepted"] = facts_of(match["accepted"])
    return seen


class _Lines(logging.Handler):
    def __init__(self, lines: list[str]):
        super().__init__(logging.WARNING)
        self.lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname}_LEVEL {record.getMessage()}")
