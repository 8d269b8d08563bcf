"""A tiny model and what it says, and managers over an engine without a model."""

import pytest
from transformers import GenerationConfig

import tcb.service.manager
from tcb.api import destroy_cached_continuous_batching_manager
from tcb.planning.config import ContinuousBatchingConfig
from tcb.service.manager import ContinuousBatchingManager
from tests.support.calling import NEW
from tests.support.fake_engine import FakeEngine
from tests.support.families import FAMILIES
from tests.support.reference import alone, prompts_of
from tests.support.waiting import SOON


@pytest.fixture(scope="module")
def tiny():
    return FAMILIES["llama"]()


@pytest.fixture(scope="module")
def prompts():
    return prompts_of((5, 23, 1, 12))


@pytest.fixture(scope="module")
def expected(tiny, prompts):
    return [alone(tiny, prompt, NEW) for prompt in prompts]


@pytest.fixture
def nothing_kept(tiny):
    """Puts away the manager that a test left on the model."""
    yield
    destroy_cached_continuous_batching_manager(tiny)
    assert not hasattr(tiny, "_cached_continuous_batching_manager")


@pytest.fixture
def engines(monkeypatch):
    monkeypatch.setattr(tcb.service.manager, "Engine", FakeEngine)
    monkeypatch.setattr(FakeEngine, "built", [], raising=False)
    return FakeEngine.built


@pytest.fixture
def new(tiny, engines):
    """Makes managers, and ends them after the test."""
    made = []

    def make(generation=None, **settings):
        config = GenerationConfig(max_new_tokens=4, **generation or {})
        made.append(ContinuousBatchingManager(tiny, config, ContinuousBatchingConfig(**settings)))
        return made[-1]

    yield make
    for engine in engines:
        engine.go.set()
    for manager in made:
        if manager.is_running():
            manager.stop(hard_stop=True, timeout=SOON)
            assert not manager.is_running()


@pytest.fixture
def manager(new):
    manager = new()
    manager.start()
    return manager


@pytest.fixture
def held(manager, engines):
    """A running manager whose next step waits until the test says `go`."""
    engines[-1].go.clear()
    return manager
