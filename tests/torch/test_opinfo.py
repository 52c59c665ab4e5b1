"""Guards that a thirtieth of PyTorch's own database of operators gives the same results on the simulated GPU and on the CPU:
always the same, and some entries in addition. ``make opinfo`` runs all of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import torch
from pytorch_opinfo import differences, report, running, values

pytest.importorskip("expecttest", reason="PyTorch's database of operators needs it")

#: Each was different once, for a reason of its own.
ALSO = (
    "Adam",
    "NAdam",
    "isfinite",
    "masked_select",
    "mode",
    "nn.MultiLabelMarginLoss",
    "nn.functional.layer_norm",
    "nn.functional.max_unpool2d.grad",
    "nn.functional.mse_loss",
)


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, Any]]:
    return running.run(share=1, of=30, also=ALSO)


def test_every_difference_is_listed(outcomes: list[dict[str, Any]]) -> None:
    assert differences.unlisted(outcomes) == []


def test_every_listed_operator_differs(outcomes: list[dict[str, Any]]) -> None:
    assert differences.no_longer(outcomes) == []


def test_most_are_equal(outcomes: list[dict[str, Any]]) -> None:
    assert len(report.failures(outcomes)) < len(outcomes)
    assert report.equal_share(outcomes) >= 0.95, report.table(outcomes)


def draws(make: Any, first: int) -> list[torch.Tensor]:
    return [make(torch.Generator().manual_seed(seed)) for seed in range(first, first + values.DRAWS)]


def uniform(generator: torch.Generator) -> torch.Tensor:
    return torch.rand(200, generator=generator)


def dropped_channels(generator: torch.Generator) -> torch.Tensor:
    """The values of a channel are kept or dropped together."""
    return (torch.rand(4, 1, generator=generator) < 0.5).float().expand(4, 1000)


@pytest.mark.parametrize("make", [uniform, dropped_channels])
def test_draws_of_the_same_distribution_are_equal(make: Any) -> None:
    for first in range(1000, 1005):
        values.same_distribution(draws(make, 0), draws(make, first))


@pytest.mark.parametrize("change", [lambda each: each * 1.1, lambda each: each.clamp(max=0.9), torch.zeros_like])
def test_draws_of_another_distribution_are_different(change: Any) -> None:
    with pytest.raises(values.Different, match="another distribution"):
        values.same_distribution(draws(uniform, 0), [change(each) for each in draws(uniform, 1000)])
