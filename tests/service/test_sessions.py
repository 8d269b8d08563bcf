"""Managers as users get them, on tiny models: sessions, kept managers, weights that change."""

import queue
import threading

import pytest
import torch
from transformers import ContinuousBatchingManager as TheirManager
from transformers import GenerationConfig

import tcb
from tests.support.calling import NEW, SMALL, generate, tokens
from tests.support.families import FAMILIES
from tests.support.reference import alone, prompts_of

pytestmark = pytest.mark.usefixtures("nothing_kept")


def test_a_manager_by_hand(tiny, prompts, expected):
    manager = tcb.init_continuous_batching(
        tiny, GenerationConfig(max_new_tokens=NEW), tcb.ContinuousBatchingConfig(**SMALL)
    )
    assert isinstance(manager, tcb.ContinuousBatchingManager)
    assert isinstance(manager, TheirManager)
    manager.start()
    names = manager.add_requests(prompts)
    assert [manager.get_result(name).generated_tokens for name in names] == expected
    manager.stop()
    assert not hasattr(tiny, "_cached_continuous_batching_manager")


def test_the_context_manager_stops_and_hands_out(tiny, prompts, expected):
    settings = {"continuous_batching_config": SMALL}
    generation = GenerationConfig(max_new_tokens=NEW)
    with tcb.continuous_batching_context_manager(tiny, generation, **settings) as manager:
        assert manager.is_running() and manager.warmed_up
        manager.add_requests(prompts)
    assert not manager.is_running() and manager.batch_processor is None
    assert sorted(output.generated_tokens for output in manager) == sorted(expected)


def test_a_body_that_raises_does_not_wait_for_its_requests(tiny):
    generation = GenerationConfig(max_new_tokens=400)
    with (
        pytest.raises(KeyError),
        tcb.continuous_batching_context_manager(tiny, generation) as manager,
    ):
        name = manager.add_request([1, 2])
        raise KeyError("body")
    assert not manager.is_running()
    assert manager.get_result(name).status is tcb.RequestStatus.FAILED


def test_a_persistent_manager_keeps_its_prefixes_and_its_count(tiny, prompts, expected):
    first = generate(tiny, prompts, persistent_manager=True)
    manager = tiny._cached_continuous_batching_manager
    engine = manager._loop.engine
    assert engine is not None and not manager.is_running()
    second = generate(tiny, prompts, persistent_manager=True)
    assert list(second) == ["req_4", "req_5", "req_6", "req_7"]
    assert tokens(first) == tokens(second) == expected
    assert tiny._cached_continuous_batching_manager is manager
    assert manager._loop.engine is engine
    assert tokens(generate(tiny, prompts)) == expected
    assert not hasattr(tiny, "_cached_continuous_batching_manager")
    assert manager._loop.engine is None


def test_a_persistent_manager_honours_what_a_later_call_wants(tiny, prompts, expected):
    generate(tiny, prompts, persistent_manager=True)
    manager = tiny._cached_continuous_batching_manager
    engine = manager._loop.engine
    short = tcb.generate_batch(tiny, prompts, max_new_tokens=2, persistent_manager=True)
    assert tokens(short) == [each[:2] for each in expected]
    assert manager._loop.engine is engine and manager.continuous_batching_config.page_size == 8
    other = SMALL | {"page_size": 16}
    again = generate(tiny, prompts, continuous_batching_config=other, persistent_manager=True)
    assert tokens(again) == expected
    assert manager._loop.engine is not engine
    assert manager.continuous_batching_config.page_size == 16
    assert not manager._loop.engine.options.needs_history
    with_history = generate(
        tiny,
        prompts,
        repetition_penalty=5.0,
        continuous_batching_config=other,
        persistent_manager=True,
    )
    for prompt, got in zip(prompts, tokens(with_history), strict=True):
        ids = torch.tensor([prompt])
        row = tiny.generate(ids, max_new_tokens=NEW, do_sample=False, repetition_penalty=5.0)
        assert got == row[0, len(prompt) :].tolist()


@pytest.mark.parametrize("through_data", [False, True])
def test_changed_weights_never_meet_old_keys(prompts, through_data):
    model = FAMILIES["llama"]()
    before = tokens(generate(model, prompts, persistent_manager=True))
    weight = model.model.layers[0].self_attn.v_proj.weight
    with torch.no_grad():
        (weight.data if through_data else weight).mul_(-1.5)
    after = tokens(generate(model, prompts, persistent_manager=True))
    assert after == [alone(model, prompt, NEW) for prompt in prompts] != before


def test_weights_written_in_a_pause(prompts):
    model = FAMILIES["qwen3"]()
    generation = GenerationConfig(max_new_tokens=NEW)
    with tcb.continuous_batching_context_manager(model, generation) as manager:
        old = [alone(model, prompt, NEW) for prompt in prompts]
        names = manager.add_requests(prompts)
        assert [manager.get_result(name).generated_tokens for name in names] == old
        with manager.pause(), torch.no_grad():
            model.model.layers[1].self_attn.o_proj.weight.mul_(-2.0)
        names = manager.add_requests(prompts)
        new = [alone(model, prompt, NEW) for prompt in prompts]
        assert [manager.get_result(name).generated_tokens for name in names] == new != old


