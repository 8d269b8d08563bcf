"""Generate after the prompts of a file of JSON lines, or after a text.

A line of the input is an object with one of "prompt" (a text), "messages" (a chat) and "input_ids",
and may have an "id" and "options" of its own ({"max_new_tokens": 8, "temperature": 0.7}). A line of
the output has "id", "text", "tokens" and "finish_reason" ("stop", "length" or "error", with the
"error"). Lines come in the order of the input. Ids that the output file holds already are left out,
so a run that was interrupted goes on where it ended; failed ones are tried again. With --seed the
draws of a prompt follow from the seed and its id, whatever else is in the run.
"""

import argparse
import json
import queue
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any, TextIO

from tcb.cli.loading import Fault, add_model_arguments, load_model, load_tokenizer, read_settings
from tcb.cli.prompts import Prompt, encode, read_lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `tcb generate`."""
    add_model_arguments(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--input", metavar="FILE", help="JSON lines; - is standard input")
    source.add_argument("--prompt", action="append", metavar="TEXT", help="again for more")
    parser.add_argument("--output", metavar="FILE", help="JSON lines (default: standard output)")
    options = parser.add_argument_group("generation options", "as in a GenerationConfig")
    options.add_argument("--max-new-tokens", type=int, default=256)
    options.add_argument("--do-sample", action="store_true", default=None)
    options.add_argument("--temperature", type=float)
    options.add_argument("--top-p", type=float)
    options.add_argument("--top-k", type=int)
    options.add_argument("--min-p", type=float)
    options.add_argument("--repetition-penalty", type=float)
    options.add_argument("--seed", type=int, help="of all draws")
    options.add_argument("--stop", action="append", metavar="TEXT", help="a stop string")
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")


def run(given: argparse.Namespace) -> int:
    """Generate and write; 0 if no prompt failed, else 1."""
    settings = read_settings(given)
    prompts = _read_prompts(given)
    done = _ids_done(given.output)
    left = [prompt for prompt in prompts if prompt.id not in done]
    if len(left) < len(prompts):
        print(f"{len(prompts) - len(left)} of {len(prompts)} are done already", file=sys.stderr)
    if not left:
        return 0
    tokenizer, model = load_tokenizer(given), load_model(given)
    with ExitStack() as stack:
        write = stack.enter_context(_writer(given.output))
        count = stack.enter_context(_progress(len(left), not given.quiet))
        num_failed = 0
        for record in generate(model, tokenizer, left, _options(given), settings, given.seed):
            write(record)
            num_failed += record["finish_reason"] == "error"
            count()
    if num_failed:
        print(f"{num_failed} of {len(left)} prompts failed", file=sys.stderr)
    return int(num_failed > 0)


def generate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    options: dict[str, Any],
    settings: Any,
    seed: int | None = None,
) -> Iterator[dict[str, Any]]:
    """The records of the output, in the order of the prompts, each as soon as those before it are
    there. Raises Fault for options, settings and models that cannot be served.
    """
    import tcb
    from tcb.options.generation import read_options

    try:
        read = read_options(model, None, {**options, "tokenizer": tokenizer})
        manager = tcb.ContinuousBatchingManager(model, read, settings)
    except (ValueError, TypeError, MemoryError) as error:
        raise Fault(str(error)) from error
    with manager.session():
        submitted = [_submit(manager, tokenizer, prompt, seed) for prompt in prompts]
        for prompt, found in zip(prompts, submitted, strict=True):
            if isinstance(found, ValueError | TypeError):
                yield _failed(prompt, str(found))
            else:
                name, asked = found
                yield _record(prompt, manager.get_result(name), tokenizer, asked)


def _submit(manager: Any, tokenizer: Any, prompt: Prompt, seed: int | None) -> Any:
    """The id of a prompt's request and its options, or the error that refuses it."""
    own = {name: value for name, value in prompt.options.items() if value is not None}
    if seed is not None:
        own.setdefault("seed", _seed_of(seed, prompt.id))
    try:
        # names what is no option, so that no argument of `add_request` passes for one
        asked = manager.options.override(**own)
        tokens = encode(prompt, tokenizer)
        while True:
            try:
                return manager.add_request(tokens, **own), asked
            except queue.Full:
                # the batches in between made no room yet
                continue
    except (ValueError, TypeError) as error:
        return error


