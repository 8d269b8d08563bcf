"""Whatever the batching, every request gets exactly the tokens that it gets alone."""

from collections import Counter
from random import Random

import pytest

from tcb.planning.request import Request
from tests.planning.serving import Arrival, Server, Workload
from tests.planning.toy import ToyModel, alone
from tests.planning.workloads import layer_group, make_limits, random_workload

SHARDS, SHARD_SIZE = 28, 100
KINDS = {"full": (None,), "sliding": (6,), "hybrid": (None, 6, 1)}
PROMPT = tuple(range(10, 51))


def groups_of(windows):
    return tuple(layer_group(window, layer) for layer, window in enumerate(windows))


def serve(windows, arrivals, cancels=(), new_weights=(), **changes):
    workload = Workload(groups_of(windows), make_limits(**changes), arrivals, cancels, new_weights)
    return Server(workload).run()


@pytest.fixture(params=KINDS)
def windows(request):
    return KINDS[request.param]


@pytest.fixture(params=(0, 1), ids="depth{}".format)
def depth(request):
    return request.param


@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_workloads(shard):
    for seed in range(shard * SHARD_SIZE, (shard + 1) * SHARD_SIZE):
        try:
            # that plans are pure is looked at in every fourth: it takes longer than planning
            Server(random_workload(Random(seed)), pure=seed % 4 == 0).run()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


def test_random_workloads_do_everything():
    counts = Counter()
    for seed in range(200):
        counts.update(Server(random_workload(Random(seed)), pure=False).run().counts)
    expected = ("chunked", "hit pages", "forks", "copies", "recompute", "offload", "restored")
    expected += ("left", "cancelled", "failed", "finished", "new weights")
    assert {name: counts[name] for name in expected if counts[name] < 10} == {}


def test_the_model_sees_its_window_only():
    groups = groups_of((2,))
    requests = [Request("a", prompt, 1) for prompt in ((1, 2, 3), (9, 2, 3), (1, 9, 3))]
    first, same_window, other = [alone(groups, request)[-1] for request in requests]
    # the value of position 1 depends on position 0: a window of 2 sees it through that
    model, contexts = ToyModel(groups), [[]]
    model.extend(contexts, (1, 2, 3), 0)
    assert first == model.next_token(contexts) == model.next_token([contexts[0][-2:]])
    assert len({first, same_window, other}) == 3


def test_a_chunked_prompt_has_the_values_of_a_whole_one():
    model, whole, chunked = ToyModel(groups_of((None, 3))), [[], []], [[], []]
    model.extend(whole, PROMPT, 0)
    for start in range(0, len(PROMPT), 7):
        model.extend(chunked, PROMPT[start : start + 7], start)
    assert whole == chunked


def test_a_second_identical_prompt_computes_at_most_one_page_again(windows, depth):
    server = serve(windows, (Arrival(0, "a", PROMPT, 8),), depth=depth)
    server.arrivals.append(Arrival(0, "b", PROMPT, 8))
    first = len(server.plans)
    server.run()
    # seven of eight new tokens are computed too
    assert sum(plan.num_tokens for plan in server.plans[first:]) - 7 <= 4


def test_identical_prompts_submitted_together_are_computed_once(windows, depth):
    arrivals = tuple(Arrival(0, f"r{i}", PROMPT, 1) for i in range(5))
    server = serve(windows, arrivals, depth=depth)
    # 41 tokens are ten pages and a token: four of five requests compute that token only
    assert sum(plan.num_tokens for plan in server.plans) == 41 + 4


def test_without_sharing_identical_prompts_are_computed_each(windows):
    arrivals = tuple(Arrival(0, f"r{i}", PROMPT, 1) for i in range(5))
    server = serve(windows, arrivals, share_prefixes=False)
    assert sum(plan.num_tokens for plan in server.plans) == 5 * 41


def test_the_next_turn_of_a_conversation_reads_the_answer_of_the_last(windows, depth):
    arrivals = (Arrival(0, "a", PROMPT, 12), Arrival(0, "b", (7, 8), 2, after="a"))
    server = serve(windows, arrivals, depth=depth)
    turn = next(c for plan in server.plans for c in plan.chunks if c.seq_id == 1)
    # 53 tokens of the first turn, the last of them not computed, and two more
    assert turn.start == 52


