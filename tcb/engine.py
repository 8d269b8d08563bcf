"""Turn the requests for one model into tokens: plan, pack, launch, land; the same at depth 0 and 1.

Threads, queues and delivery belong to `service`, a batch on the device to `device.runner`.
"""

from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager
from time import perf_counter

import torch
from transformers import PreTrainedModel

from tcb.device.facts import read_facts
from tcb.device.flight import InFlightBatch
from tcb.device.mode import plain_mode
from tcb.device.ranks import Ranks
from tcb.device.runner import Runner
from tcb.model.parallel import tensor_parallel
from tcb.model.prepared import prepare
from tcb.model.probe import ModelLayers
from tcb.options.generation import GenerationOptions
from tcb.options.processors import histories_of
from tcb.planning.config import ContinuousBatchingConfig
from tcb.planning.groups import group_layers
from tcb.planning.limits import Limits, WorkloadHints, resolve, with_sizes
from tcb.planning.meter import Meter
from tcb.planning.packing import pack_batch
from tcb.planning.plan import BatchPlan
from tcb.planning.request import Request
from tcb.planning.schedule import plan_batch
from tcb.planning.state import (
    SampledTokens,
    Sequence,
    State,
    StepOutput,
    apply_arrival,
    apply_cancel,
    apply_new_weights,
    apply_plan,
    apply_results,
    new_state,
)
from tcb.planning.tokens import check_prompt

NOTHING = StepOutput((), ())


class Engine:
    """One model's continuous batching: its sequences, its cache, its batches.

    What changes it belongs to one thread at a time; any thread may ask questions; an answer may
    be a step old. Raises ValueError (a model, an option or a setting that cannot be served) and
    MemoryError before anything starts.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        options: GenerationOptions,
        config: ContinuousBatchingConfig,
        hints: WorkloadHints | None = None,
    ) -> None:
        self.model, self.options, self.config = model, options, config
        self._place = _place(model)
        self.ranks = Ranks(tensor_parallel(model), config.cpu_group_timeout)
        with self.ranks.together():
            prepared = prepare(model)
            self.layers: ModelLayers = prepared.layers
            groups = group_layers(self.layers.layers)
            facts = read_facts(model, self.layers, groups, options, hints or WorkloadHints())
            self.limits: Limits = resolve(config, self.ranks.agree_on_facts(facts, config))
            self.state: State = new_state(groups, self.limits)
            self._runner = Runner(prepared, groups, self.state.columns, self.limits, self.ranks)
        self._flying: deque[tuple[BatchPlan, InFlightBatch]] = deque()
        self._reads_history = False
        self.meter = Meter()

    @property
    def has_work(self) -> bool:
        """True while anything waits, runs or flies."""
        return bool(self.state.waiting or self.state.running or self._flying)

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Live sequences that have a row in the batches."""
        return tuple(self.state.running.values())

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        """Live sequences that wait for one."""
        return tuple(self.state.waiting.values())

    def serves(self, options: GenerationOptions, config: ContinuousBatchingConfig) -> bool:
        """Whether a new engine, built for these now, would be no different."""
        return (
            config.asks_engine_as(self.config)
            and options.needs_history <= self.options.needs_history
            and self._place == _place(self.model)
        )

    def resolved(self, config: ContinuousBatchingConfig) -> ContinuousBatchingConfig:
        """A copy of a configuration that this engine serves, with the sizes that it has."""
        return with_sizes(config, self.limits, len(self.state.groups))

    def read_prompt(self, tokens: Iterable[int]) -> tuple[int, ...]:
        """The token ids of a prompt as plain integers; ValueError says which one is none of this
        model's.
        """
        return check_prompt(tokens, self.layers.num_embeddings)

    def mode(self) -> AbstractContextManager[None]:
        """What steps run in, whatever the caller's thread is set to."""
        return plain_mode(self.layers.device)

    def submit(self, request: Request) -> None:
        """Queue a request that was checked and whose id is not live; its forks follow it before the
        next step.
        """
        self._reads_history |= request.processors is not None
        apply_arrival(self.state, request)

    def cancel(self, request_id: str) -> list[Sequence]:
        """End a request where it stands. Returns it, and those forks of it that had not begun."""
        return apply_cancel(self.state, request_id)

    def step(self) -> StepOutput:
        """Plan and launch the next batch, then land the oldest one if more than `depth` fly or
        nothing was planned.
        """
        plan = plan_batch(self.state, self.limits)
        if not plan.is_empty:
            self._launch(plan)
        if self._flying and (len(self._flying) > self.limits.depth or plan.is_empty):
            return self._land()
        assert self._flying or not self.has_work, f"nothing can be planned: {self.state.waiting}"
        return NOTHING

    def drain(self) -> list[StepOutput]:
        """Land everything that flies."""
        return [self._land() for _ in range(len(self._flying))]

    def refresh_weights(self) -> bool:
        """Look whether the model is still that of the cached keys and values; if not, or if that
        cannot be known, all are forgotten.

        For the borders where somebody else may have changed it. Nothing may fly: drain first.
        Returns whether they were forgotten.
        """
        assert not self._flying, f"{len(self._flying)} batches fly while weights are compared"
        prepared = prepare(self.model)
        if prepared is self._runner.prepared and not prepared.reads_elsewhere:
            return False
        if prepared.layers != self.layers:
            raise RuntimeError(
                f"{type(self.model).__name__} changed its layers, dtype or device while its cache "
                "was in use; stop the manager and start another"
            )
        self._runner.prepared = prepared
        apply_new_weights(self.state)
        return True

    def fail_all(self) -> list[Sequence]:
        """End every live sequence after an error that leaves the device's state unknown; the cache
        is forgotten.
        """
        self._flying.clear()
        live = [*self.running, *self.waiting]
        for sequence in live:
            apply_cancel(self.state, sequence.request.id)
        apply_new_weights(self.state)
        return live

    def close(self) -> None:
        """Give the device's memory back; the engine is of no use after it."""
        self._flying.clear()
        self.ranks.close()
        del self._runner

    def _launch(self, plan: BatchPlan) -> None:
        self.meter.add(plan)
        packed = pack_batch(self.state, plan)
        histories = histories_of(self.state, plan) if self._reads_history else {}
        apply_plan(self.state, plan, perf_counter())
        self._flying.append((plan, self._runner.launch(packed, histories)))

    def _land(self) -> StepOutput:
        plan, flight = self._flying.popleft()
        with self.meter.waiting():
            tokens, logprobs = flight.land(self.ranks)
        errors = {plan.sample_seq_ids[place]: text for place, text in flight.errors.items()}
        return apply_results(
            self.state, plan, SampledTokens(tokens, logprobs, errors), perf_counter()
        )


def _place(model: PreTrainedModel) -> tuple[torch.device, torch.dtype]:
    return model.device, model.dtype
