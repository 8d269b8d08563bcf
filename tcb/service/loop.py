"""Turn the loop around an engine: take in what came, step, deliver what came out.

Whoever waits for an output turns it, unless a background thread does (`start_thread`). One thread
at a time is the driver.
"""

import atexit
import ctypes
import logging
import threading
import weakref
from collections.abc import Callable, Iterable
from time import monotonic

from tcb.engine import Engine
from tcb.planning.output import GenerationOutput
from tcb.planning.state import Sequence, StepOutput
from tcb.service.inbox import Inbox, deadline_of, seconds_to, take_all
from tcb.service.outputs import OutputRouter, StreamedOutput, to_output
from tcb.service.thread_status import BackgroundThreadStatus

logger = logging.getLogger("ContinuousBatchingLogger")

CANCELLED = "the request was cancelled"
HARD_STOPPED = "the request was not finished when the manager was told to stop at once (hard_stop)"
NEVER_STARTED = "the manager stopped before the request was taken in"

# seconds between two turns of ranks that have nothing to do; a wish to stop waits so long
_HEARTBEAT = 0.1
# seconds that the end of the process waits for a step to end, and then for one that was broken off
_LAST_STEP, _BROKEN_STEP = 1.0, 10.0


class _ProcessEnds(BaseException):
    """Breaks off the step of a background thread."""


