"""What the background thread is asked to do: stop statuses only grow, pauses are counted."""

import threading

import pytest

from tcb.service.thread_status import BackgroundThreadStatus as Status
from tests.support.waiting import in_thread, until


def test_statuses_have_the_numbers_of_transformers_and_only_grow():
    assert (Status.DONT_STOP, Status.FLUSH_AND_STOP, Status.HARD_STOP, Status.STOPPED) == (
        0,
        1,
        2,
        3,
    )
    status = Status()
    assert status.can_accept_new_requests() is None
    status.request_stop(Status.HARD_STOP, 0)
    status.request_stop(Status.FLUSH_AND_STOP)
    assert status.local_status == status.tp_status == Status.HARD_STOP
    assert "stopping" in status.can_accept_new_requests()
    status.mark_as_stopped()
    assert "stopped" in status.can_accept_new_requests()
    status.clear()
    assert status.can_accept_new_requests() is None
    for wrong in (Status.DONT_STOP, Status.STOPPED, 7):
        with pytest.raises(ValueError, match=f"status is {wrong}"):
            status.request_stop(wrong)


def test_the_first_fatal_error_stays():
    status, first = Status(), ArithmeticError("first")
    status.record_fatal_error(first)
    status.record_fatal_error(OSError("second"))
    assert status.fatal_error is first
    assert "ArithmeticError: first" in status.can_accept_new_requests()


@pytest.mark.parametrize("end", [Status.mark_as_stopped, lambda s: s.record_fatal_error(OSError())])
def test_who_waits_for_a_pause_of_a_thread_that_ends_is_let_go(end):
    status, wake_up = Status(), threading.Event()
    waits = in_thread(status.acquire_pause, wake_up)
    assert wake_up.wait(5)
    until(status.is_pause_requested)
    end(status)
    assert isinstance(waits(), RuntimeError)
    assert not status.is_pause_requested()


def test_a_pause_belongs_to_the_thread_that_holds_it():
    status, wake_up = Status(), threading.Event()
    stands = in_thread(lambda: (wake_up.wait(5), status.pause_and_wait()))
    status.acquire_pause(wake_up)
    assert status.is_pause_requested(local=True)
    assert in_thread(status.is_pause_requested, local=True)() is False
    assert in_thread(status.is_pause_requested)() is True
    status.release_pause()
    assert stands()[0] is True and not status.is_pause_requested()