@pytest.mark.parametrize("length", [1, 2, 4, 5, 8, 9, 41])
def test_forks_share_the_prompt_of_their_parent(windows, depth, length):
    prompt = PROMPT[:length]
    arrivals = (
        Arrival(0, "a", prompt, 9),
        *(Arrival(0, f"a#{i}", parent="a", max_new_tokens=9) for i in range(3)),
    )
    server = serve(windows, arrivals, depth=depth)
    decoded = 4 * 8
    # the prompt but for its last token once, that token by each of the four
    assert sum(plan.num_tokens for plan in server.plans) - decoded == length - 1 + 4


def test_forks_live_on_when_their_parent_is_cancelled(windows, depth):
    arrivals = (
        Arrival(0, "a", PROMPT[:9], 9),
        Arrival(0, "a#0", parent="a", max_new_tokens=9),
        Arrival(0, "a#1", parent="a", max_new_tokens=9),
    )
    server = serve(windows, arrivals, cancels=((4, "a"),), depth=depth)
    assert [record.end for record in server.records] == ["cancelled", "finished", "finished"]


def test_forks_that_have_not_begun_end_with_their_parent(windows):
    arrivals = (
        Arrival(0, "a", PROMPT, 9),
        Arrival(0, "a#0", parent="a", max_new_tokens=9),
    )
    server = serve(windows, arrivals, cancels=((1, "a"),), max_batch_tokens=8)
    assert [record.end for record in server.records] == ["cancelled", "cancelled"]


def test_an_id_can_be_used_again_after_its_end(windows, depth):
    arrivals = (Arrival(0, "a", PROMPT, 5), Arrival(0, "a", PROMPT[::-1], 5))
    server = serve(windows, arrivals, depth=depth)
    assert [record.end for record in server.records] == ["finished", "finished"]


def test_new_weights_forget_what_the_old_ones_computed(windows, depth):
    arrivals = (Arrival(0, "a", PROMPT, 9), Arrival(8, "b", PROMPT, 9))
    server = serve(windows, arrivals, new_weights=(6,), depth=depth, max_batch_tokens=64)
    [changed] = [record for record in server.records if record.changes]
    assert changed.request.id == "a" and 41 < changed.changes[0][0] < 50


def test_a_prompt_that_is_under_way_preempts_newer_sequences_that_decode(depth):
    # b waits for the common pages, c does not: so c, the newest, decodes while b's prompt grows
    arrivals = (
        Arrival(0, "a", PROMPT[:8], 1),
        Arrival(0, "b", PROMPT, 4),
        Arrival(0, "c", (1,), 12),
    )
    limits = {"policy": "prefill_first", "max_batch_tokens": 10, "num_blocks": 10}
    server = serve((36,), arrivals, depth=depth, **limits)
    assert [preemption.seq_id for plan in server.plans for preemption in plan.preemptions] == [2]


def test_a_failed_sample_ends_its_request_alone(windows, depth):
    arrivals = (Arrival(0, "a", PROMPT, 9, fails_at=3), Arrival(0, "b", PROMPT, 9))
    server = serve(windows, arrivals, depth=depth)
    assert [record.end for record in server.records] == ["failed", "finished"]


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 6, 9])
@pytest.mark.parametrize("budget", [1, 4, 7, 64])
def test_the_tightest_pool_of_a_sliding_group_is_enough(window, budget, depth):
    # a window of 1 is in one page, one of 2 to 5 in up to two
    blocks = -(-(window - 1) // 4) + 1
    server = serve(
        (window,),
        (Arrival(0, "a", PROMPT, 20),),
        num_blocks=blocks,
        max_batch_tokens=budget,
        depth=depth,
    )
    assert server.records[0].end == "finished"


def test_a_sliding_group_holds_window_and_chunk_whatever_the_context(depth):
    most = 0
    limits = make_limits(max_length=600, num_blocks=200, max_batch_tokens=16, depth=depth)
    workload = Workload(groups_of((None, 10)), limits, (Arrival(0, "a", PROMPT * 12, 64),))
    server = Server(workload, pure=False)
    while server.arrivals or server.live:
        server.advance()
        most = max([most, *(len(s.tables[1]) for s in server.state.running.values())])
    # ten positions, seen from the start of a page, touch four pages
    assert most == 4
