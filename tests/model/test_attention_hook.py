"""Greedy tokens of packed, chunked, mixed batches equal `generate` alone, for every family.

The batch object here is the plainest one: it keeps every sequence's keys and values and attends in
torch, one sequence at a time.
"""

import pytest
import torch
from torch import Tensor

from tcb.model.attention_hook import ATTENTION, call_model, register
from tcb.model.probe import ModelLayers, probe
from tcb.model.twin import twin
from tests.support.families import FAMILIES, SIZES, VOCAB, build

LENGTHS = (5, 23, 40, 12)
NEW_TOKENS = 14
CHUNK = 9
BUDGET = 20


class PlainBatch:
    """Keys and values of all sequences, and the share that each has in the current batch."""

    def __init__(self, facts: ModelLayers, windows: tuple[int | None, ...], softcaps, use_sinks):
        self.facts = facts
        self.windows = windows
        self.softcaps = softcaps
        self.use_sinks = use_sinks
        self.history: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.share: list[tuple[int, int]] = []

    def attend(self, layer, query, key, value, sinks):
        outputs, start = [], 0
        for sequence, count in self.share:
            rows = slice(start, start + count)
            start += count
            past = self.history.get((layer, sequence))
            keys = key[rows] if past is None else torch.cat([past[0], key[rows]])
            values = value[rows] if past is None else torch.cat([past[1], value[rows]])
            self.history[layer, sequence] = (keys, values)
            outputs.append(self._attend_one(layer, query[rows], keys, values, sinks))
        return torch.cat(outputs)

    def _attend_one(self, layer, query, keys, values, sinks):
        repeat = query.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(repeat, 1), values.repeat_interleave(repeat, 1)
        scores = torch.einsum("qhd,khd->hqk", query, keys) * self.facts.scales[layer]
        if self.softcaps[layer] is not None:
            scores = self.softcaps[layer] * torch.tanh(scores / self.softcaps[layer])
        end = keys.shape[0]
        at = torch.arange(end - query.shape[0], end)[:, None]
        other = torch.arange(end)[None]
        visible = other <= at
        if self.windows[layer] is not None:
            visible &= other > at - self.windows[layer]
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None and self.use_sinks:
            extra = sinks[:, None, None].expand(-1, query.shape[0], 1)
            scores = torch.cat([scores, extra], dim=-1)
        weights = scores.softmax(-1)[..., :end]
        return torch.einsum("hqk,khd->qhd", weights, values)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]


def serve(clone, batch: PlainBatch, requests: list[list[int]]) -> list[list[int]]:
    """Decode what can decode, and fill the rest of each batch with chunks of the prompts."""
    tokens = [list(request) for request in requests]
    computed = [0] * len(tokens)
    ends = [len(request) + NEW_TOKENS for request in requests]
    while any(len(row) < end for row, end in zip(tokens, ends, strict=True)):
        ids, positions, sampled, batch.share, left = [], [], [], [], BUDGET
        for i in sorted(range(len(tokens)), key=lambda i: len(tokens[i]) - computed[i]):
            count = min(len(tokens[i]) - computed[i], CHUNK, left)
            if count == 0 or len(tokens[i]) == ends[i]:
                continue
            left -= count
            batch.share.append((i, count))
            ids += tokens[i][computed[i] : computed[i] + count]
            positions += range(computed[i], computed[i] + count)
            computed[i] += count
            if computed[i] == len(tokens[i]):
                sampled.append((i, len(ids) - 1))
        logits = call_model(
            clone,
            torch.tensor(ids),
            torch.tensor(positions),
            torch.tensor([index for _, index in sampled], dtype=torch.int64),
            batch,
            keeps_logits=batch.facts.keeps_logits,
        )
        assert logits.shape == (len(sampled), VOCAB)
        for (i, _), token in zip(sampled, logits.argmax(-1).tolist(), strict=True):
            tokens[i].append(token)
    return [row[len(request) :] for row, request in zip(tokens, requests, strict=True)]


