"""What users hand in becomes requests, or an error that says what is wrong with it."""

import queue
from time import monotonic, sleep

import pytest
import torch

from tcb.planning.output import RequestStatus
from tests.support.fake_engine import tokens_after
from tests.support.waiting import SOON, in_thread, is_done, is_failed

# submitting


def test_ids_count_and_outputs_are_right(manager):
    prompts = [[1], [2, 3], list(range(40))]
    assert [manager.add_request(prompt) for prompt in prompts] == ["req_0", "req_1", "req_2"]
    outputs = {each.request_id: each for each in (manager.get_result() for _ in prompts)}
    assert all(is_done(outputs[f"req_{i}"], prompt) for i, prompt in enumerate(prompts))
    assert manager.add_request([5], request_id="mine") == "mine"
    assert manager.add_request([5]) == "req_3"
    assert manager._request_counter == 4


def test_an_own_id_that_looks_like_ours_is_stepped_over(held):
    held.add_request([1], request_id="req_1")
    assert [held.add_request([1]), held.add_request([1])] == ["req_0", "req_2"]


def test_requests_before_start_are_served(new):
    manager = new()
    manager.add_request([1, 2])
    assert manager.get_result() is None
    manager.start()
    assert is_done(manager.get_result(timeout=SOON), [1, 2])


@pytest.mark.parametrize(
    ("tokens", "word"),
    [
        ([], "empty"),
        ([1.5], r"prompt\[0\]"),
        ([1, "a"], r"prompt\[1\]"),
        ([101], "101"),
        ([-1], "-1"),
        (None, "NoneType"),
        ("text", "str"),
        ([1] * 201, "201"),
        (torch.ones(2, 2, dtype=torch.int64), "prompt"),
    ],
)
def test_a_bad_prompt_is_a_value_error_and_hurts_nobody(held, engines, tokens, word):
    good = held.add_request([1, 2])
    with pytest.raises(ValueError, match=word):
        held.add_request(tokens, request_id="bad")
    engines[-1].go.set()
    assert is_done(held.get_result(good), [1, 2])
    assert held.get_result("bad") is None


def test_a_generous_limit_is_warned_of_once(held, engines, caplog):
    ids = [held.add_request([1] * 198, max_new_tokens=n) for n in (3, 4, 4)]
    assert [line.message for line in caplog.records] == [
        "req_1: max_new_tokens is 4, and there is room for 3; a request that has not ended by then "
        "is FAILED, with its tokens and the reason"
    ]
    engines[-1].go.set()
    outputs = [held.get_result(i) for i in ids]
    assert [len(output.generated_tokens) for output in outputs] == [3, 3, 3]
    assert outputs[0].error is None
    for output in outputs[1:]:
        assert output.status is RequestStatus.FAILED and "room for 3" in output.error


def test_a_bad_option_is_named(manager):
    for options, word in [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": 1.5}, "max_new_tokens is 1.5"),
        ({"eos_token_id": "x"}, "eos_token_id is 'x'"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"request_id": ""}, "id is ''"),
    ]:
        with pytest.raises(ValueError, match=word):
            manager.add_request([1], **options)
    with pytest.raises(TypeError, match="no_such_option"):
        manager.add_request([1], no_such_option=1)
    with pytest.raises(TypeError, match="no_such_option"):
        manager.add_requests([[1]], no_such_option=1)
    with pytest.raises(ValueError, match=r"temperature is -1\.0"):
        manager.add_requests([[1]], temperature=-1.0)


def test_the_id_of_a_live_request_is_refused(held, engines):
    held.add_request([1, 2], request_id="a")
    with pytest.raises(ValueError, match="'a'"):
        held.add_request([3], request_id="a")
    held.add_request([1], request_id="b__child#0")
    held.num_return_sequences = 2
    with pytest.raises(ValueError, match="'b__child#0'"):
        held.add_request([1], request_id="b")
    held.num_return_sequences = 1
    engines[-1].go.set()
    assert is_done(held.get_result("a"), [1, 2])
    assert held.add_request([1, 2], request_id="a") == "a"


