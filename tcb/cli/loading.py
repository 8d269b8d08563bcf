"""Loads the model and tokenizer that a command names, and reads the settings given with it."""

import argparse
import ast
from typing import Any

from tcb.planning.config import ContinuousBatchingConfig, check


class Fault(Exception):
    """What a user has to change, in a line."""


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that every command takes."""
    parser.add_argument(
        "model", metavar="MODEL", help="a folder, or a name of the Hugging Face Hub"
    )
    parser.add_argument("--revision", help="a branch, tag or commit of the Hub")
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", "float32", "float16", "bfloat16"],
        help="of weights, keys and values (default: as stored)",
    )
    parser.add_argument("--device", help="cpu, cuda, cuda:1, xpu (default: an accelerator if any)")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run code that comes with the model"
    )
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a field of ContinuousBatchingConfig, such as page_size=16; again for more",
    )


def load_model(given: argparse.Namespace) -> Any:
    """The model that the command line names, on its device, ready to generate. Raises Fault."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        device = torch.device(given.device or _best_device())
        model: Any = AutoModelForCausalLM.from_pretrained(
            given.model, dtype=given.dtype, **_source(given)
        )
        return model.to(device).eval()
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise Fault(f"{given.model}: {error}") from error


def load_tokenizer(given: argparse.Namespace) -> Any:
    """The tokenizer of the model. Raises Fault."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(given.model, **_source(given))
    except (OSError, ValueError, ImportError) as error:
        raise Fault(f"{given.model}: {error}") from error


def read_settings(given: argparse.Namespace) -> ContinuousBatchingConfig:
    """The settings that `--set` names. Raises Fault naming one that there is not, or its value."""
    settings = {}
    for text in given.settings:
        name, equals, value = text.partition("=")
        if not equals:
            raise Fault(f"--set {text}: accepted: NAME=VALUE")
        settings[name] = _value(value)
    try:
        config = ContinuousBatchingConfig.read(settings)
        check(config)
    except (TypeError, ValueError) as error:
        raise Fault(f"--set: {error}") from error
    return config


def _source(given: argparse.Namespace) -> dict[str, Any]:
    return {"revision": given.revision or "main", "trust_remote_code": given.trust_remote_code}


def _best_device() -> str:
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None or accelerator.type == "mps" else accelerator.type


def _value(text: str) -> Any:
    """A Python literal, or the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
