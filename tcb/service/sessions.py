"""Lets several calls share one running manager: the first starts it, the last stops it.

It does not know what they do with it, or how it starts and stops.
"""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Protocol


class Startable(Protocol):
    """What is needed of a manager."""

    warmed_up: bool
    is_accepting: bool

    def warmup(self) -> None: ...

    def start(self) -> None: ...

    def is_running(self) -> bool: ...

    def stop(self, *how: Any) -> None: ...


class Sessions:
    """The calls that are inside one manager now.

    Sessions stop a manager only if one of them started it: what a user started is the user's.
    """

    def __init__(self):
        self._lock = threading.RLock()
        self._inside = 0
        self._started = self._keep = False

    @contextmanager
    def enter(
        self, manager: Startable, block: bool, timeout: float | None, keep: bool, warmup: bool
    ) -> Generator[None]:
        """Be inside while the body runs; the last one out waits for the end as `stop` does.

        keep   the manager stays as it is for a next session, if any of the sessions wants that
        The last one out stops it after all its requests, or at once if its body raised.
        """
        self._come_in(manager, warmup)
        hard_stop = True
        try:
            yield
            hard_stop = False
        finally:
            self._go_out(manager, block, timeout, keep, hard_stop)

    def _come_in(self, manager, warmup):
        with self._lock:
            if not (manager.is_running() and manager.is_accepting):
                if warmup and not manager.warmed_up:
                    manager.warmup()
                manager.start()
                self._started, self._keep = True, False
            self._inside += 1

    def _go_out(self, manager, block, timeout, keep, hard_stop):
        # within the lock: who comes in meanwhile finds it stopped, and starts it again
        with self._lock:
            self._inside -= 1
            self._keep |= keep
            if self._inside or not self._started:
                return
            self._started = False
            if manager.is_running():
                manager.stop(block, timeout, self._keep, hard_stop)
