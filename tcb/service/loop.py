"""The background thread: takes requests in, lets the engine step, and brings the outputs out.

It does not know how a user's prompt becomes a request, or what happens inside a step.
"""

import atexit
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from tcb.engine import Engine
from tcb.planning.request import Request
from tcb.planning.state import Sequence as EngineSequence
from tcb.planning.state import StepOutput
from tcb.service.engine_keeper import plain_mode
from tcb.service.outputs import OutputRouter, StreamedOutput, to_output
from tcb.service.thread_status import BackgroundThreadStatus

logger = logging.getLogger("ContinuousBatchingLogger")

CANCELLED = "the request was cancelled"
HARD_STOPPED = "the request was not finished when the manager was told to stop at once (hard_stop)"
NEVER_STARTED = "the manager stopped before the request was taken in"

# seconds that the end of the process waits for a step to end
_LAST_STEP = 10.0


class Inbox:
    """What other threads leave for the loop; an entry of `requests` is a request and its forks."""

    def __init__(self, max_size: int):
        self.requests: queue.Queue[Sequence[Request]] = queue.Queue(max_size)
        self.cancellations: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.wake_up = threading.Event()

    def put(self, requests: Sequence[Request], timeout: float | None) -> None:
        """Leave requests; `queue.Full` if there is no room within `timeout` seconds."""
        self.requests.put(requests, timeout=timeout)
        self.wake_up.set()

    def cancel(self, request_id: str) -> None:
        """Leave the wish to cancel a request."""
        self.cancellations.put(request_id)
        self.wake_up.set()

    def clear(self) -> None:
        """Throw away what nobody will take any more."""
        _take_all(self.requests)
        _take_all(self.cancellations)


class Loop:
    """One run of the background thread, from `start` to its end; it owns the engine while it runs.

    on_end   called by the thread at its very end, with whether the engine is still of use
    """

    def __init__(
        self,
        engine: Engine,
        inbox: Inbox,
        router: OutputRouter,
        status: BackgroundThreadStatus,
        on_end: Callable[[bool], None],
    ):
        self.num_steps = 0
        self.keep_engine = False
        self._engine, self._inbox, self._router, self._status = engine, inbox, router, status
        self._on_end = on_end
        # between batches somebody else may write the weights only while this is true
        self._idle = True
        self._has_ended = False
        router.expect_outputs()
        self.thread = threading.Thread(target=self._run, name="continuous-batching", daemon=True)

    @property
    def is_alive(self) -> bool:
        """Whether it runs, in a thread of its own or of the caller."""
        return self.thread.is_alive() and not self._has_ended

    def start(self) -> None:
        """Start the thread; requests left in the inbox before are taken in first."""
        # a thread that dies inside torch when the process ends takes the process down with SIGABRT
        atexit.register(self._end_with_process)
        self.thread.start()

    def run_here(self) -> None:
        """Serve what is in the inbox in the calling thread, and return when all of it has ended.

        A second thread costs: on a CPU each has its own pool of workers, which then crowd out each
        other. An interrupt of the user is raised again once every request has its end.
        """
        self.thread = threading.current_thread()
        self._status.request_stop(self._status.FLUSH_AND_STOP)
        self._run()
        error = self._status.fatal_error
        if error is not None and not isinstance(error, Exception):
            raise error

    def _end_with_process(self) -> None:
        self._status.request_stop(self._status.HARD_STOP)
        self._inbox.wake_up.set()
        self.thread.join(_LAST_STEP)

    def _run(self) -> None:
        reason = NEVER_STARTED
        try:
            device = self._engine.layers.device
            with _device_scope(device), plain_mode(device):
                self._serve()
        except BaseException as error:
            logger.exception("the continuous batching loop died")
            self._status.record_fatal_error(error)
            reason = f"{type(error).__name__}: {error}"
            self.keep_engine = False
        finally:
            self._finish(reason)

    def _serve(self) -> None:
        status = self._status
        while status.local_status != status.HARD_STOP:
            # cleared before the queues are read: what comes after that is seen by the wait
            self._inbox.wake_up.clear()
            if status.is_pause_requested():
                self._stand_still()
            self._take_in()
            if self._engine.has_work:
                self._step()
            elif status.local_status == status.DONT_STOP:
                self._idle = True
                self._inbox.wake_up.wait()
            elif self._inbox.requests.empty():
                return
        self._stop_at_once()

    def _step(self) -> None:
        if self._idle:
            self._engine.refresh_weights()
            self._idle = False
        landed = self._engine.step()
        self.num_steps += 1
        self._deliver(landed)

    def _stand_still(self) -> None:
        """Land what flies, wait for the end of the pause, and look what it did to the weights."""
        for landed in self._engine.drain():
            self._deliver(landed)
        self._status.pause_and_wait()
        self._engine.refresh_weights()

    def _take_in(self) -> None:
        """Submit what came and cancel what is to be cancelled.

        Cancellations are read first: whatever they name was put before, so it is submitted by now.
        One that names a live request still on its way into the inbox is left for the next time.
        """
        cancelled = _take_all(self._inbox.cancellations)
        for requests in _take_all(self._inbox.requests):
            for request in requests:
                if self._router.holds(request):
                    self._submit(request)
        for request_id in cancelled:
            ended = self._engine.cancel(request_id)
            self._fail(ended, CANCELLED)
            if not ended and self._router.is_live(request_id):
                self._inbox.cancellations.put(request_id)

    def _submit(self, request: Request) -> None:
        try:
            self._engine.submit(request)
        except ValueError as error:
            self._router.fail_and_deliver(request, error)

    def _deliver(self, landed: StepOutput) -> None:
        outputs = [StreamedOutput.of(sequence) for sequence in landed.streamed]
        outputs += [to_output(sequence) for sequence in landed.finished]
        if outputs:
            self._router.deliver_batch(outputs)

    def _fail(self, sequences: Iterable[EngineSequence], error: str) -> None:
        self._router.deliver_batch([to_output(sequence, error) for sequence in sequences])

    def _stop_at_once(self) -> None:
        for landed in self._engine.drain():
            self._deliver(landed)
        # one by one, and not `fail_all`, which forgets the cache: it may be kept
        for request_id in list(self._engine.state.seq_ids):
            self._fail(self._engine.cancel(request_id), HARD_STOPPED)
        for requests in _take_all(self._inbox.requests):
            for request in filter(self._router.holds, requests):
                self._router.fail_and_deliver(request, HARD_STOPPED)

    def _finish(self, reason: str) -> None:
        """Bring every request to an end and let everybody go, whatever state the engine is in."""
        self._status.mark_as_stopped()
        try:
            if self._engine.has_work:
                self._fail(self._engine.fail_all(), reason)
            if not self.keep_engine:
                self._engine.close()
        except Exception:
            logger.exception("the engine could not be put away")
            self.keep_engine = False
        finally:
            self._on_end(self.keep_engine)
            self._router.close(reason, self._status.can_accept_new_requests())
            self._inbox.clear()
            atexit.unregister(self._end_with_process)
            del self._engine
            self._has_ended = True


def _take_all(source):
    """Everything that is in a queue now."""
    taken = []
    while True:
        try:
            taken.append(source.get_nowait())
        except queue.Empty:
            return taken


def _device_scope(device: torch.device) -> AbstractContextManager:
    """Makes `device` the current one of this thread; nothing where there is but one."""
    if device.type == "cpu":
        return nullcontext()
    return torch.get_device_module(device).device(device)
