"""Guards batch normalisation over several processes on the simulated GPU: parts give what the whole gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

EPS, MOMENTUM, CHANNELS = 1e-5, 0.1, 3
SIZES: dict[str, tuple[int, ...]] = {"rows": (6, CHANNELS), "sequences": (6, CHANNELS, 5), "images": (6, CHANNELS, 4, 4)}


def parts(values: torch.Tensor) -> list[torch.Tensor]:
    """As on processes with batches of different sizes."""
    return [values[:2], values[2:]]


def gather(shards: list[torch.Tensor], norm: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean, inverse standard deviation and number of elements of all shards. Updates the running statistics."""
    statistics = [torch.batch_norm_stats(each, EPS) for each in shards]
    means, inverses = (torch.stack(each) for each in zip(*statistics, strict=True))
    counts = torch.tensor([each.numel() / CHANNELS for each in shards], device="cuda", dtype=means.dtype)
    mean, inverse = torch.batch_norm_gather_stats_with_counts(
        shards[0], means, inverses, norm.running_mean, norm.running_var, MOMENTUM, EPS, counts
    )
    return mean, inverse, counts.to(torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", SIZES)
def test_parts_give_what_the_whole_gives(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(CHANNELS) if name != "images" else nn.BatchNorm2d(CHANNELS)
    nn.init.uniform_(norm.weight)
    nn.init.uniform_(norm.bias)
    here: Any = nn.SyncBatchNorm(CHANNELS).cuda()
    here.load_state_dict(norm.state_dict())
    narrow = torch.randn(SIZES[name]).to(dtype)
    gradient = torch.randn(SIZES[name]).to(dtype)
    there = narrow.float().requires_grad_()
    expected = norm(there)
    expected.backward(gradient.float())

    shards, gradients = parts(narrow.cuda()), parts(gradient.cuda())
    mean, inverse, counts = gather(shards, here)
    assert mean.dtype == inverse.dtype == torch.float32
    outputs = [torch.batch_norm_elemt(each, here.weight, here.bias, mean, inverse, EPS) for each in shards]
    reduced = [
        torch.batch_norm_backward_reduce(slope, each, mean, inverse, here.weight, True, True, True)
        for slope, each in zip(gradients, shards, strict=True)
    ]
    sums = [torch.stack(each).sum(0) for each in zip(*reduced, strict=True)]
    slopes = [
        torch.batch_norm_backward_elemt(slope, each, mean, inverse, here.weight, sums[0], sums[1], counts)
        for slope, each in zip(gradients, shards, strict=True)
    ]

    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.01, "atol": 0.01}
    for found, wanted in (
        (torch.cat(outputs), expected),
        (torch.cat(slopes), there.grad),
        (sums[2], norm.weight.grad),
        (sums[3], norm.bias.grad),
        (here.running_mean, norm.running_mean),
        (here.running_var, norm.running_var),
    ):
        assert wanted is not None
        torch.testing.assert_close(found.float().cpu(), wanted, **tolerance)
    assert outputs[0].dtype == slopes[0].dtype == dtype


def test_results_have_the_layout_of_the_input() -> None:
    images = torch.randn(2, CHANNELS, 4, 4, device="cuda").contiguous(memory_format=torch.channels_last)
    mean, inverse = torch.batch_norm_stats(images, EPS)
    made = torch.batch_norm_elemt(images, None, None, mean, inverse, EPS)
    assert made.is_contiguous(memory_format=torch.channels_last)
    out = torch.empty(0, device="cuda")
    assert torch.equal(torch.batch_norm_elemt(images, None, None, mean, inverse, EPS, out=out), made)


def test_equal_parts_need_no_counts() -> None:
    shards = [torch.randn(4, CHANNELS, device="cuda") for _ in range(2)]
    means, inverses = (
        torch.stack(each) for each in zip(*[torch.batch_norm_stats(each, EPS) for each in shards], strict=True)
    )
    mean, inverse = torch.batch_norm_gather_stats(shards[0], means, inverses, None, None, MOMENTUM, EPS, 4)
    expected = torch.batch_norm_stats(torch.cat(shards), EPS)
    torch.testing.assert_close((mean, inverse), expected)


def test_a_normalisation_of_an_input_without_a_gradient_learns() -> None:
    """The CPU then returns no gradient of the input, and CUDA does."""
    norms = [nn.BatchNorm1d(CHANNELS).to(device) for device in ("cpu", "cuda")]
    values = torch.randn(4, CHANNELS)
    for norm in norms:
        (norm(values.to(norm.weight.device)) ** 3).sum().backward()
    assert norms[0].weight.grad is not None and norms[1].weight.grad is not None
    torch.testing.assert_close(norms[1].weight.grad.cpu(), norms[0].weight.grad, rtol=1e-4, atol=1e-5)
