"""`torch.compile(fullgraph=True)` passes through the attention of every family, without a break.

Each run of the tests traces two families, `make deep` all. A family whose own code breaks the graph
is listed with the reason.
"""

import pytest
import torch

import tcb.device.runner as runner
from tcb.device.attention import PagedBatch
from tcb.model.attention_hook import call_model
from tcb.planning.request import Request
from tests.support.families import FAMILIES
from tests.support.more_families import MORE_FAMILIES
from tests.support.reference import new_engine, prompts_of

# windows and full layers; experts and sinks
SAMPLE = ("gemma3", "gpt_oss")
# family: why its own code breaks the graph. None does.
BREAKS: dict[str, str] = {}
TRACED = {**FAMILIES, **MORE_FAMILIES}


def mixed_batch(model, monkeypatch):
    """The arguments of `call_model` for a batch of decodes and chunks, and what it returned."""
    calls = []

    def record(*args, **options):
        calls.append((args, options, call_model(*args, **options)))
        return calls[-1][-1]

    monkeypatch.setattr(runner, "call_model", record)
    engine = new_engine(model, page_size=4, num_blocks=64, max_batch_tokens=24)
    for name, prompt in zip("abc", prompts_of([18, 15, 7], seed=4), strict=True):
        engine.submit(Request(name, tuple(prompt), 4))
    for _ in range(2):
        engine.step()
    return calls[-1]


def traced(args, options):
    """Logits of the same batch out of compiled code, its keys and values stored once more; and the
    number of graphs.
    """
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    *others, batch = args
    again = PagedBatch(batch._layers, batch._batch, batch._deterministic)
    compiled = torch.compile(call_model, fullgraph=True, backend=backend, dynamic=True)
    return compiled(*others, again, **options), graphs


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name in SAMPLE else pytest.mark.deep)
        for name in TRACED
        if name not in BREAKS
    ],
)
def test_no_break_and_the_same_logits(family, monkeypatch):
    args, options, expected = mixed_batch(TRACED[family](), monkeypatch)
    *_, batch = args
    decodes = len(batch._batch.decode_end)
    assert 0 < decodes < len(batch._batch.block_table[0])
    logits, graphs = traced(args, options)
    torch.testing.assert_close(logits, expected, rtol=0, atol=0)
    assert len(graphs) == 1
    names = [str(node.target) for node in graphs[0].graph.nodes]
    layers, groups = len(batch._layers), len({layer.group for layer in batch._layers})
    for operator, count in (("list_work", groups), ("paged_decode", layers)):
        assert names.count(f"tcb.{operator}.default") == count, names
    assert names.count("tcb.write_kv.default") == names.count("tcb.paged_attention.default")


def test_a_break_is_seen(monkeypatch):
    args, options, _ = mixed_batch(FAMILIES["llama"](), monkeypatch)
    attend = PagedBatch.attend

    def reads_a_value(batch, layer, query, *others):
        assert query.sum().item() < 1e9
        return attend(batch, layer, query, *others)

    monkeypatch.setattr(PagedBatch, "attend", reads_a_value)
    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        traced(args, options)


def test_thirty_families_are_traced():
    assert len(TRACED.keys() - BREAKS.keys()) >= 30
