"""Random workloads that take the scheduler through everything it can do, in pools down to the
tightest in which it must work.

It knows nothing of how they are served.
"""

from dataclasses import replace
from random import Random
from typing import Any

from tcb.planning.groups import LayerGroup
from tcb.planning.limits import Limits, blocks_needed
from tests.planning.serving import Arrival, Workload
from tests.planning.toy import VOCAB

WINDOWS = (1, 2, 3, 4, 5, 7, 8, 12, 16, 24)


def layer_group(window: int | None, layer: int = 0) -> LayerGroup:
    """One layer of this window; nothing here depends on its shape."""
    return LayerGroup(layers=(layer,), window=window, kv_heads=1, dim=1, value_dim=1)


def make_limits(**changes: Any) -> Limits:
    """Limits for small cases, but for what is named."""
    limits = Limits(
        page_size=4,
        num_blocks=64,
        max_batch_tokens=16,
        max_requests=8,
        safety_margin=0.0,
        policy="fifo",
        share_prefixes=True,
        depth=0,
        host_blocks=0,
        max_length=64,
        return_logprobs=False,
    )
    return replace(limits, **changes)


def random_workload(rng: Random) -> Workload:
    """One workload; `rng` may be hypothesis' own, which shrinks."""
    groups = _random_groups(rng)
    # many that start small and grow long in a small pool: that is what preemption is for
    pressed = rng.random() < 0.3
    arrivals = _random_arrivals(rng, pressed)
    return Workload(
        groups=groups,
        limits=_random_limits(rng, groups, arrivals, pressed),
        arrivals=arrivals,
        cancels=_random_cancels(rng, arrivals),
        new_weights=tuple(rng.randint(1, 40) for _ in range(rng.choice((0, 0, 0, 1, 2)))),
    )


def _random_groups(rng):
    kinds = rng.choice(("full", "sliding", "hybrid", "hybrid"))
    if kinds == "full":
        windows = [None] * rng.randint(1, 2)
    elif kinds == "sliding":
        windows = [rng.choice(WINDOWS) for _ in range(rng.randint(1, 3))]
    else:
        windows = [None, *(rng.choice(WINDOWS) for _ in range(rng.randint(1, 3)))]
        rng.shuffle(windows)
    return tuple(layer_group(window, layer) for layer, window in enumerate(windows))


def _random_arrivals(rng, pressed):
    base = [rng.randrange(VOCAB) for _ in range(48)]
    spread = rng.choice((0, 0, 5, 40))
    # steps of 4 tokens: many prompts end where pages do
    lengths = rng.choice((range(1, 48), range(4, 49, 4), range(1, 9), (1, 2)))
    most_new = rng.choice((4, 12, 24))
    if pressed:
        lengths, most_new = range(1, 13), 40
    arrivals: list[Arrival] = []
    for i in range(rng.randint(1, 10)):
        step, kind = rng.randint(0, spread), rng.random()
        common = {"max_new_tokens": rng.randint(1, most_new), "stops": rng.random() < 0.3}
        if rng.random() < 0.03:
            common["fails_at"] = rng.randint(0, 4)
        parents = [a for a in arrivals if a.parent is None and not a.id.startswith("again")]
        if kind < 0.2 and parents:
            parent = rng.choice(parents)
            step = parent.step + rng.choice((0, 0, 0, 1, 3))
            arrivals.append(Arrival(step, f"{parent.id}#{i}", parent=parent.id, **common))
        elif kind < 0.3 and arrivals:
            prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 6)))
            after = rng.choice(arrivals).id
            arrivals.append(Arrival(step, f"turn{i}", prompt, after=after, **common))
        else:
            name = "again" if kind < 0.4 else f"r{i}"
            prompt = _random_prompt(rng, base, rng.choice(lengths))
            arrivals.append(Arrival(step, name, prompt, **common))
    return tuple(arrivals)


def _random_prompt(rng, base, length):
    """A prompt of its own, the start of a common one, or a common page at another depth."""
    own = [rng.randrange(VOCAB) for _ in range(length)]
    kind = rng.random()
    if kind < 0.3:
        return tuple(own)
    start = rng.choice((0, 0, 4, 8)) if kind < 0.5 else 0
    common = rng.choice((length, length, max(0, length - 1), length // 2, min(length, 8)))
    return tuple((base[start : start + common] + own)[:length])


def _random_limits(rng, groups, arrivals, pressed):
    longest = 0
    for arrival in arrivals:
        # tokens of earlier turns are cut where they do not fit
        prompt = len(arrival.prompt) + (rng.choice((8, 40)) if arrival.after else 0)
        prompt = max(prompt, *(len(a.prompt) for a in arrivals)) if arrival.parent else prompt
        longest = max(longest, prompt + arrival.max_new_tokens)
    max_length = longest + rng.choice((0, 0, 1, 30))
    page_size = rng.choice((4, 4, 5, 8, 16))
    least = blocks_needed(groups, page_size, max_length)
    spare = (0, 1, 2, 3) if pressed else (0, 1, 3, 5, least // 2, least, 3 * least, 10 * least)
    return Limits(
        page_size=page_size,
        num_blocks=least + rng.choice(spare),
        max_batch_tokens=rng.choice((1, 2, 3, 5, 8, 13, 32, 64, 200)),
        max_requests=rng.choice((4, 8) if pressed else (1, 2, 3, 4, 8, 16)),
        safety_margin=rng.choice((0.0, 0.0, 0.15, 0.5, 1.0)),
        policy=rng.choice(("fifo", "prefill_first")),
        share_prefixes=rng.random() < 0.8,
        depth=rng.choice((0, 1)),
        host_blocks=rng.choice((0, 0, 1, 3, least, 4 * least)),
        max_length=max_length,
        return_logprobs=False,
    )


def _random_cancels(rng, arrivals):
    return tuple(
        (arrival.step + rng.choice((0, 1, 2, 5, 9, 20)), arrival.id)
        for arrival in arrivals
        if rng.random() < 0.08
    )
