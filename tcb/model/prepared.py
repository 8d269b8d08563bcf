"""Keeps on each model what is needed to call it, from one engine to the next.

A twin and a probe cost tens of milliseconds, and depend on the model alone. On a CPU copies of
weights in a faster layout may belong to a twin (`tcb.model.linear`). All are kept as a
private attribute of the model, and go with it: a table of all models would hold them for ever
where a hook refers back to its model.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from tcb.model.linear import drop_copies, use_fast_products
from tcb.model.parallel import check_heads, tensor_parallel
from tcb.model.probe import ModelLayers, probe
from tcb.model.structure import Structure, reads_elsewhere, structure
from tcb.model.twin import COPIED, PREPARED, plain_model, twin
from tcb.model.weights import Fingerprint, fingerprint


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A model, ready to be called on packed batches.

    twin       what is called; engines of one model share it, so nobody changes it any more
    layers     how it attends
    structure, weights   what the model was made of, and what its weights looked like
    reads_elsewhere      code of others takes part, which may read what is looked at by nobody
    """

    twin: PreTrainedModel
    layers: ModelLayers
    structure: Structure
    weights: Fingerprint
    reads_elsewhere: bool

    def __reduce__(self) -> tuple[Any, ...]:
        # a copied or stored model is prepared anew
        return type(None), ()


def prepare(model: nn.Module) -> Prepared:
    """The twin of `model` and how it attends: the same object as long as nothing about the model
    changed, weights included; else a new one. Writes one private attribute of the model. All ranks
    of a tensor-parallel model call it together.

    model   wrapped or not: what `plain_model` finds in it counts

    Raises what `plain_model` raises, and ValueError if the model cannot be served. What was kept
    holds modules and weights that the model has dropped since, until the next call.
    """
    model = plain_model(model)
    kept, weights = model.__dict__.get(PREPARED), fingerprint(model)
    is_current = (
        kept is not None and kept.structure.matches(model) and kept.weights.matches(weights)
    )
    if (parallel := tensor_parallel(model)) is not None:
        check_heads(model, parallel)
        # a probe runs the model, which takes all ranks
        is_current = parallel.all(is_current)
    if kept is not None and is_current:
        return kept
    model.__dict__.pop(PREPARED, None)
    if kept is not None:
        # an engine may still hold the old twin: its copies make room for the new ones
        drop_copies(kept.twin)
    with torch.inference_mode(False):
        clone = twin(model)
    use_fast_products(clone)
    made_of = structure(model, clone.__dict__[COPIED])
    prepared = Prepared(clone, probe(model, clone), made_of, weights, reads_elsewhere(model))
    model.__dict__[PREPARED] = prepared
    return prepared


def forget(model: nn.Module) -> None:
    """Let the next `prepare` find a changed model, whatever it sees."""
    plain_model(model).__dict__.pop(PREPARED, None)
