"""Whoever waits drives the loop if no thread does; whatever happens to the driver, all who wait get
an end.
"""

import gc
import logging
import queue
import signal
import subprocess
import sys
import threading
import weakref
from time import sleep

import pytest
from transformers import GenerationConfig

import tcb
from tests.support.families import FAMILIES
from tests.support.waiting import SOON, in_thread, is_done, is_failed, until


def ids_of(engines):
    """The threads that turned the latest engine's loop."""
    return set(engines[-1].calls)


# without a thread


def test_who_waits_serves_in_its_own_thread(new, engines):
    manager = new()
    before = threading.active_count()
    with manager.session():
        ids = manager.submit([[1, 2], [], [3]])
        assert ids == ["req_0", "req_1", "req_2"] and manager.is_running()
        outputs = manager.wait(ids)
        assert threading.active_count() == before
    assert not manager.is_running() and engines[-1].closed
    assert list(outputs) == ids and ids_of(engines) == {threading.get_ident()}
    assert is_done(outputs["req_0"], [1, 2]) and is_done(outputs["req_2"], [3])
    assert is_failed(outputs["req_1"], "empty")


def test_every_way_of_waiting_drives(new, engines):
    manager = new()
    with manager.session():
        first, second, third = manager.add_requests([[1], [2], [3]], streaming=True)
        assert is_done(manager.get_result(first) and [*manager.request_id_iter(first)][-1], [1])
        assert manager.get_result(second, timeout=0) is not None
        assert {output.request_id for output, _ in zip(manager, range(3), strict=False)} <= {
            second,
            third,
        }
    assert ids_of(engines) == {threading.get_ident()}
    assert not manager.is_running()


def test_awaited_outputs_are_nobody_elses(new):
    manager = new()
    with manager.session():
        ids = manager.submit([[1], [2]])
        other = manager.add_request([3])
        assert manager.get_result().request_id == other
        assert manager.get_result(timeout=0.02) is None
        assert is_done(manager.get_result(ids[1]), [2])
        assert list(manager.wait(ids)) == ids[:1]
        assert manager.wait(ids) == manager.wait(["unknown"]) == {}


def test_a_full_queue_lets_the_submitter_turn_the_loop(new, engines):
    manager = new(max_queue_size=1)
    with manager.session():
        outputs = manager.wait(manager.submit([[i] for i in range(6)]))
    assert all(is_done(outputs[f"req_{i}"], [i]) for i in range(6))
    assert ids_of(engines) == {threading.get_ident()}


def test_pause_and_stop_without_waiting_have_a_thread(new, engines):
    manager = new()
    with manager.session():
        name = manager.add_request([1])
        with manager.pause():
            engines[-1].weights += 1
        assert is_done(manager.get_result(name), [1])
        assert engines[-1]._seen_weights == 1
    with manager.session():
        name = manager.add_request([2])
        manager.stop(block=False)
        assert is_done(manager.get_result(name), [2])
    assert not manager.is_running()


def test_a_thread_takes_over_from_who_waits(new, engines):
    manager = new()
    with manager.session():
        engines[-1].go.clear()
        ids = manager.submit([[1], [2]])
        waits = in_thread(manager.wait, ids[:1])
        assert engines[-1].entered.wait(SOON)
        manager.start()
        late = manager.add_request([3], max_new_tokens=20)
        engines[-1].go.set()
        assert list(waits()) == ids[:1]
        assert is_done(manager.get_result(late), [3], 20)
        assert len(ids_of(engines)) == 2


# two who wait


def test_when_the_driver_leaves_another_one_takes_the_wheel(new, engines):
    manager = new()
    with manager.session():
        engines[-1].go.clear()
        short = manager.submit([[1]])
        first = in_thread(manager.wait, short)
        assert engines[-1].entered.wait(SOON)
        longer = manager.submit([[2]], GenerationConfig(max_new_tokens=40))
        second = in_thread(manager.wait, longer)
        engines[-1].go.set()
        assert is_done(first()[short[0]], [1])
        assert is_done(second()[longer[0]], [2], 40)
        assert len(ids_of(engines)) == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_who_waits_beside_an_interrupted_driver_gets_an_end(new, engines, caplog, error):
    manager = new()
    with manager.session():
        engine = engines[-1]
        engine.go.clear()
        first = in_thread(manager.wait, manager.submit([[1]]))
        assert engine.entered.wait(SOON)
        ids = manager.submit([[2], [3]])
        second = in_thread(manager.wait, ids)
        sleep(0.02)
        engine.breaks = error()
        engine.go.set()
        assert isinstance(first(), error)
        outputs = second()
        assert list(outputs) == ids
        assert all(is_failed(output, error.__name__) for output in outputs.values())
    assert not manager.is_running() and engine.closed
    with manager.session():
        assert is_done(manager.wait(manager.submit([[1]]))["req_3"], [1])


