"""Outputs reach whoever waits for them, once, in order, and everybody gets an end."""

import asyncio
import pickle
import queue
import random
import threading
from time import monotonic, sleep

import pytest

from tcb.planning.output import GenerationOutput, RequestStatus
from tcb.planning.request import Request
from tcb.planning.state import Sequence
from tcb.service.loop import Inbox, Loop
from tcb.service.outputs import OutputRouter, StreamedOutput, failed_output, to_output
from tcb.service.thread_status import BackgroundThreadStatus
from tests.support.waiting import SOON, in_thread


def output(name, tokens=(), *, ended=False):
    status = RequestStatus.FINISHED if ended else RequestStatus.DECODING
    return GenerationOutput(name, generated_tokens=list(tokens), status=status)


def request(name):
    return Request(name, (1, 2), 3)


def sequence(**fields):
    asked = Request("a", (5, 6), 4, record_timestamps=True, created_time=0.5)
    made = {"seq_id": 0, "request": asked, "num_prompt": 2, "limit": 4}
    made |= {
        "generated": [7, 8],
        "logprobs": [-1.0, -2.0],
        "timestamps": [1.0, 2.0],
        "started": 0.75,
    }
    return Sequence(**made | {"first": [0], "tables": [[]]} | fields)


@pytest.fixture
def router():
    router = OutputRouter()
    router.expect_outputs()
    return router


# outputs


def test_an_ended_sequence_as_output():
    source = sequence()
    made = to_output(source)
    assert (made.request_id, made.prompt_ids, made.generated_tokens) == ("a", [5, 6], [7, 8])
    assert (made.logprobs, made.timestamps) == ([-1.0, -2.0], [1.0, 2.0])
    assert (made.created_time, made.lifespan[0]) == (0.5, 0.75)
    assert made.lifespan[1] > made.lifespan[0]
    assert (made.status, made.error, made.is_finished()) == (RequestStatus.FINISHED, None, True)
    source.generated.append(9)
    source.logprobs.append(-3.0)
    assert (made.generated_tokens, made.logprobs) == ([7, 8], [-1.0, -2.0])


def test_a_sequence_that_carries_or_meets_an_error_fails_with_its_tokens():
    assert to_output(sequence(), "cancelled").error == "cancelled"
    own = to_output(sequence(error="its own"), "cancelled")
    assert (own.error, own.status, own.generated_tokens) == (
        "its own",
        RequestStatus.FAILED,
        [7, 8],
    )


def test_an_output_of_what_never_ran():
    made = failed_output("a", [1], "why")
    assert (made.status, made.error, made.prompt_ids) == (RequestStatus.FAILED, "why", [1])
    assert made.lifespan[0] == -1 and made.is_finished()


def test_streamed_outputs_are_snapshots():
    source = sequence()
    first = StreamedOutput.of(source)
    source.generated.append(9)
    source.logprobs.append(-3.0)
    second = StreamedOutput.of(source)
    assert (first.generated_tokens, second.generated_tokens) == ([7, 8], [7, 8, 9])
    assert (first.logprobs, second.logprobs) == ([-1.0, -2.0], [-1.0, -2.0, -3.0])
    assert first.timestamps == [1.0, 2.0] and first.prompt_ids == [5, 6]
    assert first.lifespan == (0.75, -1) and not first.is_finished() and first.error is None
    first.generated_tokens.append(1)
    assert first.generated_tokens == [7, 8, 1] and source.generated[-1] == 9


def test_streamed_outputs_behave_like_any_output():
    first = StreamedOutput.of(sequence())
    plain = pickle.loads(pickle.dumps(first))
    assert type(plain) is GenerationOutput and first == plain and plain == first
    assert first != StreamedOutput.of(sequence(generated=[7]))
    assert "generated_tokens=[7, 8]" in repr(first)
    with pytest.raises(AttributeError):
        first.no_such_field  # noqa: B018


# the queue


