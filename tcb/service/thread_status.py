"""Say what the loop is asked to do, and what became of it: stop, stand still, died."""

import threading


class BackgroundThreadStatus:
    """Stop and pause requests to a background thread, and the error it died of.

    Names and numbers of the stop statuses are those of transformers; a status only grows until
    `clear`. Any number of threads may hold a pause; the thread goes on when the last one is over.
    """

    DONT_STOP, FLUSH_AND_STOP, HARD_STOP, STOPPED = range(4)

    def __init__(self) -> None:
        self.fatal_error: BaseException | None = None
        self._changed = threading.Condition()
        self._own = threading.local()
        self._status = self.DONT_STOP
        self._holders = 0
        self._stands_still = False

    def clear(self) -> None:
        """Forget everything, before a thread starts."""
        with self._changed:
            self.fatal_error = None
            self._status = self.DONT_STOP
            self._stands_still = False
            self._changed.notify_all()

    @property
    def local_status(self) -> int:
        """The stop status that was asked for."""
        return self._status

    @property
    def tp_status(self) -> int:
        """The stop status that all ranks agree on, once a step."""
        return self._status

    def adopt(self, status: int) -> None:
        """Take over what all ranks agree on, which is no less than what was asked for here."""
        with self._changed:
            self._status = max(self._status, status)

    def request_stop(self, status: int, global_rank: int = 0) -> None:
        """Ask the thread to stop: after all requests (FLUSH_AND_STOP), or at once (HARD_STOP)."""
        if status not in (self.FLUSH_AND_STOP, self.HARD_STOP):
            accepted = f"{self.FLUSH_AND_STOP} and {self.HARD_STOP}"
            raise ValueError(f"status is {status!r}; accepted: {accepted}")
        with self._changed:
            self._status = max(self._status, status)

    def record_fatal_error(self, error: BaseException) -> None:
        """Note the error that ends the thread; the first one stays."""
        with self._changed:
            self.fatal_error = self.fatal_error or error
            self._changed.notify_all()

    def mark_as_stopped(self) -> None:
        """Note that the thread is at its end, and wake who waits for a pause."""
        with self._changed:
            self._status = self.STOPPED
            self._changed.notify_all()

    def can_accept_new_requests(self) -> str | None:
        """None, or the reason why no request is accepted."""
        if self.fatal_error is not None:
            kind, text = type(self.fatal_error).__name__, self.fatal_error
            return f"the background thread died of a fatal error: {kind}: {text}"
        if self._status == self.STOPPED:
            return "the background thread has stopped; `start` it again first"
        if self._status != self.DONT_STOP:
            return "the background thread is stopping"
        return None

    def is_pause_requested(self, local: bool = False) -> bool:
        """Whether anybody asks for or holds a pause; with `local`, whether this thread does."""
        return (getattr(self._own, "pauses", 0) if local else self._holders) > 0

    def acquire_pause(self, wake_up: threading.Event) -> None:
        """Wait until the thread stands still; `wake_up` gets it out of its idle wait.

        Raises RuntimeError if the thread ends before that.
        """
        with self._changed:
            self._count(+1)
            try:
                wake_up.set()
                self._changed.wait_for(lambda: self._stands_still or self._is_over())
                if not self._stands_still:
                    raise RuntimeError(
                        "the background thread ended before it could pause"
                    ) from self.fatal_error
            except BaseException:
                self._count(-1)
                raise

    def release_pause(self) -> None:
        """Give a pause back; the thread goes on when nobody holds one."""
        with self._changed:
            self._count(-1)

    def pause_and_wait(self) -> None:
        """Called by the thread itself: stand still until the last pause is over."""
        with self._changed:
            self._stands_still = self._holders > 0
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._stands_still)

    def _is_over(self) -> bool:
        return self._status == self.STOPPED or self.fatal_error is not None

    def _count(self, change: int) -> None:
        self._holders += change
        self._own.pauses = getattr(self._own, "pauses", 0) + change
        if self._holders == 0:
            self._stands_still = False
        self._changed.notify_all()
