"""Say whether a model can be served and why not, and what serving it takes.

Reads how each layer attends, groups the layers, and works out from the memory of the device what
fits; computes no token. Exit code 0 if the model can be served, 1 if not.
"""

import argparse
import json
from collections.abc import Sequence
from typing import Any

from tcb.cli.loading import add_model_arguments, load_model, read_settings
from tcb.planning.config import ContinuousBatchingConfig, ignored_settings
from tcb.planning.groups import LayerGroup, block_elements
from tcb.planning.limits import WorkloadHints, resolve


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `tcb explain`."""
    add_model_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print a JSON object in place of text")


def run(given: argparse.Namespace) -> int:
    """Print what there is to say; 0 if the model can be served."""
    settings = read_settings(given)
    found = describe(load_model(given), settings)
    print(json.dumps(found, indent=2) if given.json else _as_text(given.model, found))
    return 0 if found["served"] else 1


def describe(model: Any, config: ContinuousBatchingConfig) -> dict[str, Any]:
    """What serving this model by this configuration takes; `served` False and the `reason` where it
    cannot be. Bytes are bytes, tokens are positions of one sequence.
    """
    from tcb.device.facts import read_facts
    from tcb.model.prepared import prepare
    from tcb.model.twin import plain_model
    from tcb.options.generation import read_options
    from tcb.planning.groups import group_layers

    try:
        model = plain_model(model)
        options = read_options(model)
        layers = prepare(model).layers
        groups = group_layers(layers.layers)
        facts = read_facts(model, layers, groups, options, WorkloadHints())
        limits = resolve(config, facts)
    except (ValueError, TypeError, MemoryError) as error:
        return {"served": False, "reason": str(error)}
    block = block_elements(groups, limits.page_size) * layers.dtype.itemsize
    return {
        "served": True,
        "device": str(layers.device),
        "dtype": str(layers.dtype).removeprefix("torch."),
        "groups": [_describe_group(group) for group in groups],
        "page_size": limits.page_size,
        "bytes_a_block": block,
        "num_blocks": limits.num_blocks,
        "bytes_of_cache": block * limits.num_blocks,
        "positions_of_the_model": getattr(
            model.config.get_text_config(decoder=True), "max_position_embeddings", None
        ),
        "tokens_of_one_sequence": limits.max_length,
        "max_batch_tokens": limits.max_batch_tokens,
        "max_requests": limits.max_requests,
        "batches_in_flight": limits.depth + 1,
        "shares_prefixes": limits.share_prefixes,
        "kernels": _kernels(layers.device),
        "without_effect": ignored_settings(),
    }


def _describe_group(group: LayerGroup) -> dict[str, Any]:
    return {
        "layers": list(group.layers),
        "attention": "full" if group.window is None else f"window of {group.window}",
        "kv_heads": group.kv_heads,
        "dim": group.dim,
        "value_dim": group.value_dim,
    }


def _kernels(device: Any) -> str:
    import torch

    from tcb.kernels.dispatch import use_triton

    return "Triton kernels" if use_triton(torch.empty(0, device=device)) else "torch operations"


def _as_text(name: str, found: dict[str, Any]) -> str:
    if not found["served"]:
        return f"{name} is not served: {found['reason']}"
    lines = [f"{name} is served: {found['dtype']} on {found['device']}, {found['kernels']}"]
    for group in found["groups"]:
        shape = f"{group['kv_heads']} x ({group['dim']} + {group['value_dim']})"
        count = len(group["layers"])
        lines.append(
            f"  {count} layers, {group['attention']}, keys and values {shape}: "
            f"{_ranges(group['layers'])}"
        )
    gib = found["bytes_of_cache"] / 2**30
    lines += [
        f"  a block: {found['page_size']} tokens of {len(found['groups'][0]['layers'])} layers, "
        f"{found['bytes_a_block']:,} bytes; {found['num_blocks']:,} blocks fit, {gib:.2f} GiB",
        f"  one sequence: at most {found['tokens_of_one_sequence']:,} tokens; a batch: at most "
        f"{found['max_batch_tokens']:,} tokens of {found['max_requests']:,} requests",
        f"  batches in flight: {found['batches_in_flight']}; prefixes are "
        f"{'' if found['shares_prefixes'] else 'not '}shared",
    ]
    if found["positions_of_the_model"]:
        lines.append(f"  the model was made for {found['positions_of_the_model']:,} positions")
    names_of: dict[str, list[str]] = {}
    for setting, reason in found["without_effect"].items():
        names_of.setdefault(reason, []).append(setting)
    lines += [f"  {reason}: {', '.join(names)}" for reason, names in names_of.items()]
    return "\n".join(lines)


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers, neighbours joined: "0-3, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)
