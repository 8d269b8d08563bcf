"""What cases act on: a tiny model, and managers of it."""

from collections.abc import Callable
from typing import Any

from transformers import GenerationConfig

import tcb
from tests.support.families import FAMILIES

SMALL = {"page_size": 8, "num_blocks": 64, "max_batch_tokens": 32}
PROMPT = [5, 9, 31]
Case = Callable[["World"], Any]


class FailedOutput(Exception):
    """The reason in an output that is FAILED."""


class World:
    """A tiny model, and managers of it that are destroyed after each case."""

    def __init__(self) -> None:
        self.model = FAMILIES["llama"]()
        self._waiting: Any = None

    def manager(self, **settings: Any) -> Any:
        """A new manager, not started."""
        config = GenerationConfig(max_new_tokens=4)
        return tcb.init_continuous_batching(self.model, config, SMALL | settings)

    @property
    def waiting(self) -> Any:
        """A manager, not started, for requests that are refused on their way in."""
        if self._waiting is None:
            self._waiting = self.manager()
        return self._waiting

    def batch(self, prompts: Any = (PROMPT,), **keywords: Any) -> dict[str, Any]:
        """`tcb.generate_batch` of few tokens."""
        keywords = {"continuous_batching_config": SMALL, "max_new_tokens": 2} | keywords
        return tcb.generate_batch(self.model, prompts, **keywords)
