"""The simulator runs the package's planner: what it counts is what was planned."""

import json
from dataclasses import replace

import pytest

from bench import report, simulate
from bench.lib import sim_check, sim_large, sim_plots
from bench.lib.arrivals import Asked, from_trace, poisson, tokens_of
from bench.lib.results import RESULTS
from bench.lib.sim_cost import SHAPES, Cost, h200
from tcb.planning.config import ContinuousBatchingConfig
from tests.support.families import FAMILIES

LLAMA, ONE = SHAPES["llama-8b"], h200(1)


def run(asked, shape=LLAMA, machine=ONE, **settings):
    return simulate.simulate(shape, machine, asked, page_size=16, **settings)


def test_every_token_is_counted_and_none_comes_before_it_was_asked_for():
    asked = poisson(20.0, 60, 200, 20)
    found = run(asked)
    assert found["new_tokens"] == sum(item.new for item in asked)
    assert found["prompt_tokens"] == sum(item.prompt for item in asked)
    assert found["recomputed"] == 0
    assert found["time_to_first_token"]["mean"] > 0
    assert found["seconds"] >= asked[-1].time


def test_one_request_takes_what_its_batches_cost():
    cost = Cost(LLAMA, ONE)
    prompt = cost.batch()
    prompt.read(0, 300, True)
    seconds = cost.seconds(prompt)
    for place in range(300, 304):
        step = cost.batch()
        step.decode([place])
        seconds += cost.seconds(step)
    # at depth 1 nothing else waits: the batches of one request lie one behind the other
    found = run([Asked(0.0, 300, 5)])
    assert found["seconds"] == pytest.approx(seconds, rel=1e-9)
    assert found["steps"] == 5


def test_a_decode_costs_as_a_chunk_of_one_token():
    for shape in SHAPES.values():
        cost = Cost(shape, ONE)
        one, other = cost.batch(), cost.batch()
        one.decode([5, 5000])
        other.read(5, 1, True)
        other.read(5000, 1, True)
        assert one == other


def test_a_window_bounds_what_is_read():
    cost = Cost(SHAPES["gemma3-27b"], ONE)
    batch = cost.batch()
    batch.decode([100_000])
    assert dict(zip(cost.windows, batch.keys, strict=True)) == {1024: 1025, None: 100_001}


@pytest.mark.parametrize("name", ["flops", "bandwidth", "link"])
def test_a_faster_machine_is_never_slower(name):
    asked = poisson(40.0, 40, 400, 10)
    machine = h200(4)
    faster = replace(machine, **{name: 10 * getattr(machine, name)})
    assert run(asked, machine=faster)["seconds"] <= run(asked, machine=machine)["seconds"]


def test_prefixes_are_found_and_cost_nothing():
    asked = poisson(5.0, 40, 100, 5, prefixes=2, shared=640)
    shared, alone = run(asked), run(asked, allow_block_sharing=False)
    hits = 38 * 640 / shared["prompt_tokens"]
    assert shared["prefix_hits"] == pytest.approx(hits, abs=2 * 640 / shared["prompt_tokens"])
    assert alone["prefix_hits"] == 0
    assert shared["recomputed"] == alone["recomputed"] == 0
    assert shared["time_to_first_token"]["mean"] < alone["time_to_first_token"]["mean"]


def test_a_small_pool_preempts_and_computes_again():
    asked = [Asked(0.0, 64, 200) for _ in range(24)]
    tight = run(asked, num_blocks=120, safety_margin=0.0)
    roomy = run(asked)
    assert (roomy["preemptions"], roomy["recomputed"]) == (0, 0)
    assert tight["preemptions"] > 0
    assert tight["new_tokens"] == roomy["new_tokens"]
    assert tight["seconds"] > roomy["seconds"]


def test_the_same_arrivals_give_the_same_answer():
    first, second = (run(poisson(30.0, 50, 100, 10, seed=3)) for _ in range(2))
    walls = ("wall_seconds", "requests_per_wall_second")
    assert [{k: v for k, v in found.items() if k not in walls} for found in (first,)] == [
        {k: v for k, v in found.items() if k not in walls} for found in (second,)
    ]


def test_prompts_have_the_asked_beginnings_in_common():
    asked = [Asked(0, 5, 1, "a", 3), Asked(0, 6, 1, "b", 3), Asked(0, 4, 1, "a", 3), Asked(0, 5, 1)]
    first, second, third, fourth = tokens_of(asked)
    assert [len(p) for p in (first, second, third, fourth)] == [5, 6, 4, 5]
    assert first[:3] == third[:3] != second[:3]
    assert not {first[3], third[3], fourth[0]} & {*first[:3], *second[:3]}
    assert len({first[3], second[3], third[3], fourth[0]}) == 4


