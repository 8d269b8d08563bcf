"""Every operation is one torch operator to whoever traces it, and does what the direct call does.

Torch operations and interpreted Triton kernels both.
"""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from tcb import kernels
from tcb.kernels.contract import WorkList
from tcb.kernels.dispatch import as_operators, is_traced
from tests.support.fitting import FITTING

OPERATIONS = [*FITTING, "list_work"]


@pytest.fixture(params=["torch", "triton"], autouse=True)
def form(request, monkeypatch, interpreter):
    """What runs: torch operations or kernels in Triton's interpreter."""
    if request.param == "torch":
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return request.param


@pytest.fixture
def filled_memory():
    """What is undefined behind the count of a list is the same at every call."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


class Seen(TorchDispatchMode):
    """Keeps the operators that a call dispatches, and their arguments."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **kwargs or {})


def arguments_of(operation):
    """A call that fits, with values of its own in every floating tensor."""
    if operation == "list_work":
        given = FITTING["paged_attention"]()
        return {name: given[name] for name in ("query", "value", "query_start", "context_len")}
    torch.manual_seed(1)
    given = FITTING[operation]()
    for value in given.values():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            value.uniform_(0.1, 1)
    return given


def tensors_in(value):
    """All tensors of arguments or results, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif isinstance(value, WorkList):
        # behind its count a list is undefined
        small, tiles = (item[:count] for item, count in (value.small(), value.tiles()))
        return [small, tiles, value.count]
    return [t for each in value for t in tensors_in(each)] if hasattr(value, "__iter__") else []


def operator_call(operation):
    """The operator that a call dispatches and its arguments."""
    (call,) = [call for call in calls_of(operation) if call[0].namespace == "tcb"]
    return call


def calls_of(operation):
    """All that a call dispatches."""
    given = arguments_of(operation)
    with Seen() as seen:
        getattr(kernels, operation)(**given)
    return seen.calls


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_mode_sees_one_operator_of_tensors_and_numbers(operation):
    func, args, kwargs = operator_call(operation)
    assert func.name() == f"tcb::{operation}"
    plain = torch.Tensor, int, float, bool, type(None)
    flat = [x for arg in args for x in (arg if isinstance(arg, (list, tuple)) else [arg])]
    assert {type(value) for value in flat if not isinstance(value, plain)} == set()
    assert kwargs == {}
    assert [call[0] for call in calls_of(operation)] == [func]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_opcheck(operation, filled_memory):
    func, args, kwargs = operator_call(operation)
    torch.library.opcheck(func, args, kwargs)


@pytest.mark.parametrize("operation", FITTING)
def test_the_operator_does_what_the_direct_call_does(operation):
    direct, through = arguments_of(operation), arguments_of(operation)
    expected = getattr(kernels, operation)(**direct)
    with as_operators():
        result = getattr(kernels, operation)(**through)
    torch.testing.assert_close(tensors_in(result), tensors_in(expected), rtol=0, atol=0)
    torch.testing.assert_close(tensors_in(through), tensors_in(direct), rtol=0, atol=0)


@pytest.mark.parametrize("operation", ["paged_attention", "paged_decode", "page_tables"])
def test_what_the_caller_leaves_out_is_made(operation):
    results = []
    for traced in (False, True):
        given = arguments_of(operation)
        for name in ("out", "slot", "block_tables"):
            given.pop(name, None)
        with Seen() if traced else torch.no_grad():
            results.append(tensors_in(getattr(kernels, operation)(**given)))
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_a_list_made_by_an_operator_serves_direct_calls_and_operators(form):
    given = arguments_of("paged_attention")
    expected = kernels.paged_attention(**given).clone()
    with as_operators():
        work = kernels.list_work(**arguments_of("list_work"))
    for traced in (False, True):
        given["out"].fill_(7)
        with as_operators() if traced else torch.no_grad():
            found = kernels.paged_attention(**given, work_list=work)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    if form == "triton":
        other = {name: arguments_of("list_work")[name] for name in ("query", "value")}
        lengths = torch.zeros(301, dtype=torch.int32), torch.zeros(300, dtype=torch.int32)
        with as_operators():
            work = kernels.list_work(**other, query_start=lengths[0], context_len=lengths[1])
        with pytest.raises(ValueError, match=r"^work_list: expected one for .* got one for 384 "):
            kernels.paged_attention(**given, work_list=work)


@pytest.mark.parametrize("operation", FITTING)
def test_an_operator_refuses_what_does_not_fit(operation):
    given = arguments_of(operation)
    name = next(name for name, value in given.items() if isinstance(value, torch.Tensor))
    given[name] = given[name].reshape(-1)[0]
    with as_operators(), pytest.raises(ValueError, match="expected shape"):
        getattr(kernels, operation)(**given)


def test_a_trace_is_replayed_with_other_contents():
    def step(key, value, cache, slot, query, table, length):
        kernels.write_kv(key, value, cache, cache, slot)
        return kernels.paged_decode(query, cache, cache, table, length)

    def inputs(seed):
        generator = torch.Generator().manual_seed(seed)
        key, value, query = torch.randn(3, 2, 1, 8, generator=generator)
        slots = torch.randperm(12, generator=generator)[:2]
        table = (slots // 4)[:, None].int()
        return key, value, torch.zeros(3, 4, 1, 8), slots, query, table, (slots % 4 + 1).int()

    graph = make_fx(step)(*inputs(0))
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert [name for name in names if name.startswith("tcb")] == [
        "tcb.write_kv.default",
        "tcb.paged_decode.default",
    ]
    for seed in (1, 2):
        torch.testing.assert_close(graph(*inputs(seed)), step(*inputs(seed)), rtol=0, atol=0)


@pytest.mark.parametrize("operation", FITTING)
def test_compiled_code_has_no_break_and_the_same_results(operation):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    call = getattr(kernels, operation)
    direct, through = arguments_of(operation), arguments_of(operation)
    expected = call(**direct)
    torch.compiler.reset()
    result = torch.compile(call, fullgraph=True, backend=backend)(**through)
    assert len(graphs) == 1
    torch.testing.assert_close(tensors_in(result), tensors_in(expected), rtol=0, atol=0)
    torch.testing.assert_close(tensors_in(through), tensors_in(direct), rtol=0, atol=0)


def test_nothing_is_traced_unless_somebody_looks():
    assert not is_traced()
    with as_operators():
        assert is_traced()
        with as_operators():
            pass
        assert is_traced()
    with Seen():
        assert is_traced()
    assert not is_traced()
