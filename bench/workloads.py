"""What is asked of a system in one round: prompts, and a number of new tokens.

It knows lengths and texts, and neither systems nor models.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from bench.texts import prompts, random_prompts


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts of about `length` tokens (a quarter less or more), the first `shared` ones common."""

    requests: int
    length: int
    new_tokens: int
    shared: int = 0

    def lengths(self) -> list[int]:
        """Length of each prompt, the common start included; the same in every run."""
        spread = self.length // 4
        draw = random.Random(self.requests).randint
        return [
            self.shared + draw(self.length - spread, self.length + spread)
            for _ in range(self.requests)
        ]

    def prompts(self, tokenizer: PreTrainedTokenizerBase | None, vocab: int) -> list[list[int]]:
        """The prompts as token ids: of text, or random ones below `vocab` without a tokenizer."""
        make: Callable = prompts if tokenizer else random_prompts
        return make(tokenizer or vocab, self.lengths(), shared=self.shared)


WORKLOADS = {
    "chat": Workload(requests=32, length=16, new_tokens=32),
    "long": Workload(requests=16, length=256, new_tokens=32),
    "shared": Workload(requests=32, length=16, new_tokens=32, shared=1024),
    "many": Workload(requests=512, length=16, new_tokens=32),
}
