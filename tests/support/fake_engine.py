"""An engine without a model, over the real planning, that a test can hold, slow down or break.

The next token is a function of all tokens so far. It knows neither queues nor threads; a test
reaches the engines that managers built through `FakeEngine.built`.
"""

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from time import sleep
from types import SimpleNamespace

import torch

from tcb.device.ranks import Ranks
from tcb.engine import Engine
from tcb.planning.groups import Layer, group_layers
from tcb.planning.limits import Limits
from tcb.planning.meter import Meter
from tcb.planning.schedule import plan_batch
from tcb.planning.state import (
    SampledTokens,
    StepOutput,
    apply_arrival,
    apply_cancel,
    apply_new_weights,
    apply_plan,
    apply_results,
    new_state,
)
from tcb.planning.tokens import check_prompt

VOCAB = 101
LIMITS = Limits(
    page_size=4,
    num_blocks=64,
    max_batch_tokens=32,
    max_requests=8,
    safety_margin=0.0,
    policy="fifo",
    share_prefixes=True,
    depth=0,
    host_blocks=0,
    max_length=200,
    return_logprobs=True,
)


def next_token(tokens: Sequence[int]) -> int:
    """The token after these."""
    return (31 * sum(tokens) + 7 * len(tokens) + tokens[-1]) % VOCAB


def tokens_after(prompt: Sequence[int], count: int) -> list[int]:
    """What a request gets, alone or not."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class FakeEngine:
    """The interface of `tcb.engine.Engine`.

    go         a step waits for it; set at first
    entered    set when a step begins
    pace       seconds that a step takes at least
    breaks     what the next step raises, if anything
    weights    what stands for the weights; `refresh_weights` compares it
    calls      the threads that called, but for `close`
    """

    built: list["FakeEngine"]

    def __init__(self, model, options, config, hints=None):
        self.model, self.options, self.config, self.hints = model, options, config, hints
        self.layers = SimpleNamespace(device=torch.device("cpu"))
        page_size = LIMITS.page_size if config.page_size == 256 else config.page_size
        share = config.allow_block_sharing
        self.limits = replace(LIMITS, share_prefixes=share, page_size=page_size)
        self.state = new_state(group_layers([Layer(0, None, 1, 8, 8)]), self.limits)
        self._place = model.device, model.dtype
        self.go, self.entered = threading.Event(), threading.Event()
        self.go.set()
        self.pace = 0.0
        self.breaks: BaseException | None = None
        self.weights = self._seen_weights = 0
        self.refreshes, self.closed = 0, False
        self.meter = Meter()
        self.calls: list[int] = []
        self.ranks = Ranks(None, None)
        type(self).built.append(self)

    @property
    def has_work(self):
        return bool(self.state.waiting or self.state.running)

    @property
    def running(self):
        return tuple(self.state.running.values())

    @property
    def waiting(self):
        return tuple(self.state.waiting.values())

    def serves(self, options, config):
        return Engine.serves(self, options, config)

    def resolved(self, config):
        return Engine.resolved(self, config)

    def mode(self):
        return nullcontext()

    def read_prompt(self, tokens):
        return check_prompt(tokens, VOCAB)

    def submit(self, request):
        self._called()
        assert request.id not in self.state.seq_ids
        apply_arrival(self.state, request)

    def cancel(self, request_id):
        self._called()
        return apply_cancel(self.state, request_id)

    def step(self):
        self._called()
        self.entered.set()
        self.go.wait()
        sleep(self.pace)
        if self.breaks is not None:
            raise self.breaks
        plan = plan_batch(self.state, self.limits)
        self.meter.add(plan)
        if plan.is_empty:
            return StepOutput((), ())
        apply_plan(self.state, plan, 1.0)
        sequences = [self.state.find(seq_id) for seq_id in plan.sample_seq_ids]
        tokens = [next_token(sequence.known()) for sequence in sequences]
        return apply_results(self.state, plan, SampledTokens(tokens, [-0.5] * len(tokens)), 2.0)

    def drain(self):
        self._called()
        return []

    def refresh_weights(self):
        self._called()
        self.refreshes += 1
        changed = self.weights != self._seen_weights
        if changed:
            self._seen_weights = self.weights
            apply_new_weights(self.state)
        return changed

    def fail_all(self):
        self._called()
        live = [*self.running, *self.waiting]
        for sequence in live:
            apply_cancel(self.state, sequence.request.id)
        return live

    def close(self):
        assert not self.closed, "closed twice"
        self.closed = True

    def _called(self):
        assert not self.closed, "used after close"
        self.calls.append(threading.get_ident())
