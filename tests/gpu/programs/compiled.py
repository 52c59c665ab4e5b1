"""Code compiled by torch.compile enters regions, pauses and resumes: no warning, and the same effects as without.

python compiled.py
"""

from __future__ import annotations

import warnings

import torch

import torch_memory_saver as tms
from torch_memory_saver import _core as core
from torch_memory_saver import torch_memory_saver as saver

MIB = 1 << 20


def empty(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cuda")


x = torch.ones(4, device="cuda")
made = saver.region("made before")


def in_regions(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with saver.region("inside", enable_cpu_backup=True):
        first = empty(2 * MIB)
        with saver.disable():
            second = empty(2 * MIB)
    with made:
        third = empty(2 * MIB)
    return x + 1, first, second, third


def whole(x: torch.Tensor) -> torch.Tensor:
    with saver.region("whole"):
        return x + 1


@tms.region("decorated")
def decorated(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x + 2, empty(2 * MIB)


def transitions(x: torch.Tensor, managed: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x * 3
    saver.pause("inside")
    while_paused = (saver.is_paused(managed), saver.is_paused(x), tms.get_cpu_backup(managed) is not None)
    saver.resume("inside", wait=False).wait()
    return (y, *(torch.full((1,), answer) for answer in while_paused))


torch._dynamo.config.suppress_errors = False
# Dynamo warns once for each function that it does not trace.
warnings.simplefilter("error")
tags = []
for function, expected in ((in_regions, 2), (decorated, 3)):
    compiled = torch.compile(function, backend="eager")
    for _ in range(2):
        result, *managed = compiled(x)
        assert result.tolist() == [expected] * 4, function
        tags += [None if (row := core.find(tensor.data_ptr())) is None else row.tag for tensor in managed]
assert tags == ["inside", None, "made before"] * 2 + ["decorated"] * 2, tags
with saver.region("inside", enable_cpu_backup=True):
    weights = empty(2 * MIB)
for _ in range(2):
    result, *answers = torch.compile(transitions, backend="eager")(x, weights)
    assert result.tolist() == [3] * 4
    assert [bool(answer) for answer in answers] == [True, False, True]
    assert not saver.is_paused(weights)
assert core.region_current().depth == 0
try:
    torch.compile(whole, backend="eager", fullgraph=True)(x)
except torch._dynamo.exc.Unsupported as error:
    assert "torch_memory_saver cannot be part of a graph" in str(error), error
else:
    raise SystemExit("failed: a region became part of a graph")
print("ready")
