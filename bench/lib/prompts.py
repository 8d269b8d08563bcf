"""What is asked of a system in one round: prompts, the same on every machine, and new tokens.

Prompts of any length are text put together from templates by a seed, or random token ids.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

SUBJECTS = (
    "the old lighthouse keeper",
    "a young botanist",
    "the night train to the coast",
    "my neighbour's orchard",
    "the committee on bridges",
    "a flock of starlings",
    "the printer in the basement",
    "every student of the class",
    "the glacier above the village",
    "an engineer from Lisbon",
    "the second violin",
    "a careful translator",
)
VERBS = (
    "measured",
    "forgot about",
    "painted a picture of",
    "wrote a long letter about",
    "argued against",
    "slowly rebuilt",
    "counted",
    "was surprised by",
    "kept a record of",
    "explained",
    "could never find",
    "had waited for",
)
OBJECTS = (
    "the tides of the northern bay",
    "seven kinds of moss",
    "the price of copper in 1887",
    "the rules of an ancient card game",
    "a map with no roads on it",
    "the first snow of the year",
    "the sound of rain on tin roofs",
    "a recipe for rye bread",
    "three theories of colour",
    "the weight of a single feather",
    "the orbit of a small moon",
    "the grammar of a lost language",
)
OPENINGS = (
    "In the spring,",
    "As far as anyone knows,",
    "Before the war,",
    "On the third day,",
    "For no good reason,",
    "According to the newspaper,",
    "Long after midnight,",
    "To everybody's relief,",
    "It is said that",
    "When the power failed,",
)
CLOSINGS = (
    "and nobody asked why.",
    "which is why the door was left open.",
    "but the answer was never published.",
    "although the instruments disagreed.",
    "until the money ran out.",
    "and the children remembered it for years.",
    "as the table below shows.",
    "so the work began again from page one.",
)
PARTS = (OPENINGS, SUBJECTS, VERBS, OBJECTS, CLOSINGS)


def sentences(count: int, seed: int) -> str:
    """Return `count` sentences; the seed decides which."""
    choose = random.Random(seed).choice
    return " ".join(" ".join(choose(part) for part in PARTS) for _ in range(count))


def prompts(
    tokenizer: PreTrainedTokenizerBase, lengths: Sequence[int], seed: int = 0, shared: int = 0
) -> list[list[int]]:
    """Return one prompt of token ids for each of `lengths`; the first `shared` tokens are common.

    `lengths` count whole prompts, the common start included, and each must exceed `shared`.
    """
    if min(lengths) <= shared:
        raise ValueError(f"lengths: the shortest is {min(lengths)}, must exceed shared = {shared}")
    start = _tokens(tokenizer, shared, seed)
    return [
        start + _tokens(tokenizer, length - shared, seed + 1 + i, whole=not shared)
        for i, length in enumerate(lengths)
    ]


def random_prompts(
    vocabulary: int, lengths: Sequence[int], seed: int = 0, shared: int = 0
) -> list[list[int]]:
    """Return prompts as `prompts` does, of random token ids, for a model without a tokenizer."""
    choose = random.Random(seed)
    start = [choose.randrange(vocabulary) for _ in range(shared)]
    return [
        start + [choose.randrange(vocabulary) for _ in range(length - shared)] for length in lengths
    ]


def _tokens(
    tokenizer: PreTrainedTokenizerBase, count: int, seed: int, whole: bool = True
) -> list[int]:
    # a sentence has more than twelve tokens; an opening token belongs to a whole prompt only
    text = sentences(count // 12 + 1, seed)
    tokens = tokenizer(text, add_special_tokens=whole)["input_ids"]
    assert len(tokens) >= count, f"{len(tokens)} tokens of text for a prompt of {count}"
    return tokens[:count]


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts of about `length` tokens (a quarter less or more), the first `shared` ones common."""

    requests: int
    length: int
    new_tokens: int
    shared: int = 0

    def changed(self, **fields: int | None) -> "Workload":
        """The same workload but for the fields that are not None."""
        return replace(self, **{name: n for name, n in fields.items() if n is not None})

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