class Loop:
    """The rounds of one engine, run after run: `open`, then turns, then `close`.

    engine        the engine, between two runs too while it is kept; None while there is none
    keeps_engine  whether the engine outlives the run
    num_steps     batches of this run
    is_open       whether a run goes on
    thread        the background thread of the latest run that had one
    on_close      called at the end of every run
    """

    def __init__(
        self,
        inbox: Inbox,
        router: OutputRouter,
        status: BackgroundThreadStatus,
        on_close: Callable[[], None],
    ) -> None:
        self.engine: Engine | None = None
        self.keeps_engine = self.is_open = False
        self.num_steps = 0
        self.thread: threading.Thread | None = None
        self._inbox, self._router, self._status, self._on_close = inbox, router, status, on_close
        self._changed = router.changed
        self._driver: threading.Thread | None = None
        # between batches somebody else may write the weights only while this is true
        self._idle = True
        self._next_turn = 0.0
        # a thread that waits for news learns that the loop was dropped
        weakref.finalize(self, inbox.wake_up.set).atexit = False

    @property
    def has_thread(self) -> bool:
        """Whether a background thread turns the loop, or will once its driver leaves."""
        return self.thread is not None and self.thread.is_alive()

    @property
    def is_unattended(self) -> bool:
        """Whether a run goes on that nobody drives."""
        return self.is_open and self._driver is None and not self.has_thread

    @property
    def has_failed(self) -> bool:
        """Whether an error ended the latest run."""
        return self._status.fatal_error is not None

    @property
    def is_accepting(self) -> bool:
        """Whether a run goes on and nobody has asked it to stop."""
        return self.is_open and self._status.can_accept_new_requests() is None

    def open(self, engine: Engine) -> None:
        """Begin a run; requests left in the inbox before are taken in first. `join` the last one
        before.
        """
        self.engine, self.keeps_engine, self.num_steps, self._idle = engine, False, 0, True
        self._status.clear()
        self._router.expect_outputs()
        self._inbox.wake_up.set()
        self.is_open = True

    def start_thread(self) -> None:
        """Let a thread of its own, a daemon, turn the loop to the end of the run."""
        with self._changed:
            if self.has_thread:
                return
            found = weakref.ref(self), self._inbox.wake_up
            self.thread = threading.Thread(
                target=_background, args=found, name="continuous-batching", daemon=True
            )
            self.thread.start()
        _threaded.add(self)
        # registered anew, to come before what was registered since
        atexit.unregister(_end_threads)
        atexit.register(_end_threads)

    def run_until(self, done: Callable[[], bool], timeout: float | None = None) -> None:
        """Return when `done()`, when no run is open, or after `timeout` seconds; until then turn
        the loop, or wait while another thread does.

        `done` is asked between turns and deliveries, and never again once it was true.
        """
        deadline = deadline_of(timeout)
        try:
            if self.become_driver(done, deadline):
                self.drive(done, deadline)
        finally:
            self._leave()

    def take(self, request_id: str | None, timeout: float | None) -> GenerationOutput | None:
        """Take the next output, of this request if one is named; None if none comes within
        `timeout` seconds, or none can come. With a timeout, the request may still be to come.
        """
        output: GenerationOutput | None = None
        live = request_id if timeout is None else None

        def has_come() -> bool:
            nonlocal output
            with self._changed:
                output = self._router.take(request_id)
                return output is not None or not self._router.may_come(live)

        self.run_until(has_come, timeout)
        return output

    def take_all(
        self, request_ids: Iterable[str], count: Callable[[], object]
    ) -> dict[str, GenerationOutput]:
        """Take the awaited outputs of these requests by id, all that come; `count` is called for
        each one when it has come.
        """
        missing, outputs = set(request_ids), {}

        def have_come() -> bool:
            with self._changed:
                for output in self._router.take_arrived(missing):
                    outputs[output.request_id] = output
                    count()
                return not self._router.may_any_come(missing)

        self.run_until(have_come)
        return outputs

    def join(self, timeout: float | None) -> None:
        """Wait for the end of the run and of its thread, `timeout` seconds at most."""
        deadline = deadline_of(timeout)
        self.run_until(lambda: not self.is_open, timeout)
        if self.thread is not None:
            self.thread.join(seconds_to(deadline))

    def become_driver(self, done: Callable[[], bool], deadline: float | None = None) -> bool:
        """Wait until nobody drives, and do it; False if there is no need or no time any more."""
        me = threading.current_thread()
        with self._changed:
            while not done() and self.is_open:
                if self._driver is None and (me is self.thread or not self.has_thread):
                    self._driver = me
                    return True
                left = seconds_to(deadline)
                if left == 0:
                    break
                self._changed.wait(left)
        return False

    def drive(self, done: Callable[[], bool], deadline: float | None = None) -> bool:
        """Turn until `done()`, once at least; whether the run goes on, driven by this thread.

        An error ends the run and every request. An interrupt of the user is raised again.
        """
        engine = self.engine
        assert engine is not None
        me, late = threading.current_thread(), False
        try:
            with engine.mode():
                while not done() and self._driver is me and not late:
                    if self.is_idle():
                        bounds = seconds_to(deadline), self.rest
                        known = [bound for bound in bounds if bound is not None]
                        self._inbox.wake_up.wait(min(known, default=None))
                    else:
                        self.turn()
                    late = seconds_to(deadline) == 0
        except BaseException as error:
            is_interrupt = me is not self.thread and not isinstance(error, Exception)
            if not is_interrupt and not isinstance(error, _ProcessEnds):
                logger.exception("the continuous batching loop died")
            self._status.record_fatal_error(error)
            self.keeps_engine = False
            self.close(engine.ranks.reason(error))
            if is_interrupt:
                raise
        return self._driver is me

    def is_idle(self) -> bool:
        """Whether a turn would find nothing to do."""
        has_work = self.engine is not None and self.engine.has_work
        return not (has_work or self._inbox.wake_up.is_set() or self.rest == 0)

    @property
    def rest(self) -> float | None:
        """Seconds until other ranks wait for a turn of this one; None if there are none."""
        ranks = None if self.engine is None else self.engine.ranks
        if ranks is None or ranks.size == 1:
            return None
        # rank 0 says when; the others wait for it inside their turns
        return max(self._next_turn - monotonic(), 0.0) if ranks.leads else 0.0

    def turn(self) -> None:
        """Take in what came, let the engine step, deliver what came out; or end the run."""
        engine, status, inbox = self.engine, self._status, self._inbox
        assert engine is not None
        # cleared before anything is read: what comes after that makes the next turn
        inbox.wake_up.clear()
        self._next_turn = monotonic() + _HEARTBEAT
        asked, pauses, has_news = engine.ranks.agree(
            status.local_status, status.is_pause_requested(), not inbox.is_empty
        )
        status.adopt(asked)
        if pauses:
            self._stand_still(engine)
        if has_news:
            self._take_in(engine)
        if asked == status.HARD_STOP:
            self._stop_at_once(engine)
        elif engine.has_work:
            self._step(engine)
        self._idle = not engine.has_work and engine.ranks.all(inbox.requests.empty())
        if self._idle and asked != status.DONT_STOP:
            self.close(NEVER_STARTED)

    def close(self, reason: str) -> None:
        """End the run, whatever state the engine is in: what is live fails with `reason`, everybody
        is let go, and the engine's memory is given back unless it is kept.
        """
        self._status.mark_as_stopped()
        try:
            if self.engine is not None and self.engine.has_work:
                self._fail(self.engine.fail_all(), reason)
            if not self.keeps_engine:
                self.put_away()
        except Exception:
            logger.exception("the engine could not be put away")
            self.engine = None
        finally:
            self._on_close()
            self._router.close(reason, self._status.can_accept_new_requests())
            self._inbox.clear()
            with self._changed:
                self.is_open, self._driver = False, None
                self._changed.notify_all()

    def put_away(self) -> None:
        """Give the engine's memory back; no run may be open."""
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.close()

    def end_thread(self) -> None:
        """Stop the background thread: after its step if that is short, else in the middle of it."""
        self._status.request_stop(self._status.HARD_STOP)
        self._inbox.wake_up.set()
        if (thread := self.thread) is None:
            return
        thread.join(_LAST_STEP)
        if thread.is_alive():
            _raise_in(thread, _ProcessEnds)
            thread.join(_BROKEN_STEP)

    def _leave(self) -> None:
        with self._changed:
            if self._driver is threading.current_thread():
                self._driver = None
                self._changed.notify_all()

    def _step(self, engine: Engine) -> None:
        if self._idle:
            engine.refresh_weights()
        began = monotonic()
        landed = engine.step()
        engine.meter.add_seconds(monotonic() - began)
        self.num_steps += 1
        self._deliver(landed)

    def _stand_still(self, engine: Engine) -> None:
        """Land what flies, wait for the end of the pause, and look what it did to the weights."""
        self._drain(engine)
        self._status.pause_and_wait()
        engine.refresh_weights()

    def _take_in(self, engine: Engine) -> None:
        """Submit what came and cancel what is to be cancelled.

        Cancellations are read first: whatever they name was put before, so it is submitted by now.
        One that names a live request still on its way into the inbox is left for the next time.
        """
        cancelled = take_all(self._inbox.cancellations)
        came = [each for requests in take_all(self._inbox.requests) for each in requests]
        came, cancelled = engine.ranks.spread([*filter(self._router.holds, came)], cancelled)
        for request in came:
            engine.submit(request)
        for request_id in cancelled:
            ended = engine.cancel(request_id)
            self._fail(ended, CANCELLED)
            if not ended and self._router.is_live(request_id):
                self._inbox.cancellations.put(request_id)

    def _stop_at_once(self, engine: Engine) -> None:
        self._drain(engine)
        # one by one, and not `fail_all`, which forgets the cache: it may be kept
        for sequence in (*engine.running, *engine.waiting):
            self._fail(engine.cancel(sequence.request.id), HARD_STOPPED)

    def _drain(self, engine: Engine) -> None:
        for landed in engine.drain():
            self._deliver(landed)

    def _deliver(self, landed: StepOutput) -> None:
        outputs: list[GenerationOutput] = [
            StreamedOutput.of(sequence) for sequence in landed.streamed
        ]
        outputs += [to_output(sequence) for sequence in landed.finished]
        self._hand_out(outputs)

    def _fail(self, sequences: Iterable[Sequence], error: str) -> None:
        self._hand_out([to_output(sequence, error) for sequence in sequences])

    def _hand_out(self, outputs: list[GenerationOutput]) -> None:
        """Deliver outputs; ranks that take nothing in have those alone that were asked of them."""
        if self.engine is not None and not self.engine.ranks.leads:
            outputs = [each for each in outputs if self._router.is_live(each.request_id)]
        if outputs:
            self._router.deliver_batch(outputs)


_threaded: "weakref.WeakSet[Loop]" = weakref.WeakSet()


def _background(find: "weakref.ref[Loop]", wake_up: threading.Event) -> None:
    """The background thread. While it waits for news it does not hold the loop, and with it the
    engine and the model: if all others drop them, they are gone, and the thread ends.
    """
    loop = find()
    if loop is None or not loop.become_driver(lambda: False):
        return
    while loop is not None and loop.drive(loop.is_idle):
        rest = loop.rest
        loop = None
        wake_up.wait(rest)
        loop = find()


def _end_threads() -> None:
    """Called when the process ends: a thread that died inside torch would take the process down
    with SIGABRT.
    """
    for loop in tuple(_threaded):
        loop.end_thread()


def _raise_in(thread: threading.Thread, error: type[BaseException]) -> None:
    """Let a thread raise, before its next instruction of Python."""
    ident = ctypes.c_ulong(thread.ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(error))