def _seed_of(seed: int, name: str) -> int:
    """The seed of a prompt: the same in whatever run its id comes."""
    digest = blake2b(repr((seed, name)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _record(prompt: Prompt, output: Any, tokenizer: Any, asked: Any) -> dict[str, Any]:
    if output is None or output.error is not None:
        return _failed(prompt, "the run has ended" if output is None else output.error)
    tokens = output.generated_tokens
    is_cut = len(tokens) >= asked.max_new_tokens and tokens[-1] not in asked.eos
    return {
        "id": prompt.id,
        "text": tokenizer.decode(tokens, skip_special_tokens=True),
        "tokens": tokens,
        "finish_reason": "length" if is_cut else "stop",
    }


def _failed(prompt: Prompt, error: str) -> dict[str, Any]:
    return {"id": prompt.id, "text": "", "tokens": [], "finish_reason": "error", "error": error}


def _options(given: argparse.Namespace) -> dict[str, Any]:
    """The generation options of the command line; a temperature or a top-p asks for sampling."""
    names = ("max_new_tokens", "do_sample", "temperature", "top_p", "top_k", "min_p")
    options = {name: getattr(given, name) for name in (*names, "repetition_penalty")}
    options["stop_strings"] = given.stop
    sampling = (given.temperature, given.top_p, given.top_k, given.min_p)
    if options["do_sample"] is None and any(value is not None for value in sampling):
        options["do_sample"] = True
    return {name: value for name, value in options.items() if value is not None}


def _read_prompts(given: argparse.Namespace) -> list[Prompt]:
    if given.prompt is not None:
        return [
            Prompt(f"line-{number}", text, "prompt", {})
            for number, text in enumerate(given.prompt, 1)
        ]
    try:
        if given.input == "-":
            return list(read_lines(sys.stdin, "standard input"))
        with Path(given.input).open(encoding="utf-8") as file:
            return list(read_lines(file, given.input))
    except OSError as error:
        raise Fault(f"--input {given.input}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise Fault(f"--input {given.input}: {error}; accepted: UTF-8") from error


def _ids_done(path: str | None) -> set[str]:
    """The ids of the output file whose prompts did not fail; of a line cut off nothing is kept."""
    if path is None or not Path(path).exists():
        return set()
    # a line that was cut off may end within a character; what ends a line is a newline alone
    form: dict[str, Any] = {"encoding": "utf-8", "errors": "surrogateescape"}
    try:
        with Path(path).open(**form) as file:
            lines = list(file)
    except OSError as error:
        raise Fault(f"--output {path}: {error.strerror}") from error
    kept, done = [], set()
    for line in lines:
        try:
            record = json.loads(line)
            name, failed = record["id"], record["finish_reason"] == "error"
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            if line is lines[-1] and not line.endswith("\n"):
                continue
            raise Fault(f"--output {path} holds a line of another kind: {line[:60]!r}") from error
        if not failed:
            kept.append(line if line.endswith("\n") else line + "\n")
            done.add(name)
    if kept != lines:
        partial = Path(f"{path}.partial")
        partial.write_text("".join(kept), **form)
        partial.replace(path)
    return done


@contextmanager
def _writer(path: str | None) -> Iterator[Any]:
    """What writes a record as a line, at once."""

    def write_to(file: TextIO, record: dict[str, Any]) -> None:
        file.write(json.dumps(record, ensure_ascii=False) + "\n")
        file.flush()

    if path is None:
        yield lambda record: write_to(sys.stdout, record)
        return
    with ExitStack() as stack:
        try:
            file = stack.enter_context(Path(path).open("a", encoding="utf-8"))
        except OSError as error:
            raise Fault(f"--output {path}: {error.strerror}") from error
        yield lambda record: write_to(file, record)


@contextmanager
def _progress(total: int, is_wanted: bool) -> Iterator[Any]:
    from tcb.service.progress import progress

    with progress(total, is_wanted) as count:
        yield count
