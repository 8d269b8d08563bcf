"""Compares a simulation with a model that is served here, on a CPU.

Three small workloads give the constants of this machine; the others are predicted with them and
then measured. The machine has to be quiet.
"""

import statistics
import time
from dataclasses import replace
from typing import Any

import torch
import transformers

import tcb
from bench.lib.arrivals import Asked
from bench.lib.results import describe, store
from bench.lib.sim_cost import Cost, Machine, Shape
from bench.simulate import Simulation, limits_for
from tcb.planning.config import ContinuousBatchingConfig

SETTINGS = {"page_size": 16, "num_blocks": 2048, "max_batch_tokens": 512}
# the error that a prediction may have
MOST = 0.15
ROUNDS = 3
# prompts, tokens of each, new tokens
CALIBRATION = {"one": (1, 8, 32), "many": (64, 8, 16), "long": (1, 1024, 1)}
PREDICTED = {"chat": (32, 16, 32), "crowd": (96, 16, 16), "long": (8, 268, 16)}
Workload = tuple[int, int, int]


def main() -> None:
    """Calibrate, predict, measure, and store all three; exit code 1 if a prediction is off."""
    model = build()
    with torch.inference_mode():
        result = check(model)
    print(f"stored in {store('simulation-check', result)}")
    for name, row in result["rows"].items():
        print(f"{name}: predicted {row['predicted']:.3f} s, measured {row['measured']:.3f} s")
    raise SystemExit(any(abs(row["error"]) > MOST for row in result["rows"].values()))


def build() -> Any:
    """A model of SmolLM2-135M's shape with random weights: what it says does not matter here."""
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    return model


def check(model: Any) -> dict[str, Any]:
    """The constants of this machine, and predicted beside measured seconds of each workload."""
    shape, seconds = shape_of(model), measure(model)
    machine = calibrate(shape, {name: seconds[w] for name, w in CALIBRATION.items()})
    rows = {}
    for name, workload in PREDICTED.items():
        predicted, measured = predict(shape, machine, workload), seconds[workload]
        rows[name] = {
            "workload": workload,
            "predicted": predicted,
            "measured": measured,
            "error": predicted / measured - 1,
        }
    return {
        "kind": "simulation-check",
        "environment": describe(torch.device("cpu")),
        "constants": {
            name: getattr(machine, name) for name in ("flops", "bandwidth", "host_sequence")
        },
        "rows": rows,
    }


def shape_of(model: Any) -> Shape:
    """What of a served model the costs depend on."""
    config = model.config
    weights = sum(p.numel() for p in model.parameters())
    return Shape(
        name="served here",
        active=weights,
        weights=weights,
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        dim=config.head_dim,
        intermediate=config.intermediate_size,
        windows=(None,) * config.num_hidden_layers,
        bytes=4,
    )


def measure(model: Any) -> dict[Workload, float]:
    """Seconds that the package takes for each workload: the medians of rounds in which they take
    turns, so that a machine that gets slower does so for all.
    """
    workloads = [*CALIBRATION.values(), *PREDICTED.values()]
    seconds: dict[Workload, list[float]] = {workload: [] for workload in workloads}
    _serve(model, workloads[0])
    for _ in range(ROUNDS):
        for workload in workloads:
            seconds[workload].append(_serve(model, workload))
    tcb.destroy_cached_continuous_batching_manager(model)
    return {workload: statistics.median(found) for workload, found in seconds.items()}


def _serve(model: Any, workload: Workload) -> float:
    """Seconds of one call; the first of all builds the engine too."""
    count, length, new = workload
    size = model.config.vocab_size
    # ids of the model, with nothing in common
    prompts = [[(7919 * row + 7 * place) % size for place in range(length)] for row in range(count)]
    since = time.perf_counter()
    tcb.generate_batch(
        model,
        prompts,
        max_new_tokens=new,
        do_sample=False,
        continuous_batching_config={**SETTINGS, "allow_block_sharing": False},
        persistent_manager=True,
    )
    return time.perf_counter() - since


def predict(shape: Shape, machine: Machine, workload: Workload) -> float:
    """Seconds that the simulation takes for it."""
    count, length, new = workload
    config = ContinuousBatchingConfig(**SETTINGS, allow_block_sharing=False)
    simulation = Simulation(Cost(shape, machine), limits_for(shape, machine, config))
    return simulation.run([Asked(0.0, length, new)] * count)["seconds"]


def calibrate(shape: Shape, seconds: dict[str, float]) -> Machine:
    """The machine on which the three workloads take what they took: memory from one sequence that
    decodes, arithmetic from a long prompt, and what each sequence adds from many that decode.
    """
    machine = Machine(
        name="this machine",
        flops=1e15,
        bandwidth=1e15,
        memory=64e9,
        compute=1.0,
        stream=1.0,
        launch=0.0,
        host=0.0,
        host_sequence=0.0,
        overlaps=False,
        sources=("measured by bench.lib.sim_check",),
    )
    for name, field in (("one", "bandwidth"), ("long", "flops")):
        machine = _fit(shape, machine, field, CALIBRATION[name], seconds[name])
    return _fit(shape, machine, "host_sequence", CALIBRATION["many"], seconds["many"])


def _fit(shape: Shape, machine: Machine, name: str, workload: Workload, seconds: float) -> Machine:
    """The machine whose `name` makes a workload take these seconds: bisection on a log scale."""
    low, high = (1e-9, 1e-1) if name == "host_sequence" else (1e6, 1e16)
    for _ in range(40):
        middle = (low * high) ** 0.5
        slower = predict(shape, replace(machine, **{name: middle}), workload) > seconds
        if slower == (name == "host_sequence"):
            high = middle
        else:
            low = middle
    return replace(machine, **{name: middle})
