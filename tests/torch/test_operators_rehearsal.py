"""Guards that an operator's refusal comes at the call, in its own words, and the device stays usable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype, device="cuda")


HALF, WHOLE, BOOL = torch.float16, torch.int64, torch.bool
#: Label -> the call, the type of its error, and a part of the message.
CALLS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "matmul of types": (lambda: ones(2, 2) @ ones(2, 2, dtype=HALF), RuntimeError, "same dtype"),
    "large matmul of types": (lambda: ones(600, 600) @ ones(600, 600, dtype=HALF), RuntimeError, "same dtype"),
    "linear of types": (lambda: functional.linear(ones(2, 2), ones(2, 2, dtype=HALF)), RuntimeError, "same dtype"),
    "conv of types": (
        lambda: functional.conv1d(ones(1, 2, 4), ones(1, 2, 2, dtype=HALF)),
        RuntimeError,
        "type .*FloatTensor. and weight",
    ),
    "layer_norm of types": (
        lambda: functional.layer_norm(ones(2, 4, dtype=HALF), (4,), ones(4), ones(4)),
        RuntimeError,
        "expected scalar type Half but found Float",
    ),
    "targets of a type": (lambda: functional.nll_loss(ones(2, 2), ones(2, dtype=torch.int32)), RuntimeError, "Int"),
    "a dimension": (lambda: ones(3, 4).softmax(-3), IndexError, "Dimension out of range"),
    "a dimension of many elements": (lambda: ones(300, 400).cumsum(2), IndexError, "Dimension out of range"),
    "topk of too many": (lambda: ones(3, 4).topk(5), RuntimeError, "out of range"),
    "std of integers": (lambda: ones(3, dtype=WHOLE).std(), RuntimeError, "floating point"),
    "argmax of nothing": (lambda: ones(0).argmax(), IndexError, "Expected reduction dim"),
    "index_add of types": (
        lambda: ones(3).index_add(0, torch.zeros(1, dtype=WHOLE, device="cuda"), ones(1, dtype=HALF)),
        RuntimeError,
        "same dtype|scalar type",
    ),
    "a copy of another shape": (lambda: ones(4).copy_(ones(3)), RuntimeError, "must match|expand"),
    "softmax of booleans": (lambda: ones(3, dtype=BOOL).softmax(0), RuntimeError, "softmax"),
    "types in a list": (lambda: torch._foreach_norm([ones(2, dtype=WHOLE)]), RuntimeError, "float"),
}


@pytest.mark.parametrize("label", CALLS)
def test_refused_at_every_call(label: str) -> None:
    call, kind, message = CALLS[label]
    for _ in range(2):
        with pytest.raises(kind, match=message):
            call()
        torch.cuda.synchronize()
    assert (ones(2) + 1).tolist() == [2.0, 2.0]


def test_refused_in_a_capture() -> None:
    matrix, half = ones(2, 2), ones(2, 2, dtype=HALF)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="same dtype"), torch.cuda.graph(graph):
        matrix @ half


def test_overlaps_are_refused() -> None:
    matrix, places = ones(2, 2), torch.zeros(2, dtype=WHOLE, device="cuda")
    for call in (
        lambda: matrix.index_put_((places,), matrix[0]),
        lambda: matrix.scatter_(0, places[None], matrix),
        lambda: matrix.index_add_(0, places, matrix),
    ):
        with pytest.raises(RuntimeError, match="single memory location"):
            call()
    assert matrix.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_calls_that_only_stand_ins_refuse_are_accepted() -> None:
    """Zeros are invalid lengths of sequences, and the program's are valid. The first call finds that out, the second knows
    it."""
    lengths = torch.tensor([3, 2], device="cuda")
    for _ in range(2):
        values = torch.segment_reduce(ones(5), "sum", lengths=lengths)
        assert values.tolist() == [3.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_results_have_their_types_where_stand_ins_were_refused(dtype: torch.dtype) -> None:
    """The rehearsal of a large call has shorter weights, which the operator refuses. The device computes in float32."""
    values, weights = ones(300, 256, dtype=dtype), ones(256, dtype=dtype)
    for _ in range(2):
        normal, mean, scale = torch.native_layer_norm(values, (256,), weights, weights, 1e-5)
        assert (normal.dtype, mean.dtype, scale.dtype) == (dtype, torch.float32, torch.float32)
        assert bool((normal == 1).all())


def test_stand_ins_of_other_shapes_refuse_nothing_in_a_capture() -> None:
    values, weights = ones(300, 192), ones(192)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        normal = functional.layer_norm(values, (192,), weights, weights)
    graph.replay()
    assert bool((normal == 1).all())


def test_the_state_of_the_hosts_generator_stays() -> None:
    before = torch.get_rng_state()
    functional.dropout(ones(8), 0.5, True)
    torch.randn(8, device="cuda")
    ones(8).multinomial(2)
    assert torch.equal(before, torch.get_rng_state())


def test_what_depends_on_values_is_captured() -> None:
    """Stand-ins are zeros: no lengths, and a failed assertion. The operators of a graph see the values at each replay."""
    holds, values = ones(1, dtype=BOOL), ones(5)
    lengths = torch.tensor([4, 1], device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch._assert_async(holds)
        sums = torch.segment_reduce(values, "sum", lengths=lengths)
    graph.replay()
    assert sums.tolist() == [4.0, 1.0]


def test_what_an_operator_without_results_returns_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_memory_saver._simulate.operators import results

    computed: list[str] = []
    compute = results._compute

    def count(operator: Any, *arguments: Any) -> Any:
        computed.append(operator.name())
        return compute(operator, *arguments)

    holds = ones(1, dtype=BOOL)
    results.clear()
    monkeypatch.setattr(results, "_compute", count)
    for _ in range(3):
        torch._assert_async(holds)
    torch.cuda.synchronize()
    assert computed == ["aten::_assert_async"]
