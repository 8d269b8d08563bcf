"""After the warm-up serving launches no variant of a kernel that the warm-up did not."""

import pytest
import torch

from tcb.planning.meter import Meter
from tcb.planning.request import Request
from tcb.service import warm_up as module
from tcb.service.warm_up import rehearse, warm_up
from tests.conftest import INTERPRETED
from tests.support.families import FAMILIES
from tests.support.reference import alone, new_engine, prompts_of, run
from tests.support.variants import recorded

SETTINGS = {"page_size": 8, "num_blocks": 160, "max_batch_tokens": 96}


@pytest.fixture
def interpreter(monkeypatch):
    if not INTERPRETED:
        pytest.skip("counts interpreted launches: an accelerator or TRITON_INTERPRET is set")
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_serving_launches_nothing_that_was_not_rehearsed(family, interpreter):
    model = FAMILIES[family]()
    engine = new_engine(model, **SETTINGS)
    with recorded() as rehearsed:
        rehearse(engine)
    assert engine.state.next_seq_id == 0 and not engine.has_work
    prompts = prompts_of([3, 90, 1, 17, 40, 9, 2], seed=1)
    with recorded() as served:
        for i, prompt in enumerate(prompts):
            engine.submit(Request(str(i), tuple(prompt), 3 + i % 4))
            if i == 3:
                engine.submit(Request("fork", tuple(prompt), 5, parent="3"))
            if i % 2:
                engine.step()
        run(engine)
    assert {name for name, *_ in served} >= {"paged_attention_kernel", "merge_parts_kernel"}
    assert served <= rehearsed


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_what_a_rehearsal_leaves_is_not_seen(family):
    model = FAMILIES[family]()
    engine = new_engine(model, **SETTINGS)
    rehearse(engine)
    assert engine.meter == Meter()
    prompts = prompts_of([3, 90, 17], seed=1)
    for i, prompt in enumerate(prompts):
        engine.submit(Request(str(i), tuple(prompt), 5))
    tokens = run(engine)
    assert [tokens[str(i)] for i in range(3)] == [alone(model, prompt, 5) for prompt in prompts]


def test_a_wider_table_is_no_new_variant(interpreter):
    engine = new_engine(FAMILIES["llama"](), page_size=4, num_blocks=300, max_batch_tokens=300)
    with recorded() as rehearsed:
        rehearse(engine)
    with recorded() as served:
        engine.submit(Request("long", tuple(prompts_of([280])[0]), 2))
        run(engine)
    assert served <= rehearsed


def test_a_variant_that_was_not_rehearsed_is_seen(interpreter, monkeypatch):
    monkeypatch.setattr(module, "waves", lambda limits: [((1,), ())])
    engine = new_engine(FAMILIES["llama"](), **SETTINGS)
    with recorded() as rehearsed:
        rehearse(engine)
    with recorded() as served:
        engine.submit(Request("long", tuple(prompts_of([90])[0]), 2))
        run(engine)
    assert not served <= rehearsed


def test_a_cpu_compiles_nothing(monkeypatch):
    monkeypatch.setattr(module, "rehearse", lambda engine: pytest.fail("rehearsed on a CPU"))
    warm_up(new_engine(FAMILIES["llama"](), **SETTINGS))


def test_only_a_fresh_engine_is_rehearsed(monkeypatch):
    rehearsed = []
    monkeypatch.setattr(module, "rehearse", rehearsed.append)
    engine = new_engine(FAMILIES["llama"](), **SETTINGS)

    class OnDevice:
        device = torch.device("cuda")

    monkeypatch.setattr(engine, "layers", OnDevice())
    monkeypatch.setattr(engine, "mode", torch.no_grad)
    warm_up(engine)
    engine.state.next_seq_id = 1
    warm_up(engine)
    assert rehearsed == [engine]


def test_an_error_of_the_rehearsal_leaves_the_engine_as_it_was(monkeypatch):
    engine = new_engine(FAMILIES["llama"](), **SETTINGS)
    own, step = engine.state, engine.step
    monkeypatch.setattr(engine, "step", lambda: step() and 1 / 0)
    with pytest.raises(ZeroDivisionError):
        rehearse(engine)
    monkeypatch.undo()
    assert engine.state is own and not engine.has_work
    engine.submit(Request("a", (3, 5, 7), 4))
    assert run(engine)["a"] == alone(engine.model, [3, 5, 7], 4)
