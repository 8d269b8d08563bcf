"""What only callers of transformers' manager read of ours, under the names that it has there."""

import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import transformers
from torch import distributed
from transformers import PreTrainedModel

from tcb.engine import Engine
from tcb.model.parallel import tensor_parallel
from tcb.planning.state import Sequence


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """Which requests run and which wait; what other threads read may be a step old."""

    engine: Engine

    @property
    def active_requests(self) -> Mapping[str, Sequence]:
        """Running sequences by request id."""
        return {sequence.request.id: sequence for sequence in self.engine.running}

    @property
    def waiting_requests(self) -> Mapping[str, Sequence]:
        """Waiting sequences by request id."""
        return {sequence.request.id: sequence for sequence in self.engine.waiting}

    def has_pending_requests(self) -> bool:
        """Whether anything waits, runs or flies."""
        return self.engine.has_work


@dataclass(frozen=True, slots=True)
class CacheView:
    """The sizes of the cache; blocks are counted as the configuration counts them, all layers to
    a block.
    """

    page_size: int
    block_size: int
    num_blocks: int
    max_batch_tokens: int
    use_prefix_sharing: bool


@dataclass(frozen=True, slots=True)
class ProcessorView:
    """The engine, as transformers' batch processor shows it."""

    engine: Engine

    @property
    def scheduler(self) -> SchedulerView:
        """Which requests run and which wait."""
        return SchedulerView(self.engine)

    @property
    def cache(self) -> CacheView:
        """The sizes of the cache."""
        sizes: Any = self.engine.resolved(self.engine.config)
        return CacheView(
            sizes.page_size,
            sizes.page_size,
            sizes.num_blocks,
            sizes.max_batch_tokens,
            sizes.allow_block_sharing,
        )

    def has_pending_requests(self) -> bool:
        """Whether anything waits, runs or flies."""
        return self.engine.has_work


@dataclass(frozen=True, slots=True)
class RankView:
    """What transformers' distributed helper says of this process, and of those that share a model
    with it.
    """

    global_rank: int
    tp_local_rank: int
    tp_size: int

    @property
    def is_tp_driver(self) -> bool:
        """Whether this process takes requests in."""
        return self.tp_local_rank == 0

    def destroy_cpu_comm_group(self) -> None:
        """Nothing: the group belongs to the engine."""


# where transformers, too, looks for the manager that a model keeps for its next call
_KEPT = "_cached_continuous_batching_manager"
# its attributes and methods have types of transformers' own
_TheirManager: Any = transformers.ContinuousBatchingManager


class TransformersManager(_TheirManager):
    """transformers' manager as a type only: whoever asks for one takes ours, and reads these.

    warmed_up        whether `warmup` was called on the engine there is
    batch_processor  None until warm-up or start, and once the engine is put away
    """

    warmed_up = False
    batch_processor: ProcessorView | None = None
    model: PreTrainedModel
    # those of `tcb.service`, a floor above
    _loop: Any
    _intake: Any
    _inbox: Any
    continuous_batching_config: Any

    def __init__(self) -> None:
        # nothing of transformers' manager is built
        pass

    def settle(self) -> None:
        """Be on the model, where its next call looks, while the engine is kept for it, and not when
        it is gone. Nothing else writes there.
        """
        if self._loop.engine is not None and self._loop.keeps_engine:
            setattr(self.model, _KEPT, self)
        elif self._loop.engine is None and kept_on(self.model) is self:
            delattr(self.model, _KEPT)

    @property
    def distributed_helper(self) -> RankView:
        """Which of the model's ranks this process is."""
        parallel = tensor_parallel(self.model)
        if parallel is None:
            return RankView(0, 0, 1)
        return RankView(distributed.get_rank(), parallel.rank, parallel.size)

    @property
    def is_tp_driver(self) -> bool:
        """Whether this process takes requests in."""
        return self.distributed_helper.is_tp_driver

    @property
    def input_queue(self) -> queue.Queue:
        """Requests on their way to the loop."""
        return self._inbox.requests

    @property
    def cancel_queue(self) -> queue.SimpleQueue:
        """Ids of requests to cancel, on their way to the loop."""
        return self._inbox.cancellations

    @property
    def logit_processor(self) -> Any:
        """What changes logits before a token is chosen; its `clear` ends that."""
        return self._intake

    @property
    def num_return_sequences(self) -> int:
        """Outputs per prompt of requests to come: the request itself, and its forks."""
        return self._intake.options.num_return_sequences

    @num_return_sequences.setter
    def num_return_sequences(self, number: int) -> None:
        self._intake.options = replace(self._intake.options, num_return_sequences=number)

    @property
    def current_batch(self) -> int:
        """Batches since `start`."""
        return self._loop.num_steps

    @property
    def _request_counter(self) -> int:
        return self._intake.num_ids

    @property
    def _generation_thread(self) -> threading.Thread | None:
        return self._loop.thread if self._loop.is_open else None

    @property
    def _use_prefix_sharing(self) -> bool:
        return self.continuous_batching_config.allow_block_sharing

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        """Nothing to do: the model keeps its attention implementation."""


def kept_on(model: PreTrainedModel) -> Any:
    """The manager that the model keeps for its next call, if it is one of ours; else None."""
    kept = getattr(model, _KEPT, None)
    return kept if isinstance(kept, TransformersManager) else None
