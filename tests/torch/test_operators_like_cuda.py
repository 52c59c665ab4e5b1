"""Guards that the simulated GPU's operators behave as CUDA's where the CPU's behave otherwise."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

PROGRAM = Path(__file__).parent / "programs" / "captures.py"


def ones(dtype: torch.dtype, *size: int) -> torch.Tensor:
    return torch.ones(*(size or (2, 2)), device="cuda").to(dtype)


WHOLE, SHORT, EIGHT_BITS = torch.int64, torch.int32, torch.float8_e5m2
#: The CPU has these types. Label -> the call and CUDA's message.
LACKING: dict[str, tuple[Callable[[], Any], str]] = {
    "matmul": (lambda: ones(WHOLE) @ ones(WHOLE), "\"addmm_cuda\" not implemented for 'Long'"),
    "matmul of vectors": (lambda: ones(WHOLE, 2) @ ones(WHOLE, 2), "not implemented for 'Long'"),
    "matrix and vector": (lambda: ones(WHOLE) @ ones(WHOLE, 2), "not implemented for 'Long'"),
    "bmm": (lambda: ones(torch.int8, 1, 2, 2).bmm(ones(torch.int8, 1, 2, 2)), "\"baddbmm_cuda\" not implemented for 'Char'"),
    "addmm, in place": (lambda: ones(SHORT).addmm_(ones(SHORT), ones(SHORT)), "\"addmm_cuda\" not implemented for 'Int'"),
    "mm, out": (lambda: torch.mm(ones(SHORT), ones(SHORT), out=ones(SHORT)), "not implemented for 'Int'"),
    "linear": (lambda: functional.linear(ones(EIGHT_BITS), ones(EIGHT_BITS)), "not implemented for 'Float8_e5m2'"),
    "conv1d": (lambda: functional.conv1d(ones(WHOLE), ones(WHOLE, 2, 2, 1)), "getCudnnDataType.* not supported for Long"),
    "conv1d, another": (lambda: functional.conv1d(ones(SHORT), ones(SHORT, 2, 2, 1)), "GET was unable to find an engine"),
    "max_pool2d": (lambda: functional.max_pool2d(ones(SHORT, 1, 2, 2), 2), "not implemented for 'Int'"),
    "avg_pool2d": (lambda: functional.avg_pool2d(ones(WHOLE, 1, 2, 2), 2), "not implemented for 'Long'"),
    "histc": (lambda: ones(torch.float16).histc(), "HalfTensor is not supported"),
    "histc, another": (lambda: ones(torch.bfloat16).histc(), "\"histc\" not implemented for 'BFloat16'"),
    "igamma": (lambda: torch.igamma(ones(torch.float16), ones(torch.float16)), "not implemented for 'Half'"),
    "abs": (lambda: ones(EIGHT_BITS).abs(), "\"abs_cuda\" not implemented for 'Float8_e5m2'"),
    "dropout": (lambda: functional.dropout(ones(WHOLE)), "\"fused_dropout\" not implemented for 'Long'"),
    "dropout, complex": (
        lambda: torch.native_dropout(ones(torch.complex64), 0.5, True),
        "not implemented for 'ComplexFloat'",
    ),
    "std": (lambda: ones(EIGHT_BITS).std(), "\"std_cuda\" not implemented for 'Float8_e5m2'"),
    "masks": (lambda: ones(SHORT).masked_fill(ones(SHORT), 1), "only supports boolean masks, but got dtype Int"),
    "targets": (lambda: functional.nll_loss(ones(torch.float32), ones(SHORT, 2)), "not implemented for 'Int'"),
}


@pytest.mark.parametrize("label", LACKING)
def test_types_that_only_cuda_lacks_are_refused(label: str) -> None:
    call, message = LACKING[label]
    expected = NotImplementedError if "not implemented" in message else RuntimeError
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message) as caught:
            call()
        assert caught.type is expected
    torch.cuda.synchronize()


def test_they_are_accepted_without_elements() -> None:
    """CUDA returns before it looks for a kernel."""
    assert (ones(WHOLE, 0, 2) @ ones(WHOLE)).shape == (0, 2)


def test_they_are_refused_in_a_capture() -> None:
    matrix, graph = ones(WHOLE), torch.cuda.CUDAGraph()
    with pytest.raises(NotImplementedError, match="addmm_cuda"), torch.cuda.graph(graph):
        matrix @ matrix


def test_refusals_have_pytorchs_classes() -> None:
    """A check that CUDA and the CPU share has the same text. A text that names a kernel is followed by an explanation."""
    calls: tuple[Callable[[torch.Tensor], Any], ...] = (
        lambda tensor: tensor.to(WHOLE).std(),
        lambda tensor: tensor.to(EIGHT_BITS) + 1,
        lambda tensor: tensor.to(torch.bool).softmax(0),
        lambda tensor: tensor & 1,
    )
    for call in calls:
        with pytest.raises(RuntimeError) as expected:
            call(torch.ones(2, 2))
        with pytest.raises(RuntimeError) as found:
            call(ones(torch.float32))
        assert found.type is expected.type
        text, _, added = str(found.value).partition(": aten::")
        assert text == str(expected.value) and ("not implemented for" in text or not added)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, EIGHT_BITS])
def test_bytes_are_gathered(dtype: torch.dtype) -> None:
    values = torch.tensor([[0.5, 2.0], [4.0, -8.0]]).to(dtype).cuda()
    places = torch.tensor([[1, 0]], device="cuda")
    assert values.gather(0, places).float().tolist() == [[4.0, 2.0]]
    assert torch.gather(values, 0, places, out=torch.empty(0, dtype=dtype, device="cuda")).float().tolist() == [[4.0, 2.0]]


def test_abs_of_booleans() -> None:
    assert torch.tensor([True, False], device="cuda").abs().tolist() == [True, False]


def test_integers_divided_by_zero_are_undefined_and_no_error() -> None:
    dividend, divisor = torch.tensor([4, 6], device="cuda"), torch.tensor([0, 3], device="cuda")
    assert (dividend // divisor).tolist()[1] == 2
    assert (dividend % divisor).tolist()[1] == 0
    assert torch.div(dividend, divisor, rounding_mode="trunc").tolist()[1] == 2
    assert (dividend.byte() // divisor.byte()).tolist()[1] == 2
    assert dividend.clone().floor_divide_(divisor).tolist()[1] == 2
    assert len((dividend // 0).tolist()) == 2
    assert len((dividend % 0).tolist()) == 2
    torch.cuda.synchronize()


def test_other_divisions_by_zero_are_infinite() -> None:
    dividend, divisor = torch.tensor([4, 6], device="cuda"), torch.tensor([0, 3], device="cuda")
    assert (dividend / divisor).tolist() == [float("inf"), 2.0]
    assert (dividend.float() // divisor).tolist() == [float("inf"), 2.0]


def test_a_result_that_is_too_small_is_named_by_its_shape() -> None:
    with pytest.raises(RuntimeError, match=r"output with shape \[4\] doesn't match the broadcast shape \[3, 4\]"):
        ones(torch.float32, 4).add_(ones(torch.float32, 3, 4))
    with pytest.raises(RuntimeError, match=r"output with shape \[\] doesn't match the broadcast shape \[2, 2\]"):
        torch.ones(()).add_(ones(torch.float32))
    with pytest.raises(RuntimeError, match=r"The size of tensor a \(3\) must match the size of tensor b \(4\)"):
        ones(torch.float32, 3).add_(ones(torch.float32, 2, 4))
    torch.cuda.synchronize()


#: What CUDA captures, and what it refuses to capture because it waits for the device.
CAPTURES = {
    "a mask and a number of the host": "captured",  # as masked_fill
    "a mask and a number of the device": "refused",
    "indices and a number of the device": "captured",
    "histogram": "refused",
    "histogram with limits": "captured",
    "counts": "refused",
    "eigenvalues": "refused",
    "equal, the same": "captured",
    "equal, another": "refused",
}


def test_operators_that_wait_are_not_captured() -> None:
    done = subprocess.run([sys.executable, str(PROGRAM)], stdout=subprocess.PIPE, text=True, timeout=300, check=True)
    assert dict(line.split(": ") for line in done.stdout.splitlines()) == CAPTURES


def test_equal_compares_values() -> None:
    tensor = torch.tensor([1.0, float("nan")], device="cuda")
    assert torch.equal(tensor, tensor) and not torch.equal(tensor, tensor.clone())
    assert not torch.equal(tensor[:1], tensor[1:]) and not torch.equal(tensor, tensor[:1])
    assert torch.equal(ones(WHOLE), ones(WHOLE))


def test_embedding_bags_are_captured() -> None:
    weights = torch.arange(8.0, device="cuda").view(4, 2)
    places, graph = torch.tensor([[0, 1], [2, 3]], device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sums = functional.embedding_bag(places, weights, mode="sum")
    places.copy_(torch.tensor([[3, 3], [0, 0]]))
    graph.replay()
    assert sums.tolist() == [[12.0, 14.0], [0.0, 2.0]]


def test_a_message_names_the_argument_on_another_device() -> None:
    matrix, other = ones(torch.float32), torch.ones(2, 2)
    for call, message in (
        (lambda: matrix @ other, "got mat2 is on cpu, different from other tensors on cuda:0"),
        (lambda: functional.linear(matrix, matrix, other[0]), "got mat1 is on cuda:0, different from other tensors on cpu"),
        (lambda: torch.cat([matrix, other]), "got tensors is on cpu, different from other tensors on cuda:0"),
        (lambda: matrix.index_select(0, torch.tensor([0])), "got index is on cpu, different from other tensors on cuda:0"),
        (lambda: matrix.masked_fill(other > 0, 1.0), "expected self and mask to be on the same device, but got mask on cpu"),
        (lambda: other + matrix, "found at least two devices, cuda:0 and cpu!"),
    ):
        with pytest.raises(RuntimeError, match=message):
            call()


def test_values_of_an_assignment_are_of_the_device_or_a_number() -> None:
    matrix, place = ones(torch.float32), torch.tensor([0], device="cuda")
    with pytest.raises(RuntimeError, match="two devices, cuda:0 and cpu"):
        matrix[place] = torch.zeros(2)
    matrix[place] = torch.tensor(3.0)
    matrix[matrix < 2] = torch.tensor([4.0])
    assert matrix.tolist() == [[3.0, 3.0], [4.0, 4.0]]