def test_many_keep_order_and_failures_stand_in_their_place(held, engines):
    handled = held.add_requests([[9], [], [1, 2], [101], [1]])
    assert handled == [f"req_{i}" for i in range(5)]
    engines[-1].go.set()
    assert is_failed(held.get_result("req_1"), "empty")
    assert is_failed(held.get_result("req_3"), "101")
    for name, prompt in [("req_0", [9]), ("req_2", [1, 2]), ("req_4", [1])]:
        assert is_done(held.get_result(name), prompt)
    assert held.add_requests([]) == []


def test_equal_beginnings_are_submitted_together(new):
    manager = new()
    manager.add_requests([[1, 2], [9], [1, 2, 3], [9, 9]])
    submitted = [requests[0].prompt for requests in manager.input_queue.queue]
    assert submitted == [(9, 9), (9,), (1, 2, 3), (1, 2)]
    manager = new(allow_block_sharing=False)
    manager.add_requests([[1, 2], [9], [1, 2, 3]])
    assert [r[0].prompt for r in manager.input_queue.queue] == [(1, 2), (9,), (1, 2, 3)]


def test_eos_and_limits_of_a_request_go_before_the_config(manager):
    tokens = tokens_after([1, 2], 4)
    assert (
        manager.get_result(manager.add_request([1, 2], max_new_tokens=2)).generated_tokens
        == (tokens[:2])
    )
    for eos in (tokens[1], [-1, tokens[1]], torch.tensor([tokens[1]])):
        output = manager.get_result(manager.add_request([1, 2], eos_token_id=eos))
        assert output.generated_tokens == tokens[:2]
        assert output.status is RequestStatus.FINISHED
    assert is_done(manager.get_result(manager.add_request([1, 2], eos_token_id=-1)), [1, 2])


def test_a_full_queue_blocks_then_raises(new, engines):
    manager = new(max_queue_size=1)
    manager._intake.timeout = 0.1
    manager.add_request([1])
    since = monotonic()
    with pytest.raises(queue.Full):
        manager.add_request([2], request_id="again")
    assert 0.1 <= monotonic() - since < SOON
    manager.start()
    assert is_done(manager.get_result(timeout=SOON), [1])
    assert is_done(manager.get_result(manager.add_request([2], request_id="again")), [2])


def test_a_full_queue_waits_for_room(new, engines):
    manager = new(max_queue_size=1)
    engines[-1].go.clear()
    manager.start()
    manager.add_request([1])
    added = in_thread(manager.add_requests, [[2], [3], [4], [5]])
    sleep(0.05)
    engines[-1].go.set()
    assert len(added()) == 4
    assert {manager.get_result(timeout=SOON).prompt_ids[0] for _ in range(5)} == {1, 2, 3, 4, 5}


# forks


def test_forks_have_outputs_of_their_own(manager):
    manager.num_return_sequences = 3
    for prompt in ([1, 2, 3, 4, 5], [7]):
        name = manager.add_request(prompt)
        for each in (name, f"{name}__child#0", f"{name}__child#1"):
            assert is_done(manager.get_result(each), prompt)


def test_a_failed_parent_has_failed_forks(manager):
    manager.num_return_sequences = 2
    (name,) = manager.add_requests([[]])
    assert is_failed(manager.get_result(name), "empty")
    assert is_failed(manager.get_result(f"{name}__child#0"), "empty")


def test_seeds_differ_by_request_and_fork_and_come_again(new):
    def seeds(manager):
        manager.add_requests([[5], [4], [6]])
        entries = [request for each in manager.input_queue.queue for request in each]
        manager.input_queue.queue.clear()
        return {(request.prompt, request.id): request.sampling.seed for request in entries}

    sampling = {"do_sample": True, "num_return_sequences": 2}
    manager = new(sampling, seed=1)
    first, second = seeds(manager), seeds(new(sampling, seed=1))
    assert first == second and len(set(first.values())) == 6
    more = seeds(manager)
    assert not {*first.values()} & {*more.values()}
    manager.start()
    manager.stop()
    manager.background_thread_status.clear()
    manager.output_router.expect_outputs()
    again = seeds(manager)
    assert sorted(again.values()) == sorted(first.values())
    assert not {*first.values()} & {*seeds(new(sampling, seed=2)).values()}
    assert not {*seeds(new(sampling)).values()} & {*seeds(new(sampling)).values()}