def test_who_is_interrupted_while_another_drives_ends_its_own_only(held, engines, monkeypatch):
    other = held.add_request([9], max_new_tokens=30)
    ids = held.submit([[1], [2]], GenerationConfig(max_new_tokens=30))

    def interrupted(request_ids):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(held.output_router, "take_arrived", interrupted)
    with pytest.raises(KeyboardInterrupt):
        held.wait(ids)
    engines[-1].pace = 0.002
    engines[-1].go.set()
    until(lambda: not any(map(held.output_router.is_live, ids)))
    assert is_done(held.get_result(other), [9], 30)
    assert held.output_router.output_queue.empty() and held.wait(ids) == {}


# interrupts


def test_an_interrupt_is_no_death_of_the_loop(new, engines, monkeypatch):
    logged = queue.SimpleQueue()
    handler = logging.Handler()
    handler.emit = logged.put
    logger = logging.getLogger("ContinuousBatchingLogger")
    logger.addHandler(handler)
    try:
        manager = new()
        with pytest.raises(KeyboardInterrupt), manager.session():
            engines[-1].breaks = KeyboardInterrupt()
            manager.wait(manager.submit([[1]]))
    finally:
        logger.removeHandler(handler)
    assert logged.empty()
    assert not manager.is_running() and engines[-1].closed


def test_ctrl_c_ends_a_call_and_the_next_one_is_right():
    code = """
import sys, tcb
from tests.support.families import FAMILIES
from tests.support.reference import alone
model, expected = FAMILIES["llama"](), None
expected = alone(model, [1, 2, 3], 5)
from tcb.engine import Engine
step = Engine.step
def watched(engine):
    print("step", flush=True)
    return step(engine)
Engine.step = watched
try:
    tcb.generate_batch(model, [[1, 2]], max_new_tokens=400, persistent_manager=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
Engine.step = step
outputs = tcb.generate_batch(model, [[1, 2, 3]], max_new_tokens=5)
print(outputs["req_0"].generated_tokens == expected, flush=True)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a shell that runs tests in the background has them ignore it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout.readline() == "step\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert out.split("\n")[-3:] == ["interrupted", "True", ""], (out[-200:], err)
    assert "Traceback" not in err and "died" not in err


# dropped


def test_a_manager_that_is_dropped_keeps_neither_thread_nor_model():
    model = FAMILIES["llama"]()
    manager = tcb.init_continuous_batching(model, GenerationConfig(max_new_tokens=3))
    manager.start()
    assert manager.get_result(manager.add_request([1, 2])).error is None
    thread = manager._generation_thread
    dropped = [weakref.ref(each) for each in (model, manager, manager._loop.engine)]
    until(manager._loop.is_idle)
    sleep(0.05)
    del manager, model
    gc.collect()
    thread.join(SOON)
    assert not thread.is_alive()
    gc.collect()
    assert [each() for each in dropped] == [None] * 3


def test_a_manager_that_is_dropped_at_work_finishes_it(tiny, engines):
    manager = tcb.ContinuousBatchingManager(tiny, GenerationConfig(max_new_tokens=4), None)
    manager.start()
    thread = manager._generation_thread
    engines[-1].go.clear()
    got = queue.SimpleQueue()
    manager.output_router.register("a", got.put, _Loop())
    manager.add_request([1], request_id="a")
    assert engines[-1].entered.wait(SOON)
    del manager
    gc.collect()
    engines[-1].go.set()
    assert is_done(got.get(timeout=SOON), [1])
    until(lambda: gc.collect() >= 0 and not thread.is_alive())


class _Loop:
    """An event loop that calls at once."""

    def call_soon_threadsafe(self, function, *arguments):
        function(*arguments)