def test_the_queue_reads_like_a_queue(router):
    outputs = router.output_queue
    assert outputs.empty() and outputs.qsize() == 0
    with pytest.raises(queue.Empty):
        outputs.get_nowait()
    with pytest.raises(queue.Empty):
        outputs.get(timeout=0.01)
    router.deliver(output("a"))
    assert not outputs.empty() and outputs.qsize() == 1
    assert outputs.get().request_id == "a"
    taken = in_thread(outputs.get)
    router.deliver(output("b"))
    assert taken().request_id == "b"


def test_outputs_are_taken_oldest_first_by_id_or_not(router):
    draw, model = random.Random(0), []
    for step in range(2000):
        name = draw.choice("abc")
        if draw.random() < 0.5:
            router.deliver(output(name, [step]))
            model.append((name, step))
            continue
        wanted = draw.choice([None, name])
        found = next((item for item in model if wanted in (None, item[0])), None)
        if found is not None:
            model.remove(found)
        got = router.output_queue.take(wanted)
        assert (got and (got.request_id, got.generated_tokens[0])) == found
    assert router.output_queue.qsize() == len(model)


# waiting


@pytest.fixture
def take(router):
    """What `get_result` does while another thread turns the loop."""
    loop = Loop(Inbox(0), router, BackgroundThreadStatus(), lambda: None)
    loop.is_open, loop._driver = True, threading.Thread()
    return lambda request_id=None, timeout=None: loop.take(request_id, timeout)


def test_who_waits_for_one_request_leaves_the_others(router, take):
    router.open([request("a"), request("b")])
    waits = in_thread(take, "b")
    router.deliver(output("a", [1], ended=True))
    router.deliver(output("b", [2], ended=True))
    assert waits().generated_tokens == [2]
    assert take("a").generated_tokens == [1]


def test_nobody_waits_for_what_cannot_come(router, take):
    assert take("unknown") is None
    router.open([request("a")])
    router.deliver(output("a", ended=True))
    assert take().request_id == "a"
    assert take("a") is None
    router.close("error", "refusal")
    assert take() is None


def test_without_a_loop_nobody_waits():
    router = OutputRouter()
    router.open([request("a")])
    assert not router.may_come() and not router.may_come("a")
    router.expect_outputs()
    assert router.may_come() and router.may_come("a") and not router.may_come("b")


def test_a_timeout_ends_waiting(router, take):
    router.open([request("a")])
    since = monotonic()
    assert take("a", timeout=0.05) is None
    assert 0.05 <= monotonic() - since < SOON
    assert take(timeout=0) is None


def test_of_two_who_wait_for_one_output_both_get_an_end(router, take):
    router.open([request("a")])
    both = [in_thread(take, "a") for _ in range(2)]
    sleep(0.02)
    router.deliver(output("a", ended=True))
    results = [wait() for wait in both]
    assert [result is None for result in results].count(True) == 1


def test_who_waits_for_an_output_that_goes_elsewhere_gets_an_end(router, take):
    async def main():
        router.register("a", print, asyncio.get_running_loop())
        router.open([request("a")])
        waits = in_thread(take, "a")
        await asyncio.sleep(0.02)
        router.deliver(output("a", ended=True))
        assert waits() is None

    asyncio.run(main())


def test_close_ends_everything(router, take):
    router.expect(["c"])
    router.open([request("a"), request("b"), request("c")])
    waits, idle = in_thread(take, "b"), in_thread(take, "a")
    router.close("the error", "the refusal")
    for ended in (waits(), idle(), router.take("c")):
        assert (ended.status, ended.error) == (RequestStatus.FAILED, "the error")
        assert ended.prompt_ids == [1, 2]
    assert not any(map(router.is_live, "abc"))
    with pytest.raises(RuntimeError, match="the refusal"):
        router.open([request("d")])
    router.expect_outputs()
    router.open([request("d")])


def test_ids_of_live_requests_are_refused_all_or_none(router):
    first = request("a")
    router.open([first])
    with pytest.raises(ValueError, match=r"'a'.*live"):
        router.open([request("b"), request("a")])
    assert not router.is_live("b") and router.holds(first) and not router.holds(request("a"))
    router.deliver(output("a"))
    assert router.is_live("a")
    router.deliver(output("a", ended=True))
    assert not router.is_live("a")
    router.open([request("a")])


