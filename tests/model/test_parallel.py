"""Which ways of splitting a model over processes are served; the others are refused by name."""

from types import SimpleNamespace

import pytest

from tcb.model.parallel import tensor_parallel


class Mesh:
    """A mesh of named dimensions, without processes."""

    def __init__(self, **sizes):
        self.sizes, self.mesh_dim_names = sizes, tuple(sizes)

    def __getitem__(self, name):
        return Mesh(**{name: self.sizes[name]})

    def size(self):
        return next(iter(self.sizes.values()))


def model_on(mesh, **distributed_config):
    config = SimpleNamespace(distributed_config=SimpleNamespace(**distributed_config))
    return SimpleNamespace(_device_mesh=mesh, config=config)


def test_a_model_of_one_process_has_no_ranks():
    assert tensor_parallel(SimpleNamespace()) is None
    assert tensor_parallel(model_on(None)) is None
    assert tensor_parallel(model_on(Mesh(pp=1, fsdp=1, tp=1))) is None


@pytest.mark.parametrize(
    ("mesh", "config", "reason"),
    [
        (Mesh(pp=1, fsdp=2, tp=1), {}, "its weights are sharded (fully_shard)"),
        (Mesh(pp=1, fsdp=2, tp=2), {}, "its weights are sharded (fully_shard)"),
        (Mesh(pp=2, fsdp=1, tp=1), {}, "its layers lie in several processes"),
        (
            Mesh(dp_replicate=2, tp=1),
            {},
            "its weights are replicated for training (dp_replicate_size)",
        ),
        (Mesh(pp=1, fsdp=1, tp=2), {"ep_size": 2}, "its experts lie in several processes (ep_size"),
    ],
)
def test_other_ways_are_refused_by_name(mesh, config, reason):
    with pytest.raises(ValueError) as refusal:
        tensor_parallel(model_on(mesh, **config))
    assert f"SimpleNamespace cannot be served: {reason}" in str(refusal.value)
    assert "accepted: a model whose weights are whole, or split by" in str(refusal.value)
