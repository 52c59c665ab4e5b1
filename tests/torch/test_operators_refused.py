"""Guards that the simulated GPU's operators refuse at the call what CUDA refuses, and accept what CUDA accepts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

ANOTHER_DEVICE = "[Ee]xpected .* to be on the same device"


def ones(*size: int) -> torch.Tensor:
    return torch.ones(*size, device="cuda")


#: In host memory, without dimensions.
ONE, NUMBER, TRUE = torch.tensor(1), torch.tensor(1.0), torch.tensor(True)

REFUSE_NUMBERS: dict[str, Callable[[], Any]] = {
    "gather": lambda: ones(3).gather(0, ONE),
    "index_select": lambda: ones(3).index_select(0, ONE),
    "index_select, out": lambda: torch.index_select(ones(3), 0, ONE, out=ones(1)),
    "index_add": lambda: ones(3).index_add(0, ONE, NUMBER),
    "index_fill": lambda: ones(3).index_fill(0, ONE, 1.0),
    "embedding": lambda: functional.embedding(ONE, ones(3, 3)),
    "scatter": lambda: ones(3).scatter(0, ONE, 1.0),
    "take": lambda: ones(3).take(ONE),
    "masked_fill": lambda: ones(3).masked_fill(TRUE, 1.0),
    "masked_select": lambda: ones(3).masked_select(TRUE),
    "searchsorted": lambda: torch.searchsorted(ones(3), NUMBER),
    "addmm": lambda: torch.addmm(NUMBER, ones(3, 3), ones(3, 3)),
    "nll_loss": lambda: functional.nll_loss(ones(3), ONE),
    "clamp": lambda: torch.clamp(ones(3), NUMBER),
    "logaddexp": lambda: torch.logaddexp(ones(3), NUMBER),
}
TAKE_NUMBERS: dict[str, Callable[[], torch.Tensor]] = {
    "add": lambda: ones(3) + NUMBER,
    "pow": lambda: torch.pow(NUMBER, ones(3)),
    "where": lambda: torch.where(ones(3) > 0, ones(3), NUMBER),
    "addcmul": lambda: torch.addcmul(ones(3), ones(3), NUMBER, value=0),
    "index": lambda: ones(3)[ONE],
    "index_put": lambda: ones(3).index_put((ONE,), NUMBER),
    "index_fill": lambda: ones(3).index_fill(0, ONE.cuda(), NUMBER),
    "masked_fill": lambda: ones(3).masked_fill(TRUE.cuda(), NUMBER),
}


@pytest.mark.parametrize("name", REFUSE_NUMBERS)
def test_numbers_of_the_host_are_refused(name: str) -> None:
    with pytest.raises(RuntimeError, match=ANOTHER_DEVICE):
        REFUSE_NUMBERS[name]()
    torch.cuda.synchronize()


@pytest.mark.parametrize("name", TAKE_NUMBERS)
def test_numbers_of_the_host_are_taken(name: str) -> None:
    found = TAKE_NUMBERS[name]()
    assert found.is_cuda and found.cpu().min() >= 1


LACKS_TYPES: dict[str, Callable[[], Any]] = {
    "aten::avg_pool3d of complex64": lambda: functional.avg_pool3d(ones(1, 1, 4, 4, 4).to(torch.complex64), 2),
    "aten::linalg_inv_ex.inverse of bool": lambda: torch.linalg.inv_ex(torch.eye(3, device="cuda").bool()),
    "aten::gather of complex32": lambda: ones(3).to(torch.complex32).gather(0, ONE.cuda()[None]),
    "aten::sort.stable of float8_e5m2": lambda: ones(3).to(torch.float8_e5m2).sort(),
    "aten::arange.start_out of complex64": lambda: torch.arange(3, dtype=torch.complex64, device="cuda"),
}


@pytest.mark.parametrize("name", LACKS_TYPES)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_types_that_the_cpu_lacks_are_refused(name: str) -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            LACKS_TYPES[name]()
        assert name in str(caught.value) or "inv_ex" in name  # PyTorch may refuse it first
    torch.cuda.synchronize()


#: Writes to several elements at one location.
EXPANDED: dict[str, Callable[[torch.Tensor], Any]] = {
    "add_": lambda each: each.add_(1),
    "elu_": lambda each: functional.elu_(each),
    "leaky_relu_": lambda each: functional.leaky_relu_(each),
    "hardtanh_": lambda each: functional.hardtanh_(each),
    "celu_": lambda each: torch.celu_(each),
    "silu, in place": lambda each: functional.silu(each, inplace=True),
    "normal_": lambda each: each.normal_(),
    "clamp_": lambda each: each.clamp_(0, 1),
    "cumsum_": lambda each: each.cumsum_(0),
    "addmm_": lambda each: each.addmm_(ones(*each.shape), ones(each.shape[1], each.shape[1])),
    "copy_": lambda each: each.copy_(ones(each.shape[1], each.shape[0]).t()),
    "foreach": lambda each: torch._foreach_add_([each], 1),
    "add, out": lambda each: torch.add(ones(1), 1, out=each),
    "elu, out": lambda each: torch.ops.aten.elu.out(ones(*each.shape), out=each),
}


@pytest.mark.parametrize("size", [(6, 6), (600, 600)])
@pytest.mark.parametrize("name", EXPANDED)
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_writing_to_an_expanded_tensor_is_refused_at_the_call(name: str, size: tuple[int, int]) -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError, match="unsupported operation: more than one element of the written-to tensor"):
            EXPANDED[name](ones(1, size[1]).expand(size))
    torch.cuda.synchronize()  # nothing has failed on the device


@pytest.mark.parametrize("values", [[], [0, 0, 0]])
@pytest.mark.parametrize("message", [(), ("wrong",)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int64])
def test_an_assertion_about_no_single_value_is_refused_at_the_call(
    values: list[int], message: tuple[str, ...], dtype: torch.dtype
) -> None:
    with pytest.raises(RuntimeError, match=r"Boolean value of Tensor with (no values|more than one value) is ambiguous"):
        torch._assert_async(torch.tensor(values, dtype=dtype, device="cuda"), *message)
    torch._assert_async(torch.ones(1, dtype=dtype, device="cuda"), *message)
    torch.cuda.synchronize()


HALVES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "avg_pool3d": lambda each: functional.avg_pool3d(each, 2),
    "interpolate": lambda each: functional.interpolate(each[0], size=(2, 2), mode="bilinear", antialias=True),
    "multi_margin_loss": lambda each: functional.multi_margin_loss(
        each[0, 0, 0], torch.tensor([1, 0, 1, 0], device=each.device)
    ),
    "multilabel_margin_loss": lambda each: functional.multilabel_margin_loss(
        each[0, 0, 0], torch.tensor([[1, 0, -1, -1]] * 4, device=each.device)
    ),
    "trace": lambda each: each[0, 0, 0].trace(),
    "polygamma": lambda each: torch.polygamma(1, each + 1),
    "round": lambda each: torch.round(each, decimals=1),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", HALVES)
def test_halves_are_computed_as_floats_and_rounded(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    wide = torch.rand(1, 2, 4, 4, 4).to(dtype).float().requires_grad_()
    expected = HALVES[name](wide)
    narrow = wide.detach().cuda().to(dtype).requires_grad_()
    found = HALVES[name](narrow)
    assert found.dtype == dtype
    torch.testing.assert_close(found.cpu(), expected.to(dtype), rtol=0.02, atol=0.01)
    found.sum().backward()
    expected.sum().backward()
    assert narrow.grad is not None and wide.grad is not None
    torch.testing.assert_close(narrow.grad.cpu(), wide.grad.to(dtype), rtol=0.05, atol=0.02)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_other_types_that_cuda_has_and_the_cpu_lacks() -> None:
    complex_halves = torch.tensor([1 + 1j, 2j, 3, 0]).cuda().to(torch.complex32)
    assert complex_halves.sum().to(torch.complex64).item() == 4 + 3j
    assert complex_halves.sin().dtype == torch.complex32
    assert torch.fft.fft(ones(4).half()).to(torch.complex64).tolist() == [4, 0, 0, 0]
    assert torch.fft.rfft(ones(4).half()).dtype == torch.complex32
    assert torch.tensor([1, 1, 3], device="cuda").histc(3, 1, 3).tolist() == [2, 0, 1]
    assert ones(3, 3).bool().trace().item() == 3
    torch.cuda.synchronize()


def test_quantised_tensors_are_copied_and_not_computed_with() -> None:
    there = torch.quantize_per_tensor(torch.tensor([1.0, 2.0]), 0.1, 3, torch.quint8)
    here = there.cuda()
    assert torch.equal(here.clone().cpu().int_repr(), there.int_repr())
    for function in (
        lambda: torch.quantize_per_tensor(ones(2), 0.1, 3, torch.quint8),
        lambda: torch.quantize_per_channel(ones(2, 2), ones(2), ones(2), 0, torch.qint8),
        lambda: here.dequantize(),
        lambda: here.int_repr(),
        lambda: functional.relu(here),
        lambda: str(here),
    ):
        with pytest.raises(
            NotImplementedError, match=r"aten::\S+: quantised tensors are copied to and from the simulated GPU"
        ):
            function()
    assert torch.fake_quantize_per_tensor_affine(ones(2), 0.5, 0, 0, 255).tolist() == [1.0, 1.0]
