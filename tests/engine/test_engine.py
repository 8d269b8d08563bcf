"""The engine on tiny models of many families: tokens equal `model.generate`, whatever the
batching.
"""

import pytest
import torch

from tcb.kernels.dispatch import is_interpreting
from tcb.planning.request import Request
from tcb.planning.schedule import plan_batch
from tests.support.families import FAMILIES, WINDOW
from tests.support.reference import alone, new_engine, prompts_of, run, serve

NEW_TOKENS = 20
SETTINGS = {
    "small_pages_chunked": {"page_size": 8, "num_blocks": 60, "max_batch_tokens": 32},
    "tight_pool_two_batches_in_flight": {
        "page_size": 4,
        "num_blocks": 26,
        "max_batch_tokens": 16,
        "use_async_batching": True,
    },
    "tight_pool_offload": {
        "page_size": 4,
        "num_blocks": 26,
        "max_batch_tokens": 16,
        "cpu_offload_space": 0.01,
    },
    "default_page_prefill_first": {
        "page_size": 256,
        "num_blocks": 20,
        "scheduler_type": "prefill_first",
    },
    "no_sharing_two_in_flight": {
        "page_size": 16,
        "num_blocks": 40,
        "max_batch_tokens": 64,
        "allow_block_sharing": False,
        "use_async_batching": True,
    },
}


@pytest.fixture(scope="module")
def references():
    """Model, prompts and the tokens of `generate`, made once for each family."""
    made = {}

    def get(family):
        if family not in made:
            model, prompts = FAMILIES[family](), prompts_of()
            made[family] = model, prompts, [alone(model, p, NEW_TOKENS) for p in prompts]
        return made[family]

    return get


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_generate(references, family, settings):
    model, prompts, expected = references(family)
    assert serve(new_engine(model, **settings), prompts, NEW_TOKENS) == expected


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_a_second_identical_prompt_computes_at_most_one_page(references, family):
    model, _, _ = references(family)
    page_size, prompt = 8, prompts_of([70], seed=3)[0]
    expected = alone(model, prompt, NEW_TOKENS)
    engine = new_engine(model, page_size=page_size, num_blocks=60)
    assert serve(engine, [prompt], NEW_TOKENS) == [expected]
    engine.submit(Request("again", tuple(prompt), NEW_TOKENS))
    (chunk,) = plan_batch(engine.state, engine.limits).chunks
    assert 0 < chunk.count == len(prompt) - chunk.start <= page_size
    assert run(engine) == {"again": expected}


def test_a_longer_conversation_reuses_the_answer_too(references):
    model, _, _ = references("gemma3")
    prompt = prompts_of([30], seed=4)[0]
    engine = new_engine(model, page_size=4, num_blocks=60)
    (answer,) = serve(engine, [prompt], NEW_TOKENS)
    longer = [*prompt, *answer, 7, 8, 9]
    expected = alone(model, longer, NEW_TOKENS)
    engine.submit(Request("turn2", tuple(longer), NEW_TOKENS))
    (chunk,) = plan_batch(engine.state, engine.limits).chunks
    assert chunk.start >= len(prompt)
    assert run(engine) == {"turn2": expected}


@pytest.mark.parametrize("share", [True, False])
def test_a_sliding_group_holds_no_more_than_window_and_chunk(references, share):
    model, _, _ = references("gemma3")
    page_size, chunk = 4, 16
    engine = new_engine(
        model,
        page_size=page_size,
        num_blocks=200,
        max_batch_tokens=chunk,
        allow_block_sharing=share,
    )
    engine.submit(Request("long", tuple(prompts_of([300], seed=5)[0]), 60))
    most = 0
    while engine.has_work:
        engine.step()
        for sequence in engine.state.running.values():
            for group, table in zip(engine.state.groups, sequence.tables, strict=True):
                if group.window is not None:
                    most = max(most, len(table))
    assert 0 < most * page_size <= WINDOW + chunk + 2 * page_size


