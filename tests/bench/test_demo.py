"""The demo's comparison keeps to its time, whatever the machine does."""

import pytest

from bench import demo


@pytest.mark.parametrize(
    ("seconds", "tokens"), [(1.0, 24), (4.0, 24), (10.0, 10), (20.0, 5), (1000.0, 4)]
)
def test_tokens_are_as_many_as_the_time_allows(seconds, tokens):
    assert demo.choose_length(seconds, 60.0) == tokens


@pytest.mark.parametrize(("budget", "rounds"), [(1.0, 1), (14.9, 1), (15.1, 2), (1000.0, 3)])
def test_a_round_begins_only_if_it_is_expected_to_end(monkeypatch, budget, rounds):
    now, seconds = 0.0, {"tcb": 1.0, "transformers-cb": 2.0, "generate-padded": 3.0}

    def timed(name, model, prompts, new_tokens, settings):
        nonlocal now
        now += seconds[name]
        return seconds[name], [[name]]

    monkeypatch.setattr(demo, "timed", timed)
    monkeypatch.setattr(demo.time, "perf_counter", lambda: now)
    settings = {name: {} for name in seconds}
    spent, tokens = demo.take_turns(None, [[1]], 4, settings, budget)
    assert spent == {name: [value] * rounds for name, value in seconds.items()}
    assert tokens == {name: [[name]] for name in seconds}
