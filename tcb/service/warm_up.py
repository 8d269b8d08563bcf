"""Rehearses serving before the first request, so that none waits for a kernel to be compiled.

Requests of our own go through the engine, in batches of every make-up that lets a launcher choose
another kernel: alone and together, of one token, of few and of many, fresh, decoding and mixed,
forked. How many requests there are and how long they are chooses nothing else: no kernel is
compiled for a length or a count (docs/kernels.md). What they leave behind goes with their state;
blocks and rows are written anew before they are read.
"""

import logging
from time import perf_counter

from tcb.engine import Engine
from tcb.planning.limits import Limits
from tcb.planning.meter import Meter
from tcb.planning.request import Request
from tcb.planning.state import new_state

logger = logging.getLogger("ContinuousBatchingLogger")

# more rows than a narrow tile has, whatever the number of heads that share a key
_MANY = 80
_NEW_TOKENS = 6
# steps after which the second half of a rehearsal arrives, while the first still decodes
_STEPS_BETWEEN = 3
Wave = tuple[tuple[int, ...], tuple[int, ...]]


def warm_up(engine: Engine) -> bool:
    """Compile what serving can ask for, where kernels are compiled: not on a CPU.

    Only a fresh engine is rehearsed: content of the cache that others may read would be written
    over. Several ranks serve without: each takes only requests that rank 0 shares out. True, as
    nothing is left to do.
    """
    if engine.layers.device.type == "cpu" or engine.ranks.size > 1 or engine.state.next_seq_id:
        return True
    begin = perf_counter()
    logger.info("warm-up: compiling kernels; quick where Triton's cache on disk has them")
    with engine.mode():
        rehearse(engine)
    logger.info("warm-up: done after %.1f s", perf_counter() - begin)
    return True


def rehearse(engine: Engine) -> None:
    """Run every wave to its end in a state of its own; the engine's state and its meter are as they
    were afterwards.
    """
    own, meter = engine.state, engine.meter
    engine.meter = Meter()
    try:
        for wave in waves(engine.limits):
            engine.state = new_state(own.groups, engine.limits)
            _run(engine, wave)
    except BaseException:
        engine.fail_all()
        raise
    finally:
        engine.state, engine.meter = own, meter


def waves(limits: Limits) -> list[Wave]:
    """Lengths of the prompts that arrive at first, and of those that find the first decoding."""
    longest = min(limits.max_batch_tokens, limits.max_length - _NEW_TOKENS)
    few, many = max(1, min(2, longest)), max(1, min(_MANY, longest))
    fresh = [(1,), (few,), (many,), (many, few, 1), (few, few)]
    mixed = [(1,), (few,), (many,), (many, few)]
    return [(lengths, ()) for lengths in fresh] + [((1, few), lengths) for lengths in mixed]


def _run(engine: Engine, wave: Wave) -> None:
    for lengths in wave:
        for length in lengths:
            name, count = str(engine.state.next_seq_id), min(_NEW_TOKENS, engine.limits.max_length)
            request = Request(name, (0,) * length, count)
            engine.submit(request)
            if len(lengths) > 2:
                engine.submit(Request(name + "'", request.prompt, count, parent=name))
        for _ in range(_STEPS_BETWEEN):
            if engine.has_work:
                engine.step()
    while engine.has_work:
        engine.step()
