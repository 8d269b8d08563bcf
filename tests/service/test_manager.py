"""The service around an engine: results, life and death, settings."""

import asyncio
import gc
import queue
import weakref
from copy import deepcopy
from time import monotonic, sleep

import pytest
from transformers import GenerationConfig

from tcb.planning.config import ContinuousBatchingConfig
from tcb.planning.output import RequestStatus
from tcb.planning.request import Request
from tcb.service.manager import ContinuousBatchingManager
from tests.support.fake_engine import tokens_after
from tests.support.waiting import SOON, in_thread, is_done, is_failed, until

# results


def test_streams_grow_by_one_token(manager):
    name = manager.add_request([1, 2], streaming=True, record_timestamps=True)
    outputs = list(manager.request_id_iter(name))
    assert [len(output.generated_tokens) for output in outputs] == [1, 2, 3, 4]
    assert all(len(output.timestamps) == len(output.logprobs) for output in outputs)
    assert [output.status for output in outputs[:-1]] == [RequestStatus.DECODING] * 3
    assert is_done(outputs[-1], [1, 2])
    assert outputs[0].lifespan[1] == -1 and outputs[0].created_time == outputs[-1].created_time
    assert list(manager.request_id_iter(name)) == []


def test_a_result_of_one_request_leaves_the_others(manager):
    names = manager.add_requests([[i] for i in range(20)])
    for i in reversed(range(20)):
        assert is_done(manager.get_result(names[i], timeout=SOON), [i])
    assert manager.get_result(timeout=0) is None


def test_many_iterate_at_once(manager):
    names = [manager.add_request([i], streaming=True) for i in range(12)]
    waits = [in_thread(lambda name=name: list(manager.request_id_iter(name))) for name in names]
    for i, wait in enumerate(waits):
        outputs = wait()
        assert len(outputs) == 4 and is_done(outputs[-1], [i])


def test_iteration_ends_with_the_loop_and_leaves_nothing(manager):
    manager.add_requests([[i] for i in range(5)])
    everything = in_thread(list, manager)
    until(lambda: manager.current_batch >= 4)
    manager.stop()
    assert {output.prompt_ids[0] for output in everything()} == set(range(5))
    assert list(manager) == []


def test_results_stay_after_stop(manager):
    names = manager.add_requests([[i] for i in range(4)])
    manager.stop()
    assert is_done(manager.get_result(names[2]), [2])
    assert {output.prompt_ids[0] for output in manager} == {0, 1, 3}
    assert manager.get_result() is None and manager.get_result("req_2") is None


def test_handlers_before_and_after_the_end(manager):
    async def main():
        got = queue.SimpleQueue()
        manager.register_result_handler("early", got.put)
        manager.add_request([1], request_id="early", streaming=True)
        manager.add_request([2], request_id="late", streaming=True)
        until(lambda: manager.output_router.output_queue.qsize() == 4)
        manager.register_result_handler("late", got.put)
        while got.qsize() < 8:
            await asyncio.sleep(0.001)
        outputs = [got.get() for _ in range(8)]
        for name in ("early", "late"):
            mine = [output for output in outputs if output.request_id == name]
            assert [len(output.generated_tokens) for output in mine] == [1, 2, 3, 4]

    asyncio.run(main())
    assert manager.output_router.result_handlers == {}
    assert manager.output_router.output_queue.empty()


def test_a_handler_needs_a_loop_and_a_refused_request_leaves_none(manager):
    with pytest.raises(RuntimeError):
        manager.register_result_handler("a", print)

    async def main():
        manager.register_result_handler("a", print)
        with pytest.raises(ValueError, match="empty"):
            manager.add_request([], request_id="a")

    asyncio.run(main())
    assert manager.output_router.result_handlers == {}


# stop and start


def test_stop_finishes_everything(held, engines):
    names = held.add_requests([[i] for i in range(20)])
    stopped = in_thread(held.stop)
    until(lambda: held.background_thread_status.local_status > 0)
    assert held.add_request([1]) is None
    engines[-1].go.set()
    assert stopped() is None and not held.is_running()
    assert all(is_done(held.get_result(name), [i]) for i, name in enumerate(names))
    assert engines[-1].closed and held.batch_processor is None


