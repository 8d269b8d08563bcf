"""Whatever happens to the background thread, every request gets an end."""

import asyncio
import threading
from dataclasses import replace
from time import monotonic, sleep

import pytest

from tests.support import fake_engine
from tests.support.fake_engine import tokens_after
from tests.support.waiting import SOON, in_thread, is_done, is_failed, until

# cancelling


def test_cancelling_ends_what_runs_and_what_waits(held, engines):
    names = [held.add_request([i], max_new_tokens=50) for i in range(12)]
    assert engines[-1].entered.wait(SOON)
    waits = [in_thread(held.get_result, name) for name in names[:2]]
    iterates = in_thread(lambda: list(held.request_id_iter(names[2])))
    for name in names[:3] + names[10:]:
        held.cancel_request(name)
    held.cancel_request("unknown")
    engines[-1].go.set()
    assert all(is_failed(wait(), "cancelled") for wait in waits)
    assert is_failed(iterates()[-1], "cancelled")
    assert all(is_failed(held.get_result(name), "cancelled") for name in names[10:])
    assert all(is_done(held.get_result(names[i]), [i], 50) for i in range(3, 10))


def test_cancelled_requests_keep_their_tokens(held, engines):
    engines[-1].pace = 0.005
    name = held.add_request([1], max_new_tokens=50, streaming=True)
    engines[-1].go.set()
    until(lambda: not held.output_router.output_queue.empty())
    held.cancel_request(name)
    *_, last = held.request_id_iter(name)
    assert is_failed(last, "cancelled") and 1 <= len(last.generated_tokens) < 50
    assert last.generated_tokens == tokens_after([1], len(last.generated_tokens))


def test_cancelling_at_once_is_never_lost(manager):
    for i in range(100):
        name = manager.add_request([i], max_new_tokens=60)
        manager.cancel_request(name)
        assert manager.get_result(name, timeout=SOON).is_finished()


def test_cancelling_before_start(new):
    manager = new()
    manager.cancel_request(manager.add_request([1]))
    kept = manager.add_request([2])
    manager.start()
    assert is_failed(manager.get_result("req_0", timeout=SOON), "cancelled")
    assert is_done(manager.get_result(kept, timeout=SOON), [2])


def test_cancelling_what_still_waits_for_room_in_the_queue(new, engines):
    manager = new(max_queue_size=1)
    manager.start()
    engines[-1].go.clear()
    manager.add_request([1])
    assert engines[-1].entered.wait(SOON)
    manager.add_request([2])
    added = in_thread(manager.add_request, [3], request_id="late", max_new_tokens=90)
    until(lambda: manager.output_router.is_live("late"))
    manager.cancel_request("late")
    engines[-1].pace = 0.01
    engines[-1].go.set()
    assert added() == "late"
    assert is_failed(manager.get_result("late"), "cancelled")


def test_cancelling_a_parent_and_a_fork(held, engines):
    held.num_return_sequences = 2
    first, second = held.add_request([1] * 9), held.add_request([2] * 9)
    held.cancel_request(first)
    held.cancel_request(f"{second}__child#0")
    engines[-1].go.set()
    assert is_failed(held.get_result(first), "cancelled")
    held.get_result(f"{first}__child#0", timeout=SOON).is_finished()
    assert is_failed(held.get_result(f"{second}__child#0"), "cancelled")
    assert is_done(held.get_result(second), [2] * 9)


def test_cancelling_reaches_a_handler(held, engines):
    async def main():
        ended = asyncio.get_running_loop().create_future()
        held.register_result_handler("a", ended.set_result)
        held.add_request([1], request_id="a")
        held.cancel_request("a")
        engines[-1].go.set()
        assert is_failed(await asyncio.wait_for(ended, SOON), "cancelled")

    asyncio.run(main())


# pause


def test_pause_stands_still_and_looks_at_the_weights(manager, engines):
    engine = engines[-1]
    engine.pace = 0.002
    name = manager.add_request([1], max_new_tokens=150)
    until(lambda: manager.current_batch > 2)
    with manager.pause():
        before, refreshes = manager.current_batch, engine.refreshes
        sleep(0.05)
        assert manager.current_batch == before
        engine.weights += 1
    output = manager.get_result(name)
    assert is_done(output, [1], 150)
    assert engine.refreshes == refreshes + 1 and engine._seen_weights == 1


