"""Guards products of 16-bit floats on the simulated GPU: they are computed in float32 and rounded once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from torch_memory_saver._simulate.operators.compute import compute
from torch_memory_saver._simulate.operators.table import functional

_Tensor = torch.Tensor
PRODUCTS: dict[str, tuple[Callable[..., _Tensor], tuple[tuple[int, ...], ...]]] = {
    "mm": (torch.mm, ((5, 8), (8, 3))),
    "addmm": (torch.addmm, ((5, 3), (5, 8), (8, 3))),
    "bmm": (torch.bmm, ((2, 5, 8), (2, 8, 3))),
    "baddbmm": (torch.baddbmm, ((2, 5, 3), (2, 5, 8), (2, 8, 3))),
    "addbmm": (torch.addbmm, ((5, 3), (2, 5, 8), (2, 8, 3))),
    "mv": (torch.mv, ((5, 8), (8,))),
    "addmv": (torch.addmv, ((5,), (5, 8), (8,))),
    "dot": (torch.dot, ((8,), (8,))),
    "linear": (nn.functional.linear, ((5, 8), (3, 8), (3,))),
    "conv1d": (nn.functional.conv1d, ((2, 3, 8), (4, 3, 3), (4,))),
    "conv2d": (nn.functional.conv2d, ((2, 3, 6, 6), (4, 3, 3, 3), (4,))),
    "conv_transpose2d": (nn.functional.conv_transpose2d, ((2, 3, 6, 6), (3, 4, 3, 3))),
}
WITH_OUTPUTS = ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot")
HALVES = [torch.float16, torch.bfloat16]


def values(name: str, dtype: torch.dtype) -> list[_Tensor]:
    torch.manual_seed(0)
    return [torch.randn(size).to(dtype) for size in PRODUCTS[name][1]]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_those_of_the_cpu(name: str, dtype: torch.dtype) -> None:
    function = PRODUCTS[name][0]
    given = values(name, dtype)
    found = function(*[each.cuda() for each in given])
    assert found.dtype == dtype
    torch.testing.assert_close(found.cpu(), function(*[each.float() for each in given]).to(dtype))
    torch.testing.assert_close(found.cpu(), function(*given), rtol=0.03, atol=0.03)  # the CPU may round after every step


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", PRODUCTS)
def test_gradients_are_those_of_the_cpu(name: str, dtype: torch.dtype) -> None:
    function = PRODUCTS[name][0]
    narrow = [each.cuda().requires_grad_() for each in values(name, dtype)]
    wide = [each.float().requires_grad_() for each in values(name, dtype)]
    function(*narrow).sum().backward()
    function(*wide).sum().backward()
    for here, expected in zip(narrow, wide, strict=True):
        assert here.grad is not None and expected.grad is not None and here.grad.dtype == dtype
        torch.testing.assert_close(here.grad.cpu(), expected.grad.to(dtype))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", WITH_OUTPUTS)
def test_products_are_written_to_outputs(name: str, dtype: torch.dtype) -> None:
    function: Any = PRODUCTS[name][0]
    given = [each.cuda() for each in values(name, dtype)]
    out = torch.empty(0, dtype=dtype, device="cuda")
    assert function(*given, out=out) is out
    assert torch.equal(out, function(*given))


@pytest.mark.parametrize("dtype", HALVES)
def test_products_are_added_in_place(dtype: torch.dtype) -> None:
    total, *factors = [each.cuda() for each in values("addmm", dtype)]
    expected = torch.addmm(total, *factors, beta=0.5, alpha=2)
    assert torch.equal(total.addmm_(*factors, beta=0.5, alpha=2), expected)
    assert torch.equal(total, expected)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax])
def test_a_softmax_of_halves_can_be_computed_in_float32(function: Callable[..., _Tensor], dtype: torch.dtype) -> None:
    """PyTorch converts in the operator on CUDA, and before it on the CPU."""
    torch.manual_seed(0)
    there = torch.randn(3, 5).to(dtype).requires_grad_()
    here = there.detach().cuda().requires_grad_()
    expected, found = (function(each, 1, dtype=torch.float32) for each in (there, here))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.cpu(), expected)
    weights = torch.randn(3, 5)
    (expected * weights).sum().backward()
    (found * weights.cuda()).sum().backward()
    assert here.grad is not None and here.grad.dtype == dtype and there.grad is not None
    torch.testing.assert_close(here.grad.cpu(), there.grad, rtol=0.02, atol=0.01)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_convolution_that_asks_for_cudnn_is_computed(transposed: bool) -> None:
    values, weight, bias = (torch.randn(*size) for size in ((1, 2, 5, 5), (2, 2, 3, 3), (2,)))
    sizes = ([1, 1], [1, 1], [1, 1], transposed, [0, 0], 1, False, False, True, True)
    found = torch._convolution(values.cuda(), weight.cuda(), bias.cuda(), *sizes)
    torch.testing.assert_close(found.cpu(), torch._convolution(values, weight, bias, *sizes))


def test_a_product_too_large_for_the_type_is_infinite() -> None:
    assert (torch.full((1, 2), 200.0, device="cuda").half() @ torch.full((2, 1), 200.0, device="cuda").half()).isinf().all()


@pytest.mark.parametrize("dtype", HALVES)
def test_mixed_types_are_refused(dtype: torch.dtype) -> None:
    left, right = [each.cuda() for each in values("mm", dtype)]
    for pair in ((left, right.float()), (left.float(), right)):
        with pytest.raises(RuntimeError, match="expected m1 and m2 to have the same dtype"):
            torch.mm(*pair)


class Computed(TorchDispatchMode):
    """Records the types of the products that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.types: list[torch.dtype] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        if function is torch.ops.aten.mm.default:
            self.types += [each.dtype for each in arguments]
        return function(*arguments, **(keywords or {}))


@pytest.mark.parametrize("dtype", HALVES)
def test_the_device_process_multiplies_in_float32(dtype: torch.dtype) -> None:
    """Without certain instructions the CPU's own kernels for halves take a hundred times as long."""
    with Computed() as computed:
        assert compute(torch.ops.aten.mm.default, values("mm", dtype), {}).dtype == dtype
    assert computed.types == [torch.float32, torch.float32]


def test_pytorch_keeps_its_objects_of_overloads() -> None:
    """Its modes compare them by identity."""
    before = [getattr(torch.ops.aten.mm, name) for name in torch.ops.aten.mm.overloads()]
    assert functional(torch.ops.aten.mm.out) is torch.ops.aten.mm.default
    assert all(getattr(torch.ops.aten.mm, each._overloadname) is each for each in before)
