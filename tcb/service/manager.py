"""The service around one engine: submit, wait, cancel, pause, stop, start again.

`engine` computes the tokens, `loop` is the thread's work, `outputs` delivers.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from time import perf_counter
from typing import Any

from torch import nn

from tcb.compat.attributes import OneRank, ProcessorView
from tcb.engine import Engine
from tcb.options.generation import read_options
from tcb.planning.config import ContinuousBatchingConfig
from tcb.planning.limits import WorkloadHints
from tcb.planning.request import GenerationOutput
from tcb.service.engine_keeper import EngineKeeper, read_settings
from tcb.service.intake import Intake, output_ids, plain_wish
from tcb.service.loop import Inbox, Loop
from tcb.service.outputs import Collector, OutputRouter
from tcb.service.sessions import Sessions
from tcb.service.thread_status import BackgroundThreadStatus

logger = logging.getLogger("ContinuousBatchingLogger")

# seconds that `add_request` waits for room in a full queue, as in transformers
QUEUE_TIMEOUT = 10.0
_DIFFERS = "the manager runs with settings that differ from these; stop it first"


class ContinuousBatchingManager:
    """Continuous batching of one model, in a thread of its own; any thread may call any method.

    The model, the generation config and the configuration are read, never written. Raises
    ValueError, TypeError and MemoryError for what cannot be served, before anything starts.
    Requests may be added before `start`. After `stop`, or once the thread died of an error
    (`background_thread_status.fatal_error`; all its requests end FAILED), adding one is a
    RuntimeError until the next `start`; transformers drops it with a warning. Outputs that were
    delivered stay obtainable.
    """

    def __init__(
        self,
        model: nn.Module,
        generation_config: Any,
        continuous_batching_config: Any,
        workload_hints: WorkloadHints | None = None,
    ):
        self.model = model
        self.background_thread_status = BackgroundThreadStatus()
        self.output_router = OutputRouter()
        self.distributed_helper = OneRank()
        self.is_tp_driver = True
        self.warmed_up = False
        self.batch_processor: ProcessorView | None = None
        self._queue_timeout = QUEUE_TIMEOUT
        self._control = threading.RLock()
        self._loop: Loop | None = None
        self.sessions = Sessions()
        self._keeper = EngineKeeper(model, continuous_batching_config, workload_hints)
        self._inbox = Inbox(self._keeper.settings.max_queue_size)
        self._intake = Intake(self.output_router, self._inbox)
        self.input_queue, self.cancel_queue = self._inbox.requests, self._inbox.cancellations
        # transformers' name for what changes logits before a token is chosen; `clear` ends that
        self.logit_processor = self._intake
        options = read_options(model, generation_config)
        self._use(generation_config, options, self._keeper.settings)
        self._engine()

    @property
    def generation_config(self) -> Any:
        """The generation config in use; a copy. Setting another changes requests to come."""
        return self._generation_config

    @generation_config.setter
    def generation_config(self, generation_config: Any) -> None:
        self.adapt(generation_config)

    @property
    def continuous_batching_config(self) -> ContinuousBatchingConfig:
        """A copy of it, with the sizes that the engine has."""
        return self._keeper.resolved

    @property
    def num_return_sequences(self) -> int:
        """Outputs per prompt of requests to come: the request itself, and its forks."""
        return self._intake.num_return_sequences

    @num_return_sequences.setter
    def num_return_sequences(self, number: int) -> None:
        self._intake.num_return_sequences = number

    @property
    def current_batch(self) -> int:
        """Batches since `start`."""
        return 0 if self._loop is None else self._loop.num_steps

    @property
    def _request_counter(self) -> int:
        return self._intake.num_ids

    @property
    def _generation_thread(self) -> threading.Thread | None:
        return self._loop.thread if self.is_running() else None

    @property
    def _use_prefix_sharing(self) -> bool:
        return self._keeper.settings.allow_block_sharing

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        """Nothing to do: the model keeps its attention implementation."""

    def warmup(self) -> None:
        """Allocate what the first batch needs, in the caller's thread."""
        self.batch_processor = ProcessorView(self._engine())
        self.warmed_up = True

    def is_running(self) -> bool:
        """Whether the background thread is alive."""
        return self._loop is not None and self._loop.is_alive

    @property
    def has_engine(self) -> bool:
        """Whether there is an engine, with its memory; none after the end of a session."""
        return self._keeper.engine is not None

    @property
    def is_accepting(self) -> bool:
        """Whether requests are accepted now."""
        return self.background_thread_status.can_accept_new_requests() is None

    def start(self) -> None:
        """Start the background thread, a daemon. One that is stopping is waited for."""
        with self._control:
            if self.is_running():
                if self.is_accepting:
                    logger.warning("the manager is running already")
                    return
                self._loop.thread.join()
            self._new_loop().start()

    def serve_here(
        self,
        inputs: Iterable[Any],
        generation_config: Any,
        record_timestamps: bool,
        collector: Collector,
        keep_for_next_session: bool = False,
    ) -> list[list[str]]:
        """`start`, `collect` and `stop` in the calling thread; the queue must be without bound."""
        with self._control:
            assert not self.is_running() and not self._inbox.requests.maxsize
            loop = self._new_loop()
            loop.keep_engine = keep_for_next_session
            try:
                ids = self.collect(inputs, generation_config, record_timestamps, collector)
                if keep_for_next_session:
                    self.model._cached_continuous_batching_manager = self
            finally:
                loop.run_here()
            return ids

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Stop the background thread: after every request, or with `hard_stop` at once, when those
        under way end FAILED with the tokens they have.

        block                   wait for the end of the thread, `timeout` seconds at most
        keep_for_next_session   keep the memory and the cached prefixes, and keep the manager on the
                                model for the next call; else the memory is given back

        Raises RuntimeError inside `pause`, which the thread could not leave.
        """
        if not self.is_running():
            logger.warning("the manager is not running, so there is nothing to stop")
            return
        status = self.background_thread_status
        if status.is_pause_requested(local=True):
            raise RuntimeError("stop was called inside pause; leave the pause first")
        since = perf_counter()
        self._loop.keep_engine = keep_for_next_session
        status.request_stop(status.HARD_STOP if hard_stop else status.FLUSH_AND_STOP)
        self._inbox.wake_up.set()
        if keep_for_next_session:
            self.model._cached_continuous_batching_manager = self
        if block:
            self.join(since, timeout)

    def join(self, stop_trigger_time: float, timeout: float | None = None) -> None:
        """Wait for the end of the thread, `timeout` seconds at most."""
        if self._loop is None:
            return
        self._loop.thread.join(timeout)
        if self.is_running():
            logger.warning("the manager is still running %s s after it was told to stop", timeout)
        else:
            logger.info("the manager stopped in %.3f s", perf_counter() - stop_trigger_time)

    def destroy(self) -> None:
        """Stop after every request and give the memory back; requests that nobody started fail."""
        with self._control:
            if self.is_running():
                self.stop()
            self._put_away()
            self.background_thread_status.mark_as_stopped()
            self.output_router.close(
                "the manager was destroyed", self.background_thread_status.can_accept_new_requests()
            )
            self._inbox.clear()

    @contextmanager
    def pause(self) -> Generator[None]:
        """Let the loop stand still, all batches landed, so that the weights may be written.

        Requests and cache are kept; cached keys and values are forgotten if the weights did change.
        Several threads may hold a pause; the loop goes on after the last one. Raises RuntimeError
        without a running loop.
        """
        if not self.is_running():
            raise RuntimeError("pause was called, but no loop is running; call start first")
        self.background_thread_status.acquire_pause(self._inbox.wake_up)
        try:
            yield
        finally:
            self.background_thread_status.release_pause()

    def adapt(self, generation_config: Any, continuous_batching_config: Any = None) -> None:
        """Serve requests to come by these settings; None keeps the configuration there is.

        The engine is built anew where memory or model must be another. Raises what the constructor
        raises, and RuntimeError if that would be needed while the thread runs.
        """
        settings = self._keeper.settings
        if continuous_batching_config is not None:
            settings = read_settings(continuous_batching_config)
        with self._control:
            options = read_options(self.model, generation_config)
            if not self._keeper.serves(options, settings):
                if self.is_running():
                    raise RuntimeError(_DIFFERS)
                self._put_away()
            self._keeper.use(settings)
            self._inbox.requests.maxsize = settings.max_queue_size
            self._use(generation_config, options, settings)

    def add_request(
        self,
        input_ids: list[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        **logit_processor_kwargs: Any,
    ) -> str:
        """Submit a prompt; returns the id of the request, `req_<n>` if none is given.

        input_ids   token ids: a list, a one-dimensional tensor or array
        streaming   deliver an output for every token, with all tokens so far, not only the last

        Further keywords are generation options of this request: temperature, top_k, top_p, ...
        Raises ValueError for a prompt or an option that cannot be served and for an id that is
        live, `queue.Full` if there is no room in the queue for 10 s (`max_queue_size`), and
        RuntimeError if the manager has stopped.
        """
        options = {"max_new_tokens": max_new_tokens, "eos_token_id": eos_token_id}
        wish = self._intake.read_wish(
            streaming, record_timestamps, options | logit_processor_kwargs
        )
        return self._intake.add(
            self._open_engine(), input_ids, request_id, wish, self._queue_timeout
        )

    def add_requests(
        self,
        inputs: Iterable[list[int]],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        **logit_processor_kwargs: Any,
    ) -> list[str]:
        """Submit many prompts; returns their ids in the order of the prompts.

        A prompt that cannot be served gets an output in its place: FAILED, with the reason. The
        others are submitted in an order that lets equal beginnings meet.
        """
        options = {"max_new_tokens": max_new_tokens} | logit_processor_kwargs
        wish = self._intake.read_wish(streaming, record_timestamps, options)
        engine = self._open_engine()
        return self._intake.add_all(engine, inputs, wish, timeout=self._queue_timeout)

    def collect(
        self,
        inputs: Iterable[Any],
        generation_config: Any,
        record_timestamps: bool,
        collector: Collector,
    ) -> list[list[str]]:
        """Submit many prompts under a generation config of their own; returns, for each, the ids of
        its outputs: the forks, then itself.

        Last outputs go to `collector` only. Waits for room in the queue as long as the loop runs.
        """
        options = read_options(self.model, generation_config)
        if not self._keeper.serves(options, self._keeper.settings):
            raise RuntimeError(_DIFFERS)
        wish = plain_wish(options, record_timestamps)
        ids = self._intake.add_all(self._open_engine(), inputs, wish, collector)
        return [output_ids(name, wish.num_outputs) for name in ids]

    def cancel_request(self, request_id: str) -> None:
        """End a request before its time: its output is FAILED, with the tokens it has. One that is
        not live is left alone.
        """
        self._inbox.cancel(request_id)

    def get_result(
        self, request_id: str | None = None, timeout: float | None = None
    ) -> GenerationOutput | None:
        """Take the next output, of this request if one is named; others' outputs stay.

        None after `timeout` seconds, and at once if none can come: no loop runs, or the named
        request is not live and its outputs have been taken.
        """
        return self.output_router.take(request_id, timeout)

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Outputs as they come. It ends when the loop has ended and every output was taken; while
        the loop runs it waits, for more requests may come.
        """
        while (output := self.output_router.take()) is not None:
            yield output

    def request_id_iter(self, request_id: str) -> Generator[GenerationOutput]:
        """Outputs of one request up to its last; none if the request is not live and nothing of it
        is left. Any number of these may run at once.
        """
        while (output := self.output_router.take(request_id)) is not None:
            yield output
            if output.is_finished():
                return

    def register_result_handler(
        self, request_id: str, callback: Callable[[GenerationOutput], object]
    ) -> None:
        """Let `callback` be called with the outputs of a request, on the event loop that runs here.

        Outputs that are there already come first. It may be registered before the request is added;
        after the last output it is forgotten. Raises RuntimeError outside an event loop.
        """
        self.output_router.register(request_id, callback, asyncio.get_running_loop())

    def __reduce__(self):
        # a copied or stored model has no manager
        return type(None), ()

    def _new_loop(self) -> Loop:
        engine, status = self._engine(), self.background_thread_status
        self.batch_processor = ProcessorView(engine)
        status.clear()
        self._loop = Loop(engine, self._inbox, self.output_router, status, self._on_loop_end)
        return self._loop

    def _engine(self) -> Engine:
        return self._keeper.ensure(self._intake.options)

    def _use(self, generation_config, options, settings):
        self._generation_config = deepcopy(generation_config)
        self._intake.use(options, settings.seed)

    def _open_engine(self) -> Engine:
        """The engine, for requests to come; RuntimeError if none are accepted."""
        # read before the status, which says that it is over before the engine is put away
        engine = self._keeper.engine
        refusal = self.background_thread_status.can_accept_new_requests()
        if refusal is not None:
            raise RuntimeError(f"the request cannot be added: {refusal}")
        return self._engine() if engine is None else engine

    def _put_away(self):
        self._keeper.close()
        self._on_loop_end(False)

    def _on_loop_end(self, kept):
        """Called by the thread when it is done with the engine."""
        self._intake.reseed()
        if not kept:
            self._keeper.forget()
            self.batch_processor, self.warmed_up = None, False
