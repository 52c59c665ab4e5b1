"""Guards that results on the simulated GPU have the strides that PyTorch gives them elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

_Tensor = torch.Tensor
ONE: list[Callable[..., _Tensor]] = [
    torch.abs,
    torch.logical_not,
    torch.exp,
    torch.angle,
    torch.neg,
    torch.sign,
    torch.round,
]
TWO: list[Callable[..., _Tensor]] = [torch.add, torch.mul, torch.maximum, torch.eq, torch.logical_and]
OTHER: dict[str, tuple[Callable[..., _Tensor], Callable[[_Tensor], tuple[_Tensor, ...]]]] = {
    "bmm": (torch.bmm, lambda each: (each, each.mT)),
    "cat": (lambda first, second, out: torch.cat([first, second], out=out), lambda each: (each, each)),
    "stack": (lambda first, second, out: torch.stack([first, second], out=out), lambda each: (each, each)),
    "sum": (lambda each, out: torch.sum(each, 1, out=out), lambda each: (each,)),
    "cumsum": (lambda each, out: torch.cumsum(each, 0, out=out), lambda each: (each,)),
    "where": (torch.where, lambda each: (each > 0, each, each)),
    "lerp": (torch.lerp, lambda each: (each, each, each)),
    "index_select": (
        lambda each, out: torch.index_select(each, 0, torch.zeros(2, dtype=torch.int64, device=each.device), out=out),
        lambda each: (each,),
    ),
}


def permuted(device: str) -> _Tensor:
    return torch.rand(2, 3, 4, device=device).permute(2, 0, 1)


def channels_last(device: str) -> _Tensor:
    return torch.rand(2, 3, 4, 4, device=device).contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("function", ONE)
@pytest.mark.parametrize("make", [permuted, channels_last])
def test_a_new_result_has_the_layout_of_the_argument(
    function: Callable[..., _Tensor], make: Callable[[str], _Tensor]
) -> None:
    assert function(make("cuda")).stride() == make("cpu").stride()


@pytest.mark.parametrize("function", ONE + TWO)
@pytest.mark.parametrize("make", [permuted, channels_last])
def test_an_output_that_is_resized_has_the_layout_of_the_argument(
    function: Callable[..., _Tensor], make: Callable[[str], _Tensor]
) -> None:
    values = make("cuda")
    arguments = (values,) if function in ONE else (values, values)
    expected = function(*arguments)
    out = torch.empty(0, dtype=expected.dtype, device="cuda")
    function(*arguments, out=out)
    assert out.stride() == make("cpu").stride()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("name", OTHER)
def test_outputs_of_others_have_the_layout_that_the_cpu_s_have(name: str) -> None:
    function, arguments = OTHER[name]
    strides = []
    for device in ("cpu", "cuda"):
        out = torch.empty(0, device=device)
        function(*arguments(permuted(device)), out=out)
        strides.append(out.stride())
    assert strides[0] == strides[1]


def test_an_output_of_the_right_size_keeps_its_layout() -> None:
    values, out = permuted("cuda"), torch.empty(4, 2, 3, device="cuda")
    torch.add(values, values, out=out)
    assert out.is_contiguous() and torch.equal(out, values + values)
