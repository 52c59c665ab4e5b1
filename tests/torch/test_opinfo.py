"""A tenth of PyTorch's own database of operators does on the simulated GPU what it does on the CPU: always the same tenth,
and some entries besides. ``make opinfo`` runs all of it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from pytorch_opinfo import differences, report, running

pytest.importorskip("expecttest", reason="PyTorch's database of operators needs it")
pytestmark = pytest.mark.skipif(
    os.environ.get("TMS_SIMULATED_KERNELS") != "cpu", reason="needs PyTorch's operators on the simulated GPU (--kernels cpu)"
)


#: They were different once, each for a reason of its own.
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
    return running.run(share=1, of=10, also=ALSO)


def test_no_operator_is_different_that_is_not_listed(outcomes: list[dict[str, Any]]) -> None:
    assert differences.unlisted(outcomes) == []


def test_nothing_is_listed_that_is_equal(outcomes: list[dict[str, Any]]) -> None:
    assert differences.no_longer(outcomes) == []


def test_most_are_equal(outcomes: list[dict[str, Any]]) -> None:
    assert len(report.failures(outcomes)) < len(outcomes)
    assert report.equal_share(outcomes) >= 0.95, report.table(outcomes)
