"""What any thread leaves for whoever turns the loop, and how long somebody waits."""

import queue
import threading
from collections.abc import Sequence as Entry
from time import monotonic
from typing import TypeVar

from tcb.planning.request import Request

T = TypeVar("T")


class Inbox:
    """What any thread leaves for the driver; an entry of `requests` is a request and its forks."""

    def __init__(self, max_size: int) -> None:
        self.requests: queue.Queue[Entry[Request]] = queue.Queue(max_size)
        self.cancellations: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.wake_up = threading.Event()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left for the driver."""
        return self.requests.empty() and self.cancellations.empty()

    def put(self, requests: Entry[Request], timeout: float) -> None:
        """Leave requests; `queue.Full` if there is no room within `timeout` seconds."""
        self.requests.put(requests, timeout > 0, timeout)
        self.wake_up.set()

    def cancel(self, request_id: str) -> None:
        """Leave the wish to cancel a request."""
        self.cancellations.put(request_id)
        self.wake_up.set()

    def clear(self) -> None:
        """Throw away what nobody will take any more."""
        take_all(self.requests)
        take_all(self.cancellations)


def deadline_of(timeout: float | None) -> float | None:
    """The instant that is `timeout` seconds from now; None is never."""
    return None if timeout is None else monotonic() + timeout


def seconds_to(deadline: float | None) -> float | None:
    """Seconds left, 0 at least; None is for ever."""
    return None if deadline is None else max(deadline - monotonic(), 0.0)


def take_all(source: "queue.Queue[T] | queue.SimpleQueue[T]") -> list[T]:
    """Everything that is in a queue now."""
    taken: list[T] = []
    while True:
        try:
            taken.append(source.get_nowait())
        except queue.Empty:
            return taken
