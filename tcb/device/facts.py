"""Reads what `planning.limits.resolve` wants to know of the machine and the model.

Measures and reads only; decides no size.
"""

import logging
from collections.abc import Sequence

import psutil
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tcb.kernels.dispatch import use_triton
from tcb.model.probe import ModelLayers
from tcb.options.generation import GenerationOptions
from tcb.planning.groups import LayerGroup
from tcb.planning.limits import Facts, WorkloadHints

logger = logging.getLogger("ContinuousBatchingLogger")


def read_facts(
    model: PreTrainedModel,
    layers: ModelLayers,
    groups: Sequence[LayerGroup],
    options: GenerationOptions,
    hints: WorkloadHints,
) -> Facts:
    """The facts of this model on its device, now. Bytes are those free or unused by torch at this
    moment.
    """
    config = model.config.get_text_config(decoder=True)
    hidden_size = config.hidden_size
    experts = getattr(config, "num_experts_per_tok", None) or 1
    width = getattr(config, "intermediate_size", None) or 4 * hidden_size
    width = max(width) if isinstance(width, list | tuple) else width
    expert_width = getattr(config, "moe_intermediate_size", None) or width
    host_memory = psutil.virtual_memory().available
    return Facts(
        device_type=layers.device.type,
        free_memory=free_memory(layers.device),
        host_memory=host_memory,
        element_size=layers.dtype.itemsize,
        groups=tuple(groups),
        hidden_size=hidden_size,
        vocab_size=layers.vocab_size,
        intermediate_size=max(width, experts * expert_width),
        max_positions=layers.max_positions,
        keeps_logits=layers.keeps_logits,
        samples=options.sampling.do_sample or options.needs_history,
        needs_history=options.needs_history,
        hints=hints,
    )


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on this device: what the system has left, and what torch
    holds without use.
    """
    if device.type == "cpu":
        return psutil.virtual_memory().available
    module = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return psutil.virtual_memory().available
    free, _ = module.mem_get_info(device)
    return free + module.memory_reserved(device) - module.memory_allocated(device)


def can_be_deterministic(pool: Tensor) -> bool:
    """Whether the kernels, not torch operations, attend to what is in this pool; a no is logged."""
    if use_triton(pool):
        return True
    logger.warning(
        "deterministic has no effect: torch operations attend on a CPU, and their bits may depend "
        "on the batch"
    )
    return False