def test_hard_stop_ends_everything_with_its_tokens(held, engines):
    engines[-1].pace = 0.005
    names = [held.add_request([i], max_new_tokens=100, streaming=i == 0) for i in range(12)]
    engines[-1].go.set()
    until(lambda: held.output_router.output_queue.qsize() >= 3)
    held.stop(hard_stop=True)
    *_, first = held.request_id_iter(names[0])
    assert is_failed(first, "hard_stop") and len(first.generated_tokens) >= 3
    assert first.generated_tokens == tokens_after([0], len(first.generated_tokens))
    assert all(is_failed(held.get_result(name), "hard_stop") for name in names[1:])


def test_stop_without_a_loop_says_so(new, caplog):
    manager = new()
    manager.stop()
    manager.start()
    manager.stop()
    manager.stop()
    manager.join(0.0)


def test_after_stop_requests_are_dropped_until_start(manager, engines, caplog):
    manager.stop()
    assert manager.add_request([1]) is None
    assert manager.output_router.output_queue.empty()
    assert manager.add_request([1], request_id="mine") is None
    assert is_failed(manager.get_result("mine"), "stopped")
    names = manager.add_requests([[1], [2]])
    assert names == ["req_1", "req_2"]
    assert all(is_failed(manager.get_result(name), "stopped") for name in names)
    assert sum("dropped" in record.message for record in caplog.records) == 3
    with pytest.raises(RuntimeError, match="stopped"):
        manager.submit([[1]])
    manager.start()
    assert is_done(manager.get_result(manager.add_request([1])), [1])
    assert len(engines) == 2 and engines[0].closed and not engines[1].closed


def test_what_came_too_late_for_one_session_is_no_part_of_the_next(manager):
    manager.stop()
    manager.input_queue.put([Request("stale", (1, 2), 3)])
    manager.start()
    assert is_done(manager.get_result(manager.add_request([1])), [1])
    manager.stop()
    assert manager.output_router.output_queue.empty()


def test_kept_for_the_next_session(manager, engines, tiny):
    manager.get_result(manager.add_request([1]))
    manager.stop(keep_for_next_session=True)
    assert tiny._cached_continuous_batching_manager is manager
    assert not engines[0].closed and manager.batch_processor is not None
    manager.start()
    assert manager.get_result(manager.add_request([2])).request_id == "req_1"
    assert len(engines) == 1
    manager.destroy()
    assert engines[0].closed
    del tiny._cached_continuous_batching_manager


def test_stop_does_not_wait_if_told_so_and_start_waits_for_it(held, engines):
    name = held.add_request([1])
    held.stop(block=False)
    held.stop(timeout=0.02)
    assert held.is_running()
    started = in_thread(held.start)
    engines[-1].go.set()
    assert started() is None
    assert is_done(held.get_result(name), [1])
    assert is_done(held.get_result(held.add_request([2])), [2])


def test_starting_twice_changes_nothing(manager, engines):
    thread = manager._generation_thread
    manager.start()
    assert manager._generation_thread is thread and len(engines) == 1


def test_destroy_ends_what_nobody_started(new, engines):
    manager = new()
    name = manager.add_request([1])
    manager.destroy()
    assert is_failed(manager.get_result(name), "destroyed")
    assert manager.add_request([1]) is None
    manager.destroy()
    assert engines[0].closed


def test_a_result_is_waited_for_before_its_request_is_there(manager):
    waits = in_thread(manager.get_result, "late", SOON)
    sleep(0.05)
    manager.add_request([1], request_id="late")
    assert is_done(waits(), [1])
    since = monotonic()
    assert manager.get_result("never", timeout=0.2) is None
    assert 0.2 <= monotonic() - since < SOON
    assert manager.get_result("never") is None


def test_the_thread_is_a_daemon_and_takes_no_time(manager):
    assert manager._generation_thread.daemon
    rounds = []
    for i in range(20):
        since = monotonic()
        manager.get_result(manager.add_request([i], max_new_tokens=1))
        rounds.append(monotonic() - since)
    assert min(rounds) < 0.02, rounds
    since = monotonic()
    manager.stop()
    assert monotonic() - since < 0.1


