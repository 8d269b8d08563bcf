"""The loop that turns requests into tokens: plan, launch, land; one for depth 0 and 1.

Knows nothing of threads, queues or delivery (`manager`), and nothing of what a batch costs on the
device (`runner`).
"""

from collections import deque
from time import perf_counter

from transformers import PreTrainedModel

from tcb.device.facts import read_facts
from tcb.device.runner import Histories, InFlightBatch, Runner
from tcb.model.prepared import prepare
from tcb.model.probe import ModelLayers
from tcb.options.generation import GenerationOptions
from tcb.planning.config import ContinuousBatchingConfig
from tcb.planning.groups import group_layers
from tcb.planning.limits import Limits, WorkloadHints, resolve
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

NOTHING = StepOutput((), ())


class Engine:
    """One model's continuous batching. Every method but `check` belongs to one thread at a time.

    Raises ValueError (a model, an option or a setting that cannot be served) and MemoryError before
    anything starts.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        options: GenerationOptions,
        config: ContinuousBatchingConfig,
        hints: WorkloadHints | None = None,
    ):
        self.model, self.options = model, options
        self._prepared = prepare(model)
        self.layers: ModelLayers = self._prepared.layers
        groups = group_layers(self.layers.layers)
        facts = read_facts(model, self.layers, groups, options, hints or WorkloadHints())
        self.limits: Limits = resolve(config, facts)
        self.state: State = new_state(groups, self.limits)
        twin, columns = self._prepared.twin, self.state.columns
        self._runner = Runner(twin, self.layers, groups, columns, self.limits)
        self._flying: deque[tuple[BatchPlan, InFlightBatch]] = deque()

    @property
    def has_work(self) -> bool:
        """True while anything waits, runs or flies."""
        return bool(self.state.waiting or self.state.running or self._flying)

    def check(self, prompt_length: int, max_new_tokens: int) -> None:
        """Raise ValueError if a request of these lengths can never be computed. Reads the limits
        only.
        """
        # the last token is sampled, never computed
        positions = prompt_length + max_new_tokens - 1
        if positions > self.limits.max_length:
            raise ValueError(
                f"prompt of {prompt_length} tokens and max_new_tokens {max_new_tokens} need "
                f"{positions} positions; accepted: at most {self.limits.max_length} "
                "(more num_blocks or max_memory_percent allow more)"
            )

    def submit(self, request: Request) -> None:
        """Queue a request; its forks follow it before the next step. ValueError if it can never fit
        or its id is live.
        """
        self.check(len(request.prompt), request.max_new_tokens)
        if request.id in self.state.seq_ids:
            raise ValueError(f"request_id is {request.id!r}; accepted: ids of no live request")
        apply_arrival(self.state, request)

    def cancel(self, request_id: str) -> list[Sequence]:
        """End a request where it stands. Returns it, and those forks of it that had not begun."""
        return apply_cancel(self.state, request_id)

    def step(self) -> StepOutput:
        """Plan and launch the next batch, then land the oldest while more than `depth` fly or
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
        landed = []
        while self._flying:
            landed.append(self._land())
        return landed

    def refresh_weights(self) -> bool:
        """Look whether the weights are still those of the cached keys and values; if not, all are
        forgotten.

        For the borders where somebody else may have written them. Nothing may fly: drain first.
        Returns whether they changed.
        """
        assert not self._flying, f"{len(self._flying)} batches fly while weights are compared"
        prepared = prepare(self.model)
        if prepared is self._prepared:
            return False
        if prepared.layers != self.layers:
            raise RuntimeError(
                f"{type(self.model).__name__} changed its layers, dtype or device while its cache "
                "was in use; stop the manager and start another"
            )
        self._prepared, self._runner.twin = prepared, prepared.twin
        apply_new_weights(self.state)
        return True

    def fail_all(self) -> list[Sequence]:
        """End every live sequence after an error that leaves the device's state unknown; the cache
        is forgotten.
        """
        self._flying.clear()
        live = [*self.state.running.values(), *self.state.waiting.values()]
        for sequence in live:
            apply_cancel(self.state, sequence.request.id)
        apply_new_weights(self.state)
        return live

    def close(self) -> None:
        """Give the device's memory back; the engine is of no use after it."""
        self._flying.clear()
        del self._runner, self._prepared

    def _launch(self, plan: BatchPlan) -> None:
        packed = pack_batch(self.state, plan)
        histories = self._histories(plan)
        apply_plan(self.state, plan, perf_counter())
        self._flying.append((plan, self._runner.launch(packed, histories)))

    def _land(self) -> StepOutput:
        plan, flight = self._flying.popleft()
        tokens, logprobs = flight.land()
        errors = {plan.sample_seq_ids[place]: text for place, text in flight.errors.items()}
        return apply_results(
            self.state, plan, SampledTokens(tokens, logprobs, errors), perf_counter()
        )

    def _histories(self, plan: BatchPlan) -> Histories:
        """Processors and tokens of the samples whose requests bring processors of their own."""
        if not self.options.needs_history:
            return {}
        sequences = map(self.state.find, plan.sample_seq_ids)
        return {
            place: (sequence.request.processors, sequence.known())
            for place, sequence in enumerate(sequences)
            if sequence.request.processors is not None
        }
