"""Reads the prompts of `tcb generate`: lines of JSON, each with its id and options."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tcb.cli.loading import Fault

# what a line asks for: one of these
_FORMS = ("prompt", "messages", "input_ids")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line of the input.

    id        as given, else `line-<n>` counted from 1
    content   a text, messages of a chat, or token ids
    form      which of these: "prompt", "messages" or "input_ids"
    options   generation options of this prompt
    """

    id: str
    content: Any
    form: str
    options: dict[str, Any]


def read_lines(lines: Iterable[str], name: str) -> Iterator[Prompt]:
    """The prompts in lines of JSON, blank ones left out. Raises Fault naming the line."""
    seen: set[str] = set()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{name}, line {number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise Fault(f"{where}: {error}; accepted: one JSON object a line") from error
        prompt = _read(record, f"line-{number}", where)
        if prompt.id in seen:
            raise Fault(f"{where}: id is {prompt.id!r} again; accepted: an id of its own")
        seen.add(prompt.id)
        yield prompt


def _read(record: Any, default_id: str, where: str) -> Prompt:
    if not isinstance(record, dict):
        raise Fault(f"{where} is a {type(record).__name__}; accepted: one JSON object a line")
    forms = [form for form in _FORMS if form in record]
    if len(forms) != 1:
        found = " and ".join(forms) or "none"
        raise Fault(f"{where} has {found} of {', '.join(_FORMS)}; accepted: one of them")
    (form,) = forms
    kind = str if form == "prompt" else list
    if not isinstance(record[form], kind):
        found = type(record[form]).__name__
        raise Fault(f"{where}: {form} is a {found}; accepted: a {kind.__name__}")
    name = record.get("id", default_id)
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise Fault(f"{where}: id is {name!r}; accepted: strings and integers")
    options = record.get("options", {})
    if not isinstance(options, dict):
        raise Fault(f"{where}: options is {options!r}; accepted: an object")
    return Prompt(str(name), record[form], form, options)


def encode(prompt: Prompt, tokenizer: Any) -> list[int]:
    """The token ids of a prompt. Raises ValueError for what the tokenizer refuses."""
    if prompt.form == "input_ids":
        return prompt.content
    try:
        if prompt.form == "prompt":
            return tokenizer(prompt.content)["input_ids"]
        return tokenizer.apply_chat_template(
            prompt.content, add_generation_prompt=True, return_dict=True
        )["input_ids"]
    except Exception as error:
        raise ValueError(f"{prompt.form}: {type(error).__name__}: {error}") from error