def test_one_thread_at_a_time_has_the_engine(manager, engines):
    manager.add_requests([[i] for i in range(8)])
    thread = manager._generation_thread.ident
    with manager.pause():
        pass
    manager.stop()
    assert set(engines[-1].calls) == {thread}


def test_a_stopped_manager_lets_its_engine_go(new, engines):
    manager = new()
    manager.start()
    manager.get_result(manager.add_request([1]))
    manager.stop()
    gc.disable()
    try:
        engine = weakref.ref(engines.pop())
        assert engine() is None
    finally:
        gc.enable()


# settings


def test_settings_are_checked_before_anything_starts(new, engines):
    with pytest.raises(ValueError, match="page_size is 3"):
        new(page_size=3)
    with pytest.raises(TypeError, match="no_such_setting"):
        new(no_such_setting=1)
    with pytest.raises(ValueError, match="num_beams is 4"):
        new({"num_beams": 4})
    assert engines == []


def test_the_configuration_is_a_copy_with_sizes_written_in(tiny, engines):
    config = ContinuousBatchingConfig(page_size=8, seed=3)
    generation = GenerationConfig(max_new_tokens=3)
    before = deepcopy(config), deepcopy(generation)
    manager = ContinuousBatchingManager(tiny, generation, config)
    resolved = manager.continuous_batching_config
    assert (resolved.num_blocks, resolved.max_batch_tokens) == (64, 32)
    assert (resolved.max_requests_per_batch, resolved.page_size) == (8, 8)
    assert (config, generation.to_dict()) == (before[0], before[1].to_dict())
    manager.destroy()


def test_other_settings_are_taken_up_or_refused(manager, engines):
    shorter = GenerationConfig(max_new_tokens=2)
    manager.adapt(shorter)
    assert len(manager.get_result(manager.add_request([1])).generated_tokens) == 2
    manager.generation_config = GenerationConfig(max_new_tokens=3)
    assert len(manager.get_result(manager.add_request([1])).generated_tokens) == 3
    manager.adapt(shorter, ContinuousBatchingConfig(seed=5, max_queue_size=7))
    assert manager.continuous_batching_config.seed == 5 and manager.input_queue.maxsize == 7
    other = ContinuousBatchingConfig(page_size=8)
    with pytest.raises(RuntimeError, match="stop it first"):
        manager.adapt(shorter, other)
    manager.stop(keep_for_next_session=True)
    manager.adapt(shorter, other)
    assert engines[0].closed
    manager.start()
    assert manager.continuous_batching_config.page_size == 8 and len(engines) == 2
    manager.get_result(manager.add_request([1]))
    del manager.model._cached_continuous_batching_manager


def test_what_monitors_read(new, engines):
    manager = new()
    assert manager.batch_processor is None and not manager.warmed_up
    assert manager._generation_thread is None and manager.current_batch == 0
    manager.warmup()
    assert manager.warmed_up
    engines[-1].go.clear()
    manager.start()
    names = [manager.add_request([i]) for i in range(10)]
    assert engines[-1].entered.wait(SOON)
    scheduler, cache = manager.batch_processor.scheduler, manager.batch_processor.cache
    live = {*scheduler.active_requests, *scheduler.waiting_requests}
    assert live <= {*names} and scheduler.has_pending_requests()
    assert (cache.num_blocks, cache.page_size, cache.block_size) == (64, 4, 4)
    assert manager.is_tp_driver and manager.distributed_helper.is_tp_driver
    assert manager.switch_to_cb_friendly_attn(manager.model, False) is None
    engines[-1].go.set()
    until(lambda: manager.output_router.output_queue.qsize() == 10)
    assert manager.current_batch >= 4


def test_taking_away_what_changes_logits(new):
    manager = new({"do_sample": True, "temperature": 0.5, "top_k": 3, "repetition_penalty": 2.0})
    manager.logit_processor.clear()
    manager.add_request([1])
    (request,) = manager.input_queue.get_nowait()
    assert request.processors is None
    assert (request.sampling.temperature, request.sampling.top_k) == (1.0, 0)


def test_copies_of_a_model_have_no_manager(manager, tiny):
    tiny._cached_continuous_batching_manager = manager
    try:
        assert deepcopy(tiny)._cached_continuous_batching_manager is None
    finally:
        del tiny._cached_continuous_batching_manager
