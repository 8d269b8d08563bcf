"""Models whose weights are sharded over processes are refused by name before anything starts."""

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tcb.model.prepared import prepare
from tests.support.families import FAMILIES


@pytest.fixture
def mesh(tmp_path):
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def shard_all(model, mesh):
    fully_shard(model, mesh=mesh)


def shard_a_layer(model, mesh):
    fully_shard(model.model.layers[0], mesh=mesh)


def split_a_layer(model, mesh):
    parallelize_module(model.model.layers[0].mlp, mesh, {"up_proj": ColwiseParallel()})


@pytest.mark.parametrize("shard", [shard_all, shard_a_layer, split_a_layer])
def test_a_sharded_model_is_refused_by_name(mesh, shard):
    model = FAMILIES["llama"]()
    ids = torch.tensor([[1, 2, 3]])
    shard(model, mesh)
    with pytest.raises(ValueError, match="cannot be served: its weights are sharded"):
        prepare(model)
    assert model(ids).logits.isfinite().all()