def test_sizes_are_those_that_the_package_resolves():
    limits = simulate.limits_for(SHAPES["llama-70b"], h200(8), ContinuousBatchingConfig())
    assert limits.depth == 1
    # a rank has one of the eight heads: 80 layers, keys and values of 128, two bytes
    per_token = 80 * 2 * 128 * 2
    assert limits.num_blocks * limits.page_size * per_token < 0.9 * 141e9 - 70.6e9 * 2 / 8
    with pytest.raises(ValueError, match=r"llama-70b needs .* accepted: more devices"):
        simulate.limits_for(SHAPES["llama-70b"], h200(1), ContinuousBatchingConfig())
    with pytest.raises(ValueError, match="8 must be divisible by tensor parallel size 3"):
        run([Asked(0.0, 5, 1)], machine=h200(3))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"time": -1.0, "prompt": 5, "new": 1}, "line 2: time is -1.0; accepted: numbers >= 0"),
        ({"time": 0.5, "prompt": 5, "new": 1}, "line 2: time is 0.5; accepted: at least 1.0"),
        ({"time": 2.0, "prompt": 0, "new": 1}, "line 2: prompt is 0; accepted: numbers >= 1"),
        ({"time": 2.0, "prompt": 5, "new": 1, "shared": 6}, "line 2: shared is 6; accepted"),
        ({"time": 2.0, "length": 5}, "line 2: .*length"),
    ],
)
def test_a_trace_is_read_and_its_faults_are_named(tmp_path, line, message):
    good = {"time": 1.0, "prompt": 5, "new": 2}
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps(good) + "\n\n")
    assert from_trace(trace) == [Asked(1.0, 5, 2)]
    trace.write_text(json.dumps(good) + "\n" + json.dumps(line) + "\n")
    with pytest.raises(ValueError, match=message):
        from_trace(trace)


def test_rates_are_positive():
    with pytest.raises(ValueError, match="rate is 0; accepted: numbers > 0"):
        poisson(0, 1, 1, 1)


def test_pictures_are_drawn_from_the_file_that_is_there(tmp_path):
    source = RESULTS / "simulation-large.json"
    origin = report.origin(source)
    for target, what in sim_plots.PICTURES.items():
        assert origin in target.read_text(), "run: python -m bench.report --figure"
        sim_plots.draw(source, tmp_path / target.name, what, origin)
        assert (tmp_path / target.name).read_text() == target.read_text()


def test_every_policy_is_simulated_for_every_number_of_machines(monkeypatch):
    monkeypatch.setattr(sim_large, "MOST", 60)
    result = sim_large.large(users=600, machines=(1, 4))
    assert result["policies"].keys() == sim_large.POLICIES.keys()
    for rows in result["policies"].values():
        assert [row["machines"] for row in rows] == [1, 4]
        assert rows[0]["time_to_first_token"]["p95"] >= rows[1]["time_to_first_token"]["p95"] > 0
    text = report.tables({"simulation-large": result})
    assert "| llama-70b, 8 x H200, 600, 60 s | 4 | prefill_first |" in text


def test_constants_are_found_again_from_what_they_make_workloads_take():
    shape = replace(SHAPES["llama-8b"], windows=(None,) * 4)
    machine = replace(
        ONE,
        flops=4e11,
        bandwidth=2e11,
        compute=1.0,
        stream=1.0,
        launch=0.0,
        host=0.0,
        host_sequence=1e-3,
        overlaps=False,
    )
    seconds = {
        name: sim_check.predict(shape, machine, workload)
        for name, workload in sim_check.CALIBRATION.items()
    }
    found = sim_check.calibrate(shape, seconds)
    for workload in sim_check.PREDICTED.values():
        expected = sim_check.predict(shape, machine, workload)
        assert sim_check.predict(shape, found, workload) == pytest.approx(expected, rel=0.02)


def test_the_check_serves_predicts_and_compares(monkeypatch):
    monkeypatch.setattr(
        sim_check, "CALIBRATION", {"one": (1, 4, 3), "many": (3, 4, 2), "long": (1, 30, 1)}
    )
    monkeypatch.setattr(sim_check, "PREDICTED", {"chat": (2, 5, 3)})
    monkeypatch.setattr(sim_check, "ROUNDS", 1)
    monkeypatch.setattr(sim_check, "SETTINGS", sim_check.SETTINGS | {"num_blocks": 64})
    result = sim_check.check(FAMILIES["llama"]())
    row = result["rows"]["chat"]
    assert row["error"] == row["predicted"] / row["measured"] - 1
    assert all(value > 0 for value in result["constants"].values())
    assert "| 2 prompts of 5, 3 new |" in report.tables({"simulation-check": result})