def test_awaited_outputs_are_taken_by_id_only(router):
    router.expect(["a", "b", "c"])
    router.open([request(name) for name in "abcd"])
    for name in "abcd":
        router.deliver(output(name, ended=True))
    assert router.take().request_id == "d" and router.take() is None
    wanted = {"a", "b", "unknown"}
    assert {each.request_id for each in router.take_arrived(wanted)} == {"a", "b"}
    assert wanted == {"unknown"} and not router.may_any_come(wanted)
    assert router.take("c").request_id == "c" and router.take("c") is None
    # a later request of the id is one like any other
    router.deliver(output("a"))
    assert router.take().request_id == "a"


def test_abandoned_outputs_go_nowhere(router):
    router.expect(["a", "b"])
    router.open([request("a"), request("b")])
    router.deliver(output("a", ended=True))
    router.abandon(["a", "b", "unknown"])
    router.deliver(output("b", ended=True))
    assert [router.take(name) for name in ("a", "b", None)] == [None] * 3
    assert not router.is_live("b")


# handlers


async def until(holds):
    deadline = monotonic() + SOON
    while not holds():
        assert monotonic() < deadline
        await asyncio.sleep(0.001)


def test_a_handler_gets_all_outputs_in_order_and_is_forgotten(router):
    async def main():
        got = []
        router.register("a", got.append, asyncio.get_running_loop())
        router.open([request("a")])
        router.deliver_batch([output("a", [1]), output("b"), output("a", [1, 2])])
        router.deliver(output("a", [1, 2, 3], ended=True))
        await until(lambda: len(got) == 3)
        assert [each.generated_tokens for each in got] == [[1], [1, 2], [1, 2, 3]]

    asyncio.run(main())
    assert router.result_handlers == {}
    assert router.take().request_id == "b"


@pytest.mark.parametrize("ended", [False, True])
def test_a_late_handler_gets_what_is_there_at_once(router, ended):
    async def main():
        got = []
        router.open([request("a")])
        router.deliver_batch([output("a", [1]), output("b"), output("a", [1, 2], ended=ended)])
        router.register("a", got.append, asyncio.get_running_loop())
        if not ended:
            router.deliver(output("a", [1, 2, 3], ended=True))
        await until(lambda: got and got[-1].is_finished())
        assert len(got) == (2 if ended else 3)
        assert router.result_handlers == {}

    asyncio.run(main())


def test_handlers_run_on_their_own_loops(router):
    names = [f"r{i}" for i in range(40)]
    ready, done = threading.Barrier(3), queue.SimpleQueue()

    def serve(mine):
        async def main():
            right = []
            for name in mine:
                router.register(
                    name,
                    lambda each: right.append((each.request_id, threading.get_ident())),
                    asyncio.get_running_loop(),
                )
            ready.wait(SOON)
            await until(lambda: len(right) == len(mine))
            return right

        done.put((mine, threading.get_ident(), asyncio.run(main())))

    for mine in (names[::2], names[1::2]):
        threading.Thread(target=serve, args=(mine,), daemon=True).start()
    ready.wait(SOON)
    router.deliver_batch([output(name, ended=True) for name in names])
    for _ in range(2):
        mine, thread, right = done.get(timeout=SOON)
        assert right == [(name, thread) for name in mine]


def test_a_handler_that_raises_hurts_nobody(router, caplog):
    async def main():
        got = []

        def broken(_):
            raise KeyError("broken handler")

        loop = asyncio.get_running_loop()
        router.register("a", broken, loop)
        router.register("b", got.append, loop)
        router.deliver_batch([output("a"), output("b", ended=True), output("a", ended=True)])
        await until(lambda: got)

    asyncio.run(main())
    assert router.result_handlers == {}


def test_outputs_for_a_closed_loop_are_there_for_all(router):
    async def main():
        router.register("a", print, asyncio.get_running_loop())

    asyncio.run(main())
    router.open([request("a")])
    router.deliver_batch([output("a", [1]), output("a", [1, 2], ended=True)])
    assert [router.take("a").generated_tokens for _ in range(2)] == [[1], [1, 2]]
    assert router.result_handlers == {}
