"""The service around one engine: submit, wait, cancel, pause, stop, start again."""

import logging
import threading
from collections.abc import Generator, Iterable
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from time import perf_counter
from typing import Any

from transformers import PreTrainedModel

from tcb.compat.attributes import ProcessorView, TransformersManager
from tcb.device.mode import host_by_default
from tcb.engine import Engine
from tcb.model.prepared import forget, prepare
from tcb.options.generation import GenerationOptions
from tcb.planning.config import ContinuousBatchingConfig
from tcb.planning.limits import WorkloadHints
from tcb.planning.output import GenerationOutput
from tcb.service.inbox import Inbox
from tcb.service.intake import Intake, options_of, output_ids, read_settings
from tcb.service.loop import Loop
from tcb.service.outlet import Outlet
from tcb.service.outputs import OutputRouter
from tcb.service.progress import progress
from tcb.service.thread_status import BackgroundThreadStatus
from tcb.service.warm_up import warm_up

logger = logging.getLogger("ContinuousBatchingLogger")

_DIFFERS = "the manager runs with settings that differ from these; stop it first"


class ContinuousBatchingManager(Outlet, TransformersManager):
    """Continuous batching of one model; any thread may call any method.

    Args:
        model: read, never written, like both configurations
        generation_config: options of requests to come: a generation config, or `GenerationOptions`
        continuous_batching_config: one of this package or of transformers, a mapping, or None
        workload_hints: what is known of the requests to come

    Raises ValueError, TypeError and MemoryError for what cannot be served, before anything starts.

    Requests are served between `start` and `stop`, by a background thread, and in a `session`, by
    whoever waits for an output if there is no thread. They may be added before. After `stop` they
    are dropped until the next `start`; after an error (`background_thread_status.fatal_error`; all
    requests end FAILED), adding one is a RuntimeError. `continuous_batching_config` is a copy, with
    the sizes that the engine has.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        generation_config: Any,
        continuous_batching_config: Any,
        workload_hints: WorkloadHints | None = None,
    ) -> None:
        self.model, self._hints = model, workload_hints
        self._settings = read_settings(continuous_batching_config)
        self.background_thread_status = BackgroundThreadStatus()
        self.output_router = OutputRouter()
        self._inbox = Inbox(self._settings.max_queue_size)
        status, router = self.background_thread_status, self.output_router
        self._loop = Loop(self._inbox, router, status, self._on_close)
        options = options_of(model, generation_config)
        self._intake = Intake(router, self._inbox, self._loop, options)
        self._intake.use(options, self._settings.seed)
        # who builds, opens or destroys; and who comes into a session or leaves it
        self._control, self._door = threading.RLock(), threading.RLock()
        self._num_inside, self._session_opened = 0, False
        self._engine()

    @property
    def options(self) -> GenerationOptions:
        """The generation options of requests to come."""
        return self._intake.options

    @property
    def generation_config(self) -> Any:
        """A copy of the generation config in use. Setting another changes requests to come."""
        return self.options.generation_config

    @generation_config.setter
    def generation_config(self, generation_config: Any) -> None:
        self.adapt(generation_config)

    def is_running(self) -> bool:
        """Whether requests are served: a background thread is alive, or a session is open."""
        return self._loop.is_open

    def warmup(self) -> None:
        """Allocate what the first batch needs and compile kernels, in the caller's thread."""
        self.batch_processor = ProcessorView(self._engine())
        self.warmed_up = self.is_running() or warm_up(self._engine())

    def start(self) -> None:
        """Start the background thread, a daemon. A run that is stopping is waited for."""
        if self._loop.is_accepting and self._loop.has_thread:
            logger.warning("the manager is running already")
        self._open()
        self._loop.start_thread()

    @contextmanager
    def session(
        self,
        keep: bool = False,
        warmup: bool = True,
        block: bool = True,
        timeout: float | None = None,
        background: bool = False,
    ) -> Generator["ContinuousBatchingManager"]:
        """Be served while the body runs. The first session opens the manager, the last one out
        stops it: after all requests, or at once if its body raised. What a user started it leaves.

        Args:
            keep: keep memory and cached prefixes for the next call if any session wants that
            warmup: allocate and compile before anything runs
            block, timeout: wait for the end as `stop` does
            background: have a thread serve, even while nobody waits
        """
        with self._door:
            if not self._loop.is_accepting:
                if warmup and not self.warmed_up:
                    self.warmup()
                self._open()
                self._session_opened = True
            if background:
                self._loop.start_thread()
            elif keep:  # calls of other threads join this one
                self._loop.keeps_engine = True
                self.settle()
            self._num_inside += 1
        hard_stop = True
        try:
            yield self
            hard_stop = False
        finally:
            # behind the door: who comes in meanwhile finds it stopped, and opens it again
            with self._door:
                self._num_inside -= 1
                self._loop.keeps_engine |= keep
                if self._session_opened and not self._num_inside:
                    self._session_opened = False
                    if self.is_running():
                        self.stop(block, timeout, self._loop.keeps_engine, hard_stop)
                    self.settle()

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Stop serving: after every request, or with `hard_stop` at once, when those under way end
        FAILED with their tokens. Raises RuntimeError inside `pause`.

        Args:
            block: wait for the end of the run, `timeout` seconds at most
            keep_for_next_session: keep memory and prefixes, and the manager on the model
        """
        if not self.is_running():
            logger.warning("the manager is not running, so there is nothing to stop")
            return
        status = self.background_thread_status
        if status.is_pause_requested(local=True):
            raise RuntimeError("stop was called inside pause; leave the pause first")
        since = perf_counter()
        self._loop.keeps_engine = keep_for_next_session
        status.request_stop(status.HARD_STOP if hard_stop else status.FLUSH_AND_STOP)
        self._inbox.wake_up.set()
        if keep_for_next_session:
            self.settle()
        if block:
            self.join(since, timeout)
        else:
            self._loop.start_thread()

    def join(self, stop_trigger_time: float, timeout: float | None = None) -> None:
        """Wait for the end of the run, `timeout` seconds at most."""
        self._loop.join(timeout)
        if self.is_running():
            logger.warning("the manager is still running %s s after it was told to stop", timeout)
        else:
            logger.info("the manager stopped in %.3f s", perf_counter() - stop_trigger_time)

    def destroy(self) -> None:
        """Stop after every request and give the memory back; requests that nobody started fail."""
        with self._control:
            if self.is_running():
                self.stop()
            self._loop.keeps_engine = False
            self._loop.close("the manager was destroyed")

    @contextmanager
    def pause(self) -> Generator[None]:
        """Let the loop stand still, all batches landed, so that the weights may be written.

        Requests are kept, cached keys and values only if the weights did not change. Several
        threads may hold a pause. Raises RuntimeError if the manager does not run.
        """
        if not self.is_running():
            raise RuntimeError("pause was called, but no loop is running; call start first")
        self._loop.start_thread()
        self.background_thread_status.acquire_pause(self._inbox.wake_up)
        try:
            yield
        finally:
            self.background_thread_status.release_pause()

    def reset_prefix_cache(self) -> None:
        """Forget all cached keys and values, for changes that no look at the model finds."""
        with self.pause() if self.is_running() else nullcontext():
            forget(self.model)

    def adapt(self, generation_config: Any, continuous_batching_config: Any = None) -> None:
        """Serve requests to come by these settings; None keeps the configuration there is. Where
        memory or model must be another, the engine is built anew; RuntimeError if it runs.
        """
        settings, options = self._settings, self._intake.read(self.model, generation_config)
        if continuous_batching_config is not None:
            settings = read_settings(continuous_batching_config)
        with self._control:
            if not self._serves(options, settings) or self._is_outgrown():
                if self.is_running():
                    raise RuntimeError(_DIFFERS)
                self._loop.put_away()
                self._on_close()
            self._settings, engine = settings, self._loop.engine
            self.continuous_batching_config = (
                deepcopy(settings) if engine is None else engine.resolved(settings)
            )
            self._inbox.requests.maxsize = settings.max_queue_size
            self._intake.use(options, settings.seed)

    def submit(
        self, prompts: Iterable[Any], options: Any = None, record_timestamps: bool = False
    ) -> list[str]:
        """Submit prompts for `wait`; returns the ids of all outputs: for each prompt those of its
        forks, then its own.

        Args:
            options: `GenerationOptions` or a generation config of their own; None: the manager's
            record_timestamps: note when each token came, in `timestamps`

        Prompts are treated as by `add_requests`. Iteration and `get_result()` pass the outputs by.
        Raises RuntimeError after the end, and for options that the engine was not built for.
        """
        own = self.options if options is None else self._intake.read(self.model, options)
        if not self._serves(own, self._settings):
            raise RuntimeError(_DIFFERS)
        names = self._intake.add_all(
            self._open_engine, prompts, own, awaited=True, record_timestamps=record_timestamps
        )
        return [each for name in names for each in output_ids(name, own.num_return_sequences)]

    def wait(
        self, request_ids: Iterable[str], progress_bar: bool = False
    ) -> dict[str, GenerationOutput]:
        """See submitted requests through; returns their outputs by id, in the order of the ids.

        Serves them in this thread if no other does. What cannot come any more, because nothing runs
        or somebody took it, is left out. An exception here, an interrupt too, cancels them.
        """
        ids = list(request_ids)
        try:
            with progress(len(ids), progress_bar) as count:
                outputs = self._loop.take_all(ids, count)
        except BaseException:
            # in a run that goes on, nobody else would end them
            for request_id in ids:
                self.cancel_request(request_id)
            self.output_router.abandon(ids)
            raise
        return {request_id: outputs[request_id] for request_id in ids if request_id in outputs}

    def add_request(
        self,
        input_ids: list[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        **logit_processor_kwargs: Any,
    ) -> str | None:
        """Submit a prompt; returns the id of the request, `req_<n>` if none is given; None after
        `stop`, when requests are dropped with a warning.

        Args:
            input_ids: token ids: a list, a one-dimensional tensor or array
            streaming: deliver an output for every token, with all tokens so far, not only the last
            logit_processor_kwargs: generation options of this request: top_k, stop_strings, ...

        Raises ValueError for a prompt, an option or an id that cannot be served, `queue.Full` if
        the queue has no room for 10 s, and RuntimeError after an error that ended the run.
        """
        own = logit_processor_kwargs | {"max_new_tokens": max_new_tokens}
        options = self.options.override(eos_token_id=eos_token_id, **own)
        flags = {"streaming": streaming, "record_timestamps": record_timestamps}
        return self._intake.add(self._open_engine, input_ids, options, request_id, **flags)

    def add_requests(
        self,
        inputs: Iterable[list[int]],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        **logit_processor_kwargs: Any,
    ) -> list[str]:
        """Submit many prompts as `add_request` does; returns their ids in the order of the prompts.

        One that cannot be served or is dropped gets an output in its place: FAILED, and why.
        """
        options = self.options.override(max_new_tokens=max_new_tokens, **logit_processor_kwargs)
        flags = {"streaming": streaming, "record_timestamps": record_timestamps}
        return self._intake.add_all(self._open_engine, inputs, options, **flags)

    def cancel_request(self, request_id: str) -> None:
        """End a live request before its time: its output is FAILED, with the tokens it has."""
        self._inbox.cancel(request_id)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        # a copied or stored model has no manager
        return type(None), ()

    def _open(self) -> None:
        """Begin a run unless one goes on; one that is stopping is waited for."""
        with self._control:
            if not self._loop.is_accepting:
                self._loop.join(None)
                self.batch_processor = ProcessorView(self._engine())
                self._loop.open(self.batch_processor.engine)

    def _engine(self) -> Engine:
        """The engine, built now if there is none. Raises what its constructor raises."""
        with self._control, host_by_default():
            if self._loop.engine is None:
                engine = Engine(self.model, self.options, self._settings, self._hints)
                self.continuous_batching_config = engine.resolved(self._settings)
                self._intake.check_waiting(engine)
                self._loop.engine = engine
            return self._loop.engine

    def _open_engine(self) -> Engine:
        """The engine, for requests to come; RuntimeError if none are accepted."""
        # read before the status, which says that it is over before the engine is put away
        engine = self._loop.engine
        refusal = self.background_thread_status.can_accept_new_requests()
        if refusal is not None:
            raise RuntimeError(f"the request cannot be added: {refusal}")
        return self._engine() if engine is None else engine

    def _is_outgrown(self) -> bool:
        """Whether the model has other layers now than the engine that is to be taken up again."""
        engine = None if self.is_running() else self._loop.engine
        return engine is not None and prepare(self.model).layers != engine.layers

    def _serves(self, options: GenerationOptions, settings: ContinuousBatchingConfig) -> bool:
        """Whether the engine there is, if any, is as good for these as one built for them."""
        engine = self._loop.engine
        return engine is None or engine.serves(options, settings)

    def _on_close(self) -> None:
        """Called at the end of a run, and when the engine was put away."""
        self._intake.reseed()
        if self._loop.engine is None:
            self.batch_processor, self.warmed_up = None, False