def test_pause_with_several_holders(manager):
    inside, leave = threading.Barrier(4), [threading.Event() for _ in range(3)]

    def hold(event):
        with manager.pause(), manager.pause():
            inside.wait(SOON)
            return event.wait(SOON)

    waits = [in_thread(hold, event) for event in leave]
    inside.wait(SOON)
    name = manager.add_request([1])
    for event, wait in zip(leave, waits, strict=True):
        assert manager.get_result(name, timeout=0.02) is None
        assert manager.current_batch == 0
        event.set()
        assert wait() is True
    assert is_done(manager.get_result(name, timeout=SOON), [1])


def test_pause_of_an_idle_loop_is_at_once(manager):
    since = monotonic()
    with manager.pause():
        pass
    assert monotonic() - since < 1


def test_stop_inside_a_pause_raises_and_from_outside_waits(manager):
    name = manager.add_request([1])
    with manager.pause():
        with pytest.raises(RuntimeError, match="pause"):
            manager.stop(timeout=1)
        stopped = in_thread(manager.stop)
        sleep(0.02)
        assert manager.is_running()
    assert stopped() is None
    assert is_done(manager.get_result(name), [1])


def test_pause_without_a_loop_raises(new):
    manager = new()
    for act in (lambda: None, lambda: (manager.start(), manager.stop())):
        act()
        with pytest.raises(RuntimeError, match="no loop"), manager.pause():
            pass


def test_who_waits_for_a_pause_learns_that_the_loop_died(held, engines):
    held.add_request([1])
    assert engines[-1].entered.wait(SOON)

    def pause():
        with held.pause():
            return "paused"

    waits = in_thread(pause)
    until(held.background_thread_status.is_pause_requested)
    engines[-1].breaks = ArithmeticError("broken")
    engines[-1].go.set()
    error = waits()
    assert isinstance(error, RuntimeError) and isinstance(error.__cause__, ArithmeticError)


# weights


def test_weights_are_looked_at_when_an_idle_loop_gets_work(manager, engines):
    for i in range(3):
        manager.get_result(manager.add_request([i]))
        until(lambda: not engines[-1].has_work)
        sleep(0.02)
        assert engines[-1].refreshes == i + 1


# fatal errors


def test_an_engine_that_breaks_ends_every_request(held, engines):
    names = [held.add_request([i], max_new_tokens=50) for i in range(12)]
    waits = [in_thread(held.get_result, name) for name in names]
    engines[-1].breaks = ArithmeticError("the device is gone")
    engines[-1].go.set()
    outputs = [wait() for wait in waits]
    assert all(is_failed(output, "ArithmeticError", "the device is gone") for output in outputs)
    until(lambda: not held.is_running())
    assert held.background_thread_status.fatal_error is engines[-1].breaks
    with pytest.raises(RuntimeError, match="ArithmeticError: the device is gone"):
        held.add_request([1])
    with pytest.raises(RuntimeError, match="the device is gone"):
        held.add_requests([[1]])
    assert held.get_result() is None and list(held) == []
    assert engines[-1].closed
    held.start()
    assert held.background_thread_status.fatal_error is None
    assert is_done(held.get_result(held.add_request([1])), [1])


def test_handlers_learn_of_a_fatal_error_after_it_is_recorded(held, engines):
    async def main():
        ended = asyncio.get_running_loop().create_future()

        def note(output):
            ended.set_result((output, held.background_thread_status.fatal_error))

        held.register_result_handler("a", note)
        held.add_request([1], request_id="a")
        engines[-1].breaks = MemoryError("no room")
        engines[-1].go.set()
        output, error = await asyncio.wait_for(ended, SOON)
        assert is_failed(output, "no room") and error is engines[-1].breaks

    asyncio.run(main())


def test_an_engine_that_cannot_even_be_put_away(held, engines, monkeypatch):
    def worse():
        raise OSError("worse")

    name = held.add_request([1])
    monkeypatch.setattr(engines[-1], "fail_all", worse)
    engines[-1].breaks = ArithmeticError("bad")
    engines[-1].go.set()
    assert is_failed(held.get_result(name), "bad")
    until(lambda: not held.is_running())


def test_a_request_that_another_engine_cannot_compute_ends_alone(new, engines, monkeypatch):
    manager = new()
    names = manager.add_requests([[6], [7] * 9, [8]])

    # what the next engine has room for
    monkeypatch.setattr(fake_engine, "LIMITS", replace(fake_engine.LIMITS, max_length=5))
    manager.adapt(manager.generation_config, {"page_size": 8})
    manager.start()
    assert len(engines) == 2
    assert is_failed(manager.get_result(names[1]), "accepted: at most 5")
    assert is_done(manager.get_result(names[0]), [6]) and is_done(manager.get_result(names[2]), [8])