def test_weights_changed_in_place_are_never_answered_from_the_cache(references):
    model = FAMILIES["llama"]()
    prompt = prompts_of([50], seed=6)[0]
    engine = new_engine(model, page_size=8, num_blocks=60)
    before = serve(engine, [prompt], NEW_TOKENS)
    assert not engine.refresh_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data.mul_(0.8)
    expected = [alone(model, prompt, NEW_TOKENS)]
    assert expected != before
    assert engine.refresh_weights()
    assert serve(engine, [prompt], NEW_TOKENS) == expected


def test_weights_changed_while_requests_run_let_them_go_on_with_the_new_ones():
    model = FAMILIES["gemma3"]()
    prompt = prompts_of([30], seed=7)[0]
    engine = new_engine(model, page_size=8, num_blocks=60, use_async_batching=True)
    engine.submit(Request("r", tuple(prompt), NEW_TOKENS))
    for _ in range(8):
        engine.step()
    engine.drain()
    (sequence,) = engine.state.running.values()
    so_far = sequence.generated.copy()
    with torch.no_grad():
        model.lm_head.weight.data.mul_(-1)
    assert engine.refresh_weights()
    expected = so_far + alone(model, prompt + so_far, NEW_TOKENS - len(so_far))
    assert run(engine) == {"r": expected}


def test_a_model_cast_to_another_dtype_is_not_served_from_the_old_cache():
    model = FAMILIES["llama"]()
    engine = new_engine(model, page_size=8, num_blocks=60)
    serve(engine, prompts_of([20]), NEW_TOKENS)
    model.to(torch.bfloat16)
    with pytest.raises(RuntimeError, match="changed its layers, dtype or device"):
        engine.refresh_weights()


def test_the_model_is_left_as_it_was(references):
    model, prompts, _ = references("gemma2")
    model.train()
    ids = torch.tensor([prompts[0]])
    model.eval()
    with torch.no_grad():
        logits = model(ids).logits
    model.train()
    implementation = model.config._attn_implementation
    state = torch.random.get_rng_state()
    engine = new_engine(model, page_size=8, num_blocks=60)
    engine.submit(Request("r", tuple(prompts[1]), NEW_TOKENS))
    engine.step()
    assert model.training and all(module.training for module in model.modules())
    assert model.config._attn_implementation == implementation
    assert torch.equal(torch.random.get_rng_state(), state)
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(ids).logits, logits), "a plain forward beside a live engine"
    run(engine)


def test_a_prompt_that_can_never_fit_is_refused_alone(references):
    model, prompts, expected = references("llama")
    engine = new_engine(model, page_size=8, num_blocks=12)
    engine.limits.check_request(96)
    with pytest.raises(ValueError, match="accepted: at most 96 "):
        engine.limits.check_request(97)
    assert serve(engine, prompts, NEW_TOKENS) == expected


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_generous_limit_ends_where_the_pool_does(references, family, asynchronous):
    model, prompts, _ = references(family)
    engine = new_engine(model, page_size=4, num_blocks=16, use_async_batching=asynchronous)
    fit = [prompt for prompt in prompts if len(prompt) < engine.limits.max_length]
    prompts = sorted(fit, key=len)[:: len(fit) // 2]
    rooms = [engine.limits.room_after(len(prompt)) for prompt in prompts]
    for i, prompt in enumerate(prompts):
        engine.submit(Request(f"r{i}", tuple(prompt), 10**6))
    ended = {}
    while engine.has_work:
        ended |= {sequence.request.id: sequence for sequence in engine.step().finished}
    for i, (prompt, room) in enumerate(zip(prompts, rooms, strict=True)):
        sequence = ended[f"r{i}"]
        assert sequence.generated == alone(model, prompt, room)
        assert (
            f"max_new_tokens is {10**6}" in sequence.error and f"room for {room}," in sequence.error
        )
    assert not any(engine.state.pool.readers)


def test_torch_operations_are_what_ran():
    assert not is_interpreting()
