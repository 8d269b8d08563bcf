"""What a manager says of itself, and outputs that a coroutine waits for."""

import asyncio
import threading

import pytest

import tcb
from tests.support.calling import NEW
from tests.support.fake_engine import tokens_after
from tests.support.waiting import SOON, is_done, is_failed, until

# stats


def test_stats_say_what_happened(tiny, prompts):
    settings = {"page_size": 4, "num_blocks": 40, "max_batch_tokens": 16}
    manager = tcb.init_continuous_batching(tiny, None, settings)
    assert manager.stats() == tcb.Stats(num_blocks=40)
    names = [manager.add_request(prompt, max_new_tokens=NEW) for prompt in prompts]
    with manager.session(keep=True):
        assert manager.stats().waiting in (0, len(prompts))
        for name in names:
            assert manager.get_result(name).error is None
        found = manager.stats()
        # a second time the first prompts' full pages are there
        again = manager.add_request(prompts[1], max_new_tokens=1)
        assert manager.get_result(again).error is None
        assert manager.stats().prefix_hit_tokens == len(prompts[1]) - 1 - (len(prompts[1]) - 1) % 4
    lengths = [len(prompt) for prompt in prompts]
    # the last token of each is sampled, never computed; a prompt of one token is a decode
    assert found.prefill_tokens + found.decode_tokens == sum(lengths) + len(prompts) * (NEW - 1)
    assert found.decode_tokens == len(prompts) * (NEW - 1) + lengths.count(1)
    assert (found.waiting, found.running, found.held_blocks, found.cache_use) == (0, 0, 0, 0.0)
    assert found.steps >= NEW and found.preemptions == found.prefix_hit_tokens == 0
    assert found.busy_seconds > found.wait_seconds >= 0
    assert found.decode_tokens_per_second == pytest.approx(
        found.decode_tokens / found.busy_seconds, rel=0.5
    )
    assert found.step_seconds == pytest.approx(found.busy_seconds / found.steps, rel=0.5)
    tcb.destroy_cached_continuous_batching_manager(tiny)
    assert manager.stats() == tcb.Stats()


def test_preemptions_and_use_are_seen(tiny, prompts):
    settings = {"page_size": 4, "num_blocks": 9, "max_batch_tokens": 16}
    manager = tcb.init_continuous_batching(tiny, None, settings)
    uses = []
    names = [manager.add_request(prompts[0], max_new_tokens=20) for _ in range(3)]
    with manager.session():
        last = manager.add_request(prompts[0], max_new_tokens=20, streaming=True)
        uses += [manager.stats().cache_use for _ in manager.request_id_iter(last)]
        assert all(manager.get_result(name).error is None for name in names)
        assert manager.stats().preemptions > 0
    assert 0 < max(uses) <= 1


# coroutines


def test_generate_and_stream(manager):
    async def main():
        many = await asyncio.gather(*(manager.generate([i]) for i in range(20)))
        streamed = [output async for output in manager.stream([5], max_new_tokens=6)]
        return many, streamed

    many, streamed = asyncio.run(main())
    assert all(is_done(output, [i]) for i, output in enumerate(many))
    tokens = tokens_after([5], 6)
    assert [output.generated_tokens for output in streamed] == [tokens[:n] for n in range(1, 7)]
    assert streamed[-1].is_finished() and not streamed[-2].is_finished()


@pytest.mark.parametrize("leave", ["break", "timeout", "cancel", "close"])
def test_leaving_cancels(held, engines, leave):
    engine = engines[-1]
    engine.pace = 0.01

    async def main():
        stream = held.stream([1], max_new_tokens=150)
        if leave == "timeout":
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(held.generate([1], max_new_tokens=150), 0.1)
        elif leave == "cancel":
            task = asyncio.ensure_future(held.generate([1], max_new_tokens=150))
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            async for output in stream:
                assert not output.is_finished()
                if leave == "break":
                    break
                await stream.aclose()
            await stream.aclose()
        while engine.has_work:
            await asyncio.sleep(0.01)

    engine.go.set()
    asyncio.run(asyncio.wait_for(main(), SOON))
    until(lambda: not held.output_router.is_live("req_0"))
    # it was cancelled long before its end, and its last output stands in nobody's way
    assert 0 < engine.meter.steps < 140
    assert held.output_router.output_queue.empty()


def test_errors_reach_the_coroutine(manager, new):
    with pytest.raises(ValueError, match="max_new_tokens"):
        asyncio.run(manager.generate([1], max_new_tokens=0))
    with pytest.raises(TypeError, match="no_such"):
        asyncio.run(manager.generate([1], no_such=1))
    idle = new()
    with pytest.raises(RuntimeError, match="does not run; call start first"):
        asyncio.run(idle.generate([1]))
    manager.stop()
    with pytest.raises(RuntimeError, match="does not run"):
        asyncio.run(manager.generate([1]))


def test_a_run_that_ends_ends_the_coroutine(held, engines):
    async def main():
        task = asyncio.ensure_future(held.generate([1], max_new_tokens=100))
        while not held.output_router.is_live("req_0"):
            await asyncio.sleep(0.01)
        threading.Thread(target=held.stop, kwargs={"hard_stop": True}).start()
        engines[-1].go.set()
        return await task

    assert is_failed(asyncio.run(asyncio.wait_for(main(), SOON)), "hard_stop")