def generate_alone(model, requests: list[list[int]]) -> list[list[int]]:
    return [
        model.generate(
            torch.tensor([request]),
            attention_mask=torch.ones(1, len(request), dtype=torch.int64),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
        )[0, len(request) :].tolist()
        for request in requests
    ]


def run(model, *, windows=None, softcaps=None, use_sinks=True, without_keep=False):
    clone = twin(model)
    facts = probe(model, clone)
    batch = PlainBatch(
        facts,
        windows or tuple(layer.window for layer in facts.layers),
        softcaps or facts.softcaps,
        use_sinks,
    )
    return serve(clone, batch, prompts())


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_generate(family):
    model = FAMILIES[family]()
    assert run(model) == generate_alone(model, prompts())


def test_tokens_equal_generate_with_the_attention_that_transformers_chooses():
    """Before 5.24 that is sdpa for Gemma 2, which leaves the softcap out; `generate` is right."""
    chosen = {"attn_implementation": None, "attn_logit_softcapping": 4.0}
    model = build("Gemma2ForCausalLM", **SIZES, **chosen, tie_word_embeddings=False)
    assert run(model) == generate_alone(model, prompts())


@pytest.mark.parametrize(
    ("family", "ignored"),
    [
        ("mistral", {"windows": (None,) * 3}),
        ("gemma3", {"windows": (None,) * 3}),
        ("gemma2", {"softcaps": (None,) * 3}),
        ("gpt_oss", {"use_sinks": False}),
    ],
)
def test_what_a_layer_states_is_visible_in_the_tokens(family, ignored):
    """The comparison above would notice a window, a softcap or sinks that are not honoured."""
    model = FAMILIES[family]()
    assert run(model, **ignored) != generate_alone(model, prompts())


def test_all_logits_and_wanted_logits_agree():
    model = FAMILIES["llama"]()
    clone = twin(model)
    facts = probe(model, clone)
    results = []
    for keeps in (True, False):
        batch = PlainBatch(facts, (None,) * 3, facts.softcaps, True)
        batch.share = [(0, 5)]
        wanted = torch.tensor([3, 0, 4])
        ids, positions = torch.arange(5) + 2, torch.arange(5)
        results.append(call_model(clone, ids, positions, wanted, batch, keeps_logits=keeps))
    torch.testing.assert_close(*results)


def test_logits_record_no_gradients():
    model = FAMILIES["llama"]()
    clone = twin(model)
    facts = probe(model, clone)
    batch = PlainBatch(facts, (None,) * 3, facts.softcaps, True)
    batch.share = [(0, 1)]
    one = torch.zeros(1, dtype=torch.int64)
    assert not call_model(clone, one, one, one, batch).requires_grad
    assert torch.is_grad_enabled()


def test_attention_gets_views_of_the_models_tensors():
    seen = []

    class Looking(PlainBatch):
        def attend(self, layer, query, key, value, sinks):
            seen.append((query, key, value))
            return super().attend(layer, query, key, value, sinks)

    model = FAMILIES["llama"]()
    clone = twin(model)
    facts = probe(model, clone)
    batch = Looking(facts, (None,) * 3, facts.softcaps, True)
    batch.share = [(0, 4)]
    call_model(clone, torch.arange(4), torch.arange(4), torch.tensor([3]), batch)
    assert len(seen) == len(facts.layers)
    for query, key, value in seen:
        assert (query.shape, key.shape, value.shape) == ((4, 4, 8), (4, 2, 8), (4, 2, 8))
        assert all(tensor._base is not None for tensor in (query, key, value))


def test_a_twin_called_without_a_batch_says_so():
    model = FAMILIES["llama"]()
    clone = twin(model)
    with pytest.raises(RuntimeError, match="LlamaAttention was called without a batch"):
        clone(input_ids=torch.tensor([[3]]))


def test_no_mask_is_registered_for_our_attention():
    from transformers import AttentionMaskInterface

    register()
    assert ATTENTION not in AttentionMaskInterface()
