"""Models split over processes: every rank gives what one process gives, and none waits for ever."""

import signal
from itertools import pairwise

import pytest
import torch
from transformers import AutoModelForCausalLM

import tcb
from tests.support import rank_jobs
from tests.support.families import FAMILIES, SIZES, build
from tests.support.ranks import run_ranks
from tests.support.reference import alone, prompts_of

SPLIT = ("llama", "qwen3", "mixtral", "gemma3", "gpt_oss")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Family -> the folder that its model is in."""
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8}
    builders = {name: FAMILIES[name] for name in SPLIT}
    builders["three heads"] = lambda: build("LlamaForCausalLM", **SIZES | heads)
    builders["four heads"] = lambda: build(
        "LlamaForCausalLM", **SIZES | {"num_key_value_heads": 4, "head_dim": 8}
    )
    made = {name: tmp_path_factory.mktemp(name) for name in builders}
    for name, builder in builders.items():
        model = builder()
        # transformers 5.17 splits a head only evenly
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            model.resize_token_embeddings(model.config.vocab_size + 1, mean_resizing=False)
        model.save_pretrained(made[name])
    return made


def whole(folder):
    """The model of a folder, in this process alone."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def prompts():
    """Some that share a beginning, and one beyond every window."""
    first, *others = prompts_of((23, 40, 1, 12))
    return [first, *others, [*first[:16], 7, 8]]


@pytest.fixture(scope="module")
def pair(folder, prompts):
    """What two ranks saw of everything."""
    paths = [folder[name] for name in SPLIT]
    seen = run_ranks(rank_jobs.everything, 2, folder, paths, prompts, hash_seeds=(1, 2))
    for rank in seen:
        if isinstance(rank, Exception):
            raise rank
    return seen


def test_tokens_and_plans_are_those_of_one_process(pair, folder, prompts):
    first, second = (seen["families"] for seen in pair)
    assert first["hash"] != second["hash"]
    assert first["plans"] == second["plans"]
    assert first["tokens"] == second["tokens"]
    for name, served in zip(SPLIT, zip(*[iter(first["tokens"])] * 2, strict=True), strict=True):
        model = whole(folder[name])
        expected = [alone(model, prompt, rank_jobs.NEW) for prompt in prompts]
        assert list(served) == [expected] * len(rank_jobs.SETTINGS), name


def test_one_model_in_all_ways(pair, folder, prompts):
    first, second = (seen["one model"] for seen in pair)
    for name in ("sampled", "logprobs", "stopped", "kept", "changed", "changed alone"):
        assert first[name] == second[name], name
    model = whole(folder["llama"])
    expected = [alone(model, prompt, rank_jobs.NEW) for prompt in prompts]
    assert first["kept"] == [expected, expected]
    # one rank's weights were written: all forget what they computed with the old ones
    assert first["changed"] == first["changed alone"] != expected
    assert any(tokens != each for tokens, each in zip(first["sampled"], expected, strict=True))
    for tokens, each in zip(first["stopped"], expected[:3], strict=True):
        end = next((i + 1 for i, token in enumerate(each) if token % 3 == 0), len(each))
        assert tokens == each[:end]
    talk, silent = first["manager"], second["manager"]
    assert (talk["driver"], silent["driver"]) == (True, False)
    assert talk["size"] == silent["size"] == 2
    assert (talk["id"], silent["id"]) == ("mine", None)
    assert talk["streamed"][-1] == first["changed"][0] == talk["last"]
    assert all(short == long[:-1] for short, long in pairwise(talk["streamed"]))
    assert talk["cancelled"] == "the request was cancelled"
    for seen in (talk, silent):
        assert seen["paused"]
        assert (seen["left over"], seen["running"]) == (0, False)


def test_what_ranks_do_not_share_is_named_on_each(pair, folder):
    first, second = (seen["refusals"] for seen in pair)
    assert first["settings"] == second["settings"]
    assert "max_batch_tokens is 17 on rank 1 and 16 on rank 0" in first["settings"]
    assert "num_blocks is 1000000000 on rank 1 and 26 on rank 0" in first["memory"]
    assert "tcb is '0.1' on rank 1 and '0.0' on rank 0" in second["version"]
    message = "Number of key value heads 3 must be divisible by tensor parallel size 2."
    assert first["heads"] == second["heads"] == f"ValueError: {message}"
    expected = alone(whole(folder["llama"]), [1, 2, 3], rank_jobs.NEW)
    assert first["afterwards"] == second["afterwards"] == [expected]


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.deep)]
)
def test_a_rank_that_dies_or_hangs_fails_every_request(folder, prompts, how):
    seen, lost = run_ranks(rank_jobs.losing_a_rank, 2, folder["llama"], prompts, how)
    assert isinstance(lost, RuntimeError)
    assert len(seen["errors"]) == len(prompts)
    for error in seen["errors"]:
        assert "another of the 2 ranks died or did not answer in time" in error
    assert seen["seconds"] < rank_jobs.TIMEOUT + 5


@pytest.mark.deep
def test_four_ranks(folder, prompts):
    results = run_ranks(rank_jobs.families, 4, [folder["four heads"]], prompts)
    model = whole(folder["four heads"])
    expected = [alone(model, prompt, rank_jobs.NEW) for prompt in prompts]
    for seen in results:
        assert seen["tokens"] == [expected] * len(rank_jobs.SETTINGS)
        assert seen["plans"] == results[0]["plans"]


def test_a_missing_variable_of_the_launcher_is_named():
    model = FAMILIES["llama"]()
    model._device_mesh = _Mesh()
    with pytest.raises(ValueError, match=r"not initialized; not set by the launcher: RANK, "):
        tcb.generate_batch(model, [[1, 2]], max_new_tokens=2)


class _Mesh:
    """A mesh of two ranks where no process group was made."""

    mesh_dim_names = None

    def size(self):
        return 2
