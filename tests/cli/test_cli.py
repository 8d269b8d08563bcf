"""The command line does what its help says, and names what a user has to change."""

import json
import subprocess
import sys

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

import tcb
from tcb.cli.main import main
from tests.support.families import FAMILIES, REFUSED


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Llama with a tokenizer of a letter and a digit a token, saved as users have models."""
    folder = tmp_path_factory.mktemp("model")
    model = FAMILIES["llama"]()
    model.save_pretrained(folder)
    vocab = {word: i for i, word in enumerate("abcdefghijklmnopqrstuvwxyz")}
    vocab |= {f"<{i}>": i for i in range(len(vocab), model.config.vocab_size)}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return str(folder)


def run(capsys, *arguments):
    """Exit code, standard output and standard error of one command."""
    try:
        code = main([str(each) for each in arguments])
    except SystemExit as end:
        code = end.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def generate(capsys, folder, *arguments):
    return run(capsys, "generate", folder, "--device", "cpu", "--quiet", *arguments)


def records(text):
    return [json.loads(line) for line in text.splitlines()]


def alone(ids, **options):
    model = FAMILIES["llama"]()
    ids = torch.tensor([ids])
    options = {"do_sample": False, **options}
    output = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return output[0, ids.shape[1] :].tolist()


def write(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return path


# explain


def test_explain_says_what_serving_takes(capsys, folder):
    code, out, _ = run(capsys, "explain", folder, "--device", "cpu", "--set", "num_blocks=9")
    assert code == 0
    assert "is served: float32 on cpu, torch operations" in out
    width = FAMILIES["llama"]().config.head_dim
    assert f"3 layers, full, keys and values 2 x ({width} + {width}): 0-2" in out
    assert "9 blocks fit" in out and "the model was made for 512 positions" in out
    code, out, _ = run(
        capsys, "explain", folder, "--device", "cpu", "--json", "--set", "page_size=16"
    )
    found = json.loads(out)
    assert found["page_size"] == 16
    # keys and values of 16 tokens, three layers, two heads, four bytes
    assert found["bytes_a_block"] == 2 * 16 * 3 * 2 * width * 4
    assert found["bytes_of_cache"] == found["bytes_a_block"] * found["num_blocks"]


def test_explain_shows_groups(capsys, tmp_path):
    FAMILIES["gemma3"]().save_pretrained(tmp_path)
    code, out, _ = run(capsys, "explain", tmp_path, "--device", "cpu", "--json")
    groups = json.loads(out)["groups"]
    assert code == 0 and {"full", "window of 12"} == {group["attention"] for group in groups}


def test_explain_says_why_not(capsys, tmp_path):
    REFUSED["mamba"]().save_pretrained(tmp_path)
    code, out, _ = run(capsys, "explain", tmp_path, "--device", "cpu")
    assert code == 1 and "is not served: MambaForCausalLM cannot be served:" in out


# generate


def test_prompts_of_the_command_line(capsys, folder):
    code, out, _ = generate(
        capsys, folder, "--prompt", "hello", "--prompt", "you", "--max-new-tokens", 5
    )
    assert code == 0
    first, second = records(out)
    assert [first["id"], second["id"]] == ["line-1", "line-2"]
    assert first["tokens"] == alone([7, 4, 11, 11, 14], max_new_tokens=5)
    assert first["finish_reason"] == "length" and "error" not in first
    assert second["tokens"] == alone([24, 14, 20], max_new_tokens=5)


def test_lines_of_every_form_come_in_order(capsys, folder, tmp_path):
    source = write(
        tmp_path / "in.jsonl",
        {"id": "long", "prompt": "abc" * 30, "options": {"max_new_tokens": 20}},
        {"id": 7, "messages": [{"role": "user", "content": "hello"}]},
        {"input_ids": [1, 2, 3], "options": {"max_new_tokens": 1}},
    )
    code, out, _ = generate(capsys, folder, "--input", source, "--max-new-tokens", 4)
    assert code == 0
    found = records(out)
    assert [record["id"] for record in found] == ["long", "7", "line-3"]
    assert [len(record["tokens"]) for record in found] == [20, 4, 1]
    assert found[0]["tokens"] == alone([0, 1, 2] * 30, max_new_tokens=20)
    assert found[1]["tokens"] == alone([7, 4, 11, 11, 14], max_new_tokens=4)


def test_stop_and_sampling(capsys, folder):
    tokens = alone([7, 4], max_new_tokens=8)
    stop = f"<{tokens[3]}>" if tokens[3] >= 26 else chr(97 + tokens[3])
    _, out, _ = generate(capsys, folder, "--prompt", "he", "--stop", stop)
    (record,) = records(out)
    first = tokens.index(tokens[3])
    assert record["tokens"] == tokens[: first + 1] and record["finish_reason"] == "stop"
    draws = {"--temperature": 1.5, "--seed": 3, "--max-new-tokens": 12}
    pairs = [each for pair in draws.items() for each in pair]
    one, two = (generate(capsys, folder, "--prompt", "he", *pairs)[1] for _ in range(2))
    assert one == two
    assert records(one)[0]["tokens"] != alone([7, 4], max_new_tokens=12)


def test_a_run_goes_on_where_it_ended(capsys, folder, tmp_path):
    lines = [{"id": str(n), "prompt": "abcdefgh"[: n + 1]} for n in range(6)]
    source, whole = write(tmp_path / "in.jsonl", *lines), tmp_path / "whole.jsonl"
    arguments = ("--input", source, "--max-new-tokens", 3)
    assert generate(capsys, folder, *arguments, "--output", whole)[0] == 0
    expected = whole.read_text("utf-8")
    # two lines, one that failed, and one that was cut off
    parts = expected.splitlines(keepends=True)
    failed = json.dumps({"id": "2", "text": "", "tokens": [], "finish_reason": "error"}) + "\n"
    part = tmp_path / "part.jsonl"
    part.write_text(parts[0] + parts[1] + failed + parts[3][:20], "utf-8")
    code, _, err = generate(capsys, folder, *arguments, "--output", part)
    assert code == 0 and "2 of 6 are done already" in err
    assert part.read_text("utf-8") == expected
    code, _, err = generate(capsys, folder, *arguments, "--output", part)
    assert code == 0 and "6 of 6" in err and part.read_text("utf-8") == expected


@pytest.mark.parametrize("end", ["\n", "", "cut"])
def test_only_a_newline_ends_a_line_of_the_output(capsys, folder, tmp_path, end):
    lines = [{"id": f"{n}\u2028\x85é", "prompt": "abc"} for n in range(2)]
    source, output = write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    arguments = ("--input", source, "--output", output, "--max-new-tokens", 2)
    assert generate(capsys, folder, *arguments)[0] == 0
    whole = output.read_bytes()
    first, second, rest = whole.split(b"\n")
    assert not rest and "é".encode() in second
    # the second line is missing, or cut within the character; the first has its newline or not
    cut = second[: second.index("é".encode()) + 1]
    output.write_bytes(first + (b"\n" + cut if end == "cut" else end.encode()))
    code, _, err = generate(capsys, folder, *arguments)
    assert code == 0 and "1 of 2 are done already" in err
    assert output.read_bytes() == whole


def test_draws_follow_from_the_seed_and_the_id(capsys, folder, tmp_path):
    lines = [{"id": str(n), "prompt": "abc"} for n in range(3)]
    lines[1]["options"] = {"max_new_tokens": 0}
    source, output = write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    draws = ("--temperature", 1.5, "--seed", 3, "--max-new-tokens", 12)
    code, out, _ = generate(capsys, folder, "--input", source, *draws)
    one, failed, two = records(out)
    assert code == 1 and failed["finish_reason"] == "error" and one["tokens"] != two["tokens"]
    output.write_text(json.dumps(one) + "\n", "utf-8")
    generate(capsys, folder, "--input", source, "--output", output, *draws)
    assert records(output.read_text("utf-8")) == [one, failed, two]


def test_options_of_a_line_are_those_of_a_request(capsys, folder, tmp_path):
    (token,) = alone([0], max_new_tokens=1)
    source = write(
        tmp_path / "in.jsonl",
        {"prompt": "a", "options": {"max_new_tokens": None}},
        {"prompt": "a", "options": {"streaming": True}},
        {"prompt": "a", "options": {"eos_token_id": token, "max_new_tokens": 1}},
    )
    code, out, _ = generate(capsys, folder, "--input", source, "--max-new-tokens", 3)
    default, streaming, ended = records(out)
    assert code == 1 and default["tokens"] == alone([0], max_new_tokens=3)
    assert "'streaming'" in streaming["error"]
    assert ended["tokens"] == [token] and ended["finish_reason"] == "stop"


def test_files_that_are_none_are_named(capsys, folder, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"prompt": "\xff"}\n')
    code, _, err = generate(capsys, folder, "--input", source)
    assert code == 2 and "accepted: UTF-8" in err and "Traceback" not in err
    code, _, err = generate(capsys, folder, "--prompt", "a", "--output", tmp_path)
    assert code == 2 and "Is a directory" in err and "Traceback" not in err


def test_a_prompt_that_fails_fails_alone(capsys, folder, tmp_path):
    source = write(
        tmp_path / "in.jsonl",
        {"id": "bad", "input_ids": [1, 10**6]},
        {"id": "worse", "prompt": "a", "options": {"temprature": 1}},
        {"id": "good", "prompt": "a"},
    )
    code, out, err = generate(capsys, folder, "--input", source, "--max-new-tokens", 2)
    bad, worse, good = records(out)
    assert code == 1 and "2 of 3 prompts failed" in err
    assert bad["finish_reason"] == "error" and "prompt[1] is 1000000" in bad["error"]
    assert "'temprature'" in worse["error"]
    assert good["tokens"] == alone([0], max_new_tokens=2)


# what a user got wrong


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2: "),
        ("5", "line 2 is a int; accepted: one JSON object a line"),
        ('{"text": "a"}', "has none of prompt, messages, input_ids; accepted: one of them"),
        ('{"prompt": "a", "input_ids": [1]}', "has prompt and input_ids of"),
        ('{"prompt": 5}', "prompt is a int; accepted: a str"),
        ('{"prompt": "a", "id": 1.5}', "id is 1.5; accepted: strings and integers"),
        ('{"prompt": "a", "id": "line-1"}', "id is 'line-1' again"),
        ('{"prompt": "a", "options": 5}', "options is 5; accepted: an object"),
    ],
)
def test_a_bad_line_is_named_before_anything_starts(capsys, folder, tmp_path, line, words):
    source = tmp_path / "in.jsonl"
    source.write_text(f'{{"prompt": "a"}}\n{line}\n', "utf-8")
    code, out, err = generate(capsys, folder, "--input", source)
    assert code == 2 and words in err and err.count("\n") == 1 and not out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--set", "page_size=1"), "page_size is 1"),
        (("--set", "no_such=1"), "no_such"),
        (("--set", "page_size"), "accepted: NAME=VALUE"),
        (("--input", "nowhere.jsonl"), "--input nowhere.jsonl: No such file"),
        (("--max-new-tokens", "0"), "max_new_tokens"),
        (("--temperature", "-1"), "temperature"),
        (("--output", "nowhere/out.jsonl"), "--output nowhere/out.jsonl: No such file"),
    ],
)
def test_a_bad_argument_is_named(capsys, folder, arguments, words):
    prompts = () if "--input" in arguments else ("--prompt", "a")
    code, out, err = generate(capsys, folder, *prompts, *arguments)
    assert code == 2 and words in err and not out
    assert "Traceback" not in err


def test_a_model_that_is_not_there_is_named(capsys, tmp_path):
    code, _, err = run(capsys, "explain", tmp_path / "nothing", "--device", "cpu")
    assert code == 2 and "nothing" in err and "Traceback" not in err


def test_the_module_is_the_command():
    command = [sys.executable, "-m", "tcb"]
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"tcb {tcb.__version__}\n"
    done = subprocess.run([*command, "generate"], capture_output=True, text=True)
    assert done.returncode == 2 and "usage: tcb generate" in done.stderr
