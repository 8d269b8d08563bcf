"""Every example runs as its first lines say, and what it prints is what `generate` gives."""

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"


def run(name: str) -> list[str]:
    """The lines that an example prints in a process of its own, without a network."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(EXAMPLES / f"{name}.py")]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout.splitlines()


@pytest.fixture
def example(monkeypatch):
    """Imports a module of the examples as they import one another: by its bare name."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", ["example"])
    loaded = []

    def load(name: str) -> ModuleType:
        loaded.append(name)
        return importlib.import_module(name)

    yield load
    for name in {"models", *loaded}:
        sys.modules.pop(name, None)


def alone(model: PreTrainedModel, prompt: list[int], new_tokens: int) -> list[int]:
    """What `generate` gives for one prompt."""
    options = GenerationConfig(max_new_tokens=new_tokens, do_sample=False)
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=mask, generation_config=options)[
        0, len(prompt) :
    ].tolist()


def lists(lines: list[str], pattern: str) -> list[list[int]]:
    """The lists of tokens behind the lines' beginnings that match."""
    found = [re.fullmatch(rf"{pattern} (\[.*\])", line) for line in lines]
    return [ast.literal_eval(match[1]) for match in found if match]


def test_offline(example):
    model, tokenizer = example("models").load_model()
    texts = example("offline").TEXTS
    lines = run("offline")
    assert lists(lines, r"req_\d FINISHED") == [
        alone(model, tokenizer.encode(text), 16) for text in texts
    ]
    assert [line.split(" -> ")[0] for line in lines if " -> " in line] == texts


def test_streaming(example):
    model, tokenizer = example("models").load_model()
    lines = run("streaming")
    tokens = alone(model, tokenizer.encode("A haiku about the sea:"), 12)
    assert lists(lines, "streamed DECODING") == [tokens[:n] for n in range(1, 12)]
    assert lists(lines, "streamed FINISHED") == [tokens]
    fact = alone(model, tokenizer.encode("The capital of France is"), 4)
    assert lists(lines, "finished req_1") == [fact]


def test_async_client(example):
    model, tokenizer = example("models").load_model()
    lines = run("async_client")
    tokens = alone(model, tokenizer.encode("A haiku about the sea:"), 8)
    assert lists(lines, "streamed") == [tokens[:n] for n in range(1, 9)]
    questions = ("The capital of France is", "Two and two are")
    assert lists(lines, "finished") == [
        alone(model, tokenizer.encode(text), 4) for text in questions
    ]
    assert lines[-2] == "given up"
    assert re.fullmatch(r"\d+ tokens decoded in \d+ steps", lines[-1])


def test_rl_weights(example):
    model, tokenizer = example("models").load_model()
    training = example("rl_weights")
    lines = run("rl_weights")
    prompts = [tokenizer.encode(training.SYSTEM + board) for board in training.BOARDS]
    for step in range(3):
        expected = [alone(model, prompt, 8) for prompt in prompts]
        assert lists(lines, str(step)) == expected
        with torch.no_grad():
            training.train(model, expected)


def test_kernels_alone():
    lines = run("kernels_alone")
    assert len(lines) == 4
    for line in lines:
        assert float(line.rsplit(" ", 1)[1]) < 1e-5


def test_every_example_is_tested():
    names = {path.stem for path in EXAMPLES.glob("*.py")} - {"models"}
    assert {f"test_{name}" for name in names} <= globals().keys()
