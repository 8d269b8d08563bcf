"""The sweep over families gives the right verdict, and the documentation what it found."""

import json
import re

import pytest

import tcb
from bench import families
from bench.lib.results import RESULTS
from bench.lib.small_models import CannotBuild, small_models
from tests.support.text import ROOT


@pytest.mark.parametrize(
    ("name", "verdict"), [("llama", "equal"), ("gemma3_text", "equal"), ("mamba", "refused")]
)
def test_a_family_is_judged(name, verdict):
    found, reason = families.judge(name)
    assert found == verdict, reason


@pytest.mark.parametrize("fault", ["a token", "an error", "a failure"])
def test_what_is_wrong_is_found(fault, monkeypatch):
    serve = tcb.generate_batch

    def broken(*arguments):
        outputs = serve(*arguments)
        last = list(outputs.values())[-1]
        if fault == "a token":
            last.generated_tokens[-1] += 1
        elif fault == "an error":
            raise RuntimeError("in the middle")
        else:
            last.error = "no room"
        return outputs

    monkeypatch.setattr(tcb, "generate_batch", broken)
    assert families.judge("llama")[0] == "wrong"


def test_a_model_that_repeats_itself_decides_nothing(monkeypatch):
    monkeypatch.setattr(families, "FEWEST_TOKENS", 98)
    verdict, reason = families.judge("llama")
    assert verdict == "undecided" and "different tokens" in reason


def test_a_process_that_ends_or_hangs_has_a_verdict(monkeypatch):
    monkeypatch.setattr(families, "judge", lambda name: exec("import os; os._exit(7)"))
    assert families.judge_apart("llama", 60.0) == ("wrong", "its process ended with 7")
    monkeypatch.setattr(families, "judge", lambda name: exec("import time; time.sleep(60)"))
    assert families.judge_apart("llama", 0.2)[0] == "undecided"


def test_a_family_that_cannot_be_built_says_why():
    with pytest.raises(CannotBuild, match="_by_arguments: "):
        list(small_models("reformer"))


def test_the_documentation_says_what_was_found():
    content = json.loads((RESULTS / "families.json").read_text("utf-8"))
    count, release = content["count"], content["environment"]["transformers"]
    text = (ROOT / "docs" / "compatibility.md").read_text("utf-8")
    said = re.search(
        r"Of the (\d+) causal families of\s+transformers ([\d.]+), (\d+) give the tokens of"
        r" `generate`,\s+(\d+) are\s+refused\s+by\s+name,\s+(\d+)\s+are\s+undecided",
        text,
    )
    assert said is not None
    numbers = [len(content["families"]), count["equal"], count["refused"], count["undecided"]]
    assert [int(said[i]) for i in (1, 3, 4, 5)] == numbers and said[2] == release
    assert count.get("wrong", 0) == 0
    assert all(reason for _, reason in content["families"].values())