def test_a_call_inside_a_running_session_joins_it(tiny, prompts, expected):
    generate(tiny, prompts, persistent_manager=True)
    with tcb.continuous_batching_context_manager(tiny, persistent_manager=True) as manager:
        name = manager.add_request(prompts[0], max_new_tokens=NEW)
        assert tokens(generate(tiny, prompts, continuous_batching_config=None)) == expected
        assert manager.is_running()
        assert manager.get_result(name).generated_tokens == expected[0]
        assert manager.output_router.output_queue.empty()


def test_a_call_inside_a_session_leaves_its_settings_alone(tiny, prompts, expected):
    generate(tiny, prompts, persistent_manager=True)
    generation = GenerationConfig(max_new_tokens=4)
    with tcb.continuous_batching_context_manager(
        tiny, generation, persistent_manager=True
    ) as outer:
        outer.start()
        short = tcb.generate_batch(tiny, prompts, max_new_tokens=2)
        assert tokens(short) == [each[:2] for each in expected]
        assert outer.is_running() and outer.generation_config.max_new_tokens == 4
        with tcb.continuous_batching_context_manager(
            tiny, GenerationConfig(max_new_tokens=3)
        ) as inner:
            assert inner is outer
            assert len(inner.get_result(inner.add_request(prompts[0])).generated_tokens) == 3
        assert outer.is_running()
        assert len(outer.get_result(outer.add_request(prompts[0])).generated_tokens) == 4
        with pytest.raises(RuntimeError, match="stop it first"):
            tcb.generate_batch(tiny, prompts, continuous_batching_config={"page_size": 32})
    assert not outer.is_running()


def test_what_a_user_started_no_session_stops(tiny, prompts, expected):
    generate(tiny, prompts, persistent_manager=True)
    manager = tiny._cached_continuous_batching_manager
    manager.start()
    assert tokens(generate(tiny, prompts, continuous_batching_config=None)) == expected
    assert manager.is_running()


def test_calls_from_several_threads_share_a_kept_manager(tiny, prompts, expected):
    generate(tiny, prompts, persistent_manager=True)
    manager = tiny._cached_continuous_batching_manager
    results = queue.SimpleQueue()

    def call():
        for _ in range(3):
            results.put(tokens(generate(tiny, prompts, persistent_manager=True)))

    for _ in range(3):
        threading.Thread(target=call, daemon=True).start()
    assert [results.get(timeout=60) for _ in range(9)] == [expected] * 9
    assert tiny._cached_continuous_batching_manager is manager


@pytest.mark.parametrize("hard_stop", [False, True])
def test_prefixes_outlive_a_session(tiny, hard_stop):
    (prompt,) = prompts_of((70,))
    generate(tiny, [prompt], persistent_manager=True)
    manager = tiny._cached_continuous_batching_manager
    manager.start()
    if hard_stop:
        manager.add_request(prompt[:1], max_new_tokens=300)
    manager.stop(keep_for_next_session=True, hard_stop=hard_stop)
    runner, counts = manager._loop.engine._runner, []
    launch = runner.launch

    def counting(packed, *rest):
        counts.append(len(packed.token_ids))
        return launch(packed, *rest)

    runner.launch = counting
    (output,) = generate(tiny, [prompt], persistent_manager=True).values()
    assert output.generated_tokens == alone(tiny, prompt, NEW)
    assert sum(counts) <= SMALL["page_size"] + NEW - 1, counts


def test_calls_from_several_threads(tiny, prompts, expected):
    results = queue.SimpleQueue()
    for _ in range(3):
        threading.Thread(
            target=lambda: results.put(tokens(generate(tiny, prompts))), daemon=True
        ).start()
    assert [results.get(timeout=60) for _ in range(3)] == [expected] * 3


def test_an_interrupted_call_leaves_nothing_running(tiny, monkeypatch):
    managers = []

    def interrupted(self, *arguments):
        managers.append(self)
        self.add_request([1, 2], max_new_tokens=400)
        raise KeyboardInterrupt

    monkeypatch.setattr(tcb.ContinuousBatchingManager, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate(tiny, [[1, 2]])
    assert not managers[0].is_running()


def test_a_plain_forward_while_the_engine_lives(tiny, prompts, expected):
    ids = torch.tensor([prompts[1]])
    before = tiny(ids).logits
    generation = GenerationConfig(max_new_tokens=60)
    with tcb.continuous_batching_context_manager(tiny, generation) as manager:
        manager.add_requests(prompts)
        for _ in range(5):
            assert torch.equal(tiny(ids).logits, before)
        assert alone(tiny, prompts[0], NEW) == expected[0]
