"""Guards that the simulated GPU refuses under use_deterministic_algorithms what CUDA refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional


def values(*size: int) -> torch.Tensor:
    return torch.rand(*size, device="cuda", requires_grad=True)


def indices(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, device="cuda")


def differentiate(result: torch.Tensor) -> None:
    result.sum().backward()


def bag(mode: str) -> None:
    differentiate(nn.EmbeddingBag(4, 2, mode=mode).cuda()(indices(0, 1), indices(0)))


#: CUDA function -> a call that reaches it.
REFUSED: dict[str, Callable[[], Any]] = {
    "adaptive_avg_pool2d_backward_cuda": lambda: differentiate(nn.AdaptiveAvgPool2d(2)(values(1, 2, 4, 4))),
    "adaptive_avg_pool3d_backward_cuda": lambda: differentiate(nn.AdaptiveAvgPool3d(2)(values(1, 2, 4, 4, 4))),
    "adaptive_max_pool2d_backward_cuda": lambda: differentiate(nn.AdaptiveMaxPool2d(2)(values(1, 2, 4, 4))),
    "avg_pool3d_backward_cuda": lambda: differentiate(nn.AvgPool3d(2)(values(1, 2, 4, 4, 4))),
    "ctc_loss_backward_gpu": lambda: differentiate(
        functional.ctc_loss(values(5, 1, 3).log_softmax(2), torch.tensor([[1, 2]]).cuda(), [5], [2])
    ),
    "cumsum_cuda_kernel": lambda: values(4).cumsum(0),
    "embedding_bag_backward_cuda_max": lambda: bag("max"),
    "fractional_max_pool2d_backward_cuda": lambda: differentiate(
        nn.FractionalMaxPool2d(2, output_ratio=0.5)(values(1, 2, 8, 8))
    ),
    "grid_sampler_2d_backward_cuda": lambda: differentiate(
        functional.grid_sample(values(1, 2, 4, 4), torch.rand(1, 2, 2, 2, device="cuda"), align_corners=False)
    ),
    "grid_sampler_3d_backward_cuda": lambda: differentiate(
        functional.grid_sample(values(1, 2, 4, 4, 4), torch.rand(1, 2, 2, 2, 3, device="cuda"), align_corners=False)
    ),
    "_histc_cuda with floating point input": lambda: values(4).detach().histc(4, 0, 1),
    "_bincount_cuda": lambda: indices(0, 1).bincount(torch.ones(2, device="cuda")),
    "max_pool3d_with_indices_backward_cuda": lambda: differentiate(nn.MaxPool3d(2)(values(1, 2, 4, 4, 4))),
    "max_unpooling2d_forward_out": lambda: nn.MaxUnpool1d(2)(values(1, 1, 2), indices(0, 3)[None, None]),
    "median CUDA with indices output": lambda: values(4, 4).median(0),
    "nll_loss2d_forward_out_cuda_template": lambda: nn.NLLLoss()(values(1, 3, 1, 2), indices(0, 1)[None, None]),
    "put_": lambda: torch.zeros(3, device="cuda").put_(indices(0), torch.ones(1, device="cuda"), accumulate=True),
    "reflection_pad1d_backward_out_cuda": lambda: differentiate(nn.ReflectionPad1d(1)(values(1, 2, 4))),
    "reflection_pad2d_backward_cuda": lambda: differentiate(nn.ReflectionPad2d(1)(values(1, 2, 4, 4))),
    "reflection_pad3d_backward_out_cuda": lambda: differentiate(nn.ReflectionPad3d(1)(values(1, 2, 4, 4, 4))),
    "scatter_reduce_cuda_prod_": lambda: torch.ones(3, device="cuda").scatter_reduce(
        0, indices(0, 0), torch.ones(2, device="cuda"), "prod"
    ),
    "upsample_linear1d_backward_out_cuda": lambda: differentiate(
        functional.interpolate(values(1, 2, 4), scale_factor=2, mode="linear")
    ),
    "upsample_bicubic2d_backward_out_cuda": lambda: differentiate(
        functional.interpolate(values(1, 2, 4, 4), scale_factor=2, mode="bicubic")
    ),
    # torch.nn.functional.interpolate has other ways to do these.
    "upsample_bilinear2d_backward_out_cuda": lambda: torch.ops.aten.upsample_bilinear2d_backward(
        values(1, 2, 8, 8).detach(), [8, 8], [1, 2, 4, 4], False
    ),
    "upsample_trilinear3d_backward_out_cuda": lambda: torch.ops.aten.upsample_trilinear3d_backward(
        values(1, 2, 8, 8, 8).detach(), [8, 8, 8], [1, 2, 4, 4, 4], False
    ),
    "replication_pad2d_backward_cuda": lambda: torch.ops.aten.replication_pad2d_backward(
        values(1, 2, 6, 6).detach(), values(1, 2, 4, 4).detach(), [1, 1, 1, 1]
    ),
}
ALLOWED: dict[str, Callable[[], Any]] = {
    "cumsum of integers": lambda: indices(1, 2).cumsum(0),
    "histc of integers": lambda: indices(1, 2).histc(4, 0, 4),
    "bincount without weights": lambda: indices(0, 1).bincount(),
    "median without indices": lambda: values(4).median(),
    "nll_loss without reduction": lambda: nn.NLLLoss(reduction="none")(values(1, 3, 1, 2), indices(0, 1)[None, None]),
    "sum of an embedding bag": lambda: bag("sum"),
    "scatter_add": lambda: torch.zeros(3, device="cuda").scatter_add(0, indices(0, 0), torch.ones(2, device="cuda")),
    "scatter_reduce": lambda: torch.zeros(3, device="cuda").scatter_reduce(
        0, indices(0, 0), torch.ones(2, device="cuda"), "sum"
    ),
    "index_add": lambda: torch.zeros(3, device="cuda").index_add(0, indices(0, 0), torch.ones(2, device="cuda")),
    "replicated padding": lambda: differentiate(functional.pad(values(1, 2, 4, 4), (1, 1, 1, 1), mode="replicate")),
    "convolution": lambda: differentiate(functional.conv2d(values(1, 2, 4, 4), values(2, 2, 3, 3))),
}


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", REFUSED)
def test_functions_that_are_not_deterministic_are_refused_by_cuda_s_name(name: str) -> None:
    REFUSED[name]()
    torch.use_deterministic_algorithms(True)
    with pytest.raises(RuntimeError) as caught:
        REFUSED[name]()
    assert str(caught.value).startswith(name + " does not have a deterministic implementation, but you set")
    torch.cuda.synchronize()


@pytest.mark.parametrize("name", ALLOWED)
def test_others_run(name: str) -> None:
    torch.use_deterministic_algorithms(True)
    ALLOWED[name]()
    torch.cuda.synchronize()


def test_a_warning_if_the_program_wants_one() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    with pytest.warns(UserWarning, match=r"^cumsum_cuda_kernel does not have a .*warn_only=True"):
        assert torch.ones(3, device="cuda").cumsum(0).tolist() == [1, 2, 3]
