"""Tells whether a model is split over processes by transformers' tensor parallelism, and refuses
other ways of splitting.

Knows the model and its group of ranks; what the ranks agree on while they serve is
`tcb.device.ranks`.
"""

import os
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, distributed

# what a launcher such as torchrun sets
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# dimensions of a mesh over which nothing is served
_REFUSED = {
    "fsdp": "its weights are sharded (fully_shard)",
    "dp_replicate": "its weights are replicated for training (dp_replicate_size)",
    "pp": "its layers lie in several processes (pipeline parallelism)",
}
# projections whose output holds the heads of keys and values
_KV_LAYERS = ("k_proj", "v_proj")
_ACCEPTED = "accepted: a model whose weights are whole, or split by tensor parallelism alone"


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """The ranks that hold one model together.

    mesh    one dimension, of these ranks
    group   their process group, on the model's device
    rank    of this process among them; rank 0 takes requests in
    """

    mesh: Any
    group: Any
    rank: int
    size: int

    def all(self, flag: bool) -> bool:
        """Whether every rank says so; all of them have to ask."""
        answer = torch.tensor(int(flag), device=self.mesh.device_type)
        distributed.all_reduce(answer, distributed.ReduceOp.MIN, group=self.group)
        return bool(answer)

    def holds(self, tensor: Any) -> bool:
        """Whether a DTensor is split, or repeated, over these ranks and no others."""
        return tensor.device_mesh == self.mesh


def tensor_parallel(model: Any) -> TensorParallel | None:
    """The ranks over which a model was loaded; None if it is in this process alone.

    Raises ValueError for a model that is split in any other way, and where no process group was
    started, which names the variables that a launcher did not set.
    """
    mesh, name = getattr(model, "_device_mesh", None), type(model).__name__
    if mesh is None:
        return None
    names = mesh.mesh_dim_names
    for dimension, reason in _REFUSED.items():
        if dimension in (names or ()) and mesh[dimension].size() > 1:
            raise ValueError(f"{name} cannot be served: {reason}; {_ACCEPTED}")
    experts = getattr(getattr(model.config, "distributed_config", None), "ep_size", None) or 1
    if experts > 1:
        raise ValueError(
            f"{name} cannot be served: its experts lie in several processes (ep_size is {experts});"
            f" {_ACCEPTED}"
        )
    if names is not None:
        mesh = mesh["tp"] if "tp" in names else None
    if mesh is None or mesh.size() == 1:
        return None
    if not distributed.is_initialized():
        missing = [variable for variable in LAUNCHER if variable not in os.environ]
        raise ValueError(
            f"{name} is split over {mesh.size()} processes, but torch.distributed is not "
            f"initialized; not set by the launcher: {', '.join(missing) or 'none'}"
        )
    return TensorParallel(mesh, mesh.get_group(), mesh.get_local_rank(), mesh.size())


def check_heads(model: Any, parallel: TensorParallel) -> None:
    """Raise ValueError, with transformers' words, for key and value heads that do not divide."""
    plan = getattr(model, "tp_plan", None) or {}
    if not all(any(key.endswith(f"self_attn.{name}") for key in plan) for name in _KV_LAYERS):
        return
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if heads % parallel.size:
        raise ValueError(
            f"Number of key value heads {heads} must be divisible by tensor parallel size "
            f"{parallel.size}."
        )


def is_sharded(tensor: Tensor) -> bool:
    """Whether processes share it; told by the name, as loading the class costs a start-up."""
    return type(tensor).__name__ == "DTensor"


def local_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor: all of it, unless it is sharded."""
    return cast(Any, tensor).to_local() if is_sharded(tensor) else tensor
