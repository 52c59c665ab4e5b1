"""Guards the NCCL hook for communicators that a program made by ctypes, beside PyTorch's, between two GPUs.

``TMS_GPU_NCCL`` is the path of an NCCL library for them, in place of PyTorch's: an old one, or one that can suspend.
"""

from __future__ import annotations

import json
import os

import pytest
from gpu_programs import run_ranks
from gpu_support import MIB

LIBRARY = os.environ.get("TMS_GPU_NCCL", "")
CAN_SUSPEND = 22907
#: More than what the driver's own bookkeeping changes, and less than the buffers of a communicator.
SOME = 8 * MIB


@pytest.mark.multigpu
@pytest.mark.outer
@pytest.mark.parametrize("preload", [False, True], ids=["torch", "preload"])
def test_a_communicator_beside_those_of_pytorch(preload: bool) -> None:
    outputs = run_ranks("pynccl.py", (LIBRARY,) if LIBRARY else (), preload=preload)
    ranks = [json.loads(line) for output in outputs for line in output.splitlines() if line.startswith("{")]
    assert len(ranks) == 2
    for rank in ranks:
        name, persistent = rank["name"], rank["persistent"]
        for cycle in rank["cycles"]:
            stays = cycle["stays"] or ""
            remarks = [each for each in cycle["remarks"] if "by NCCL's own figure" not in each]
            assert remarks == ([stays] if stays else [])
            if rank["version"] >= CAN_SUSPEND:
                assert name in cycle["suspended"] and cycle["released"] >= SOME, rank
                assert ("of device memory while suspended" in stays) or not persistent
                assert f"communicator {name} keeps its" not in stays
            else:
                assert name not in cycle["suspended"], rank
                version = f"{rank['version'] // 10_000}.{rank['version'] // 100 % 100}.{rank['version'] % 100}"
                reason = f"NCCL {version} ({rank['file']}) has no ncclCommSuspend"
                assert f"The NCCL communicator {name} keeps its device memory during a pause: {reason}" in stays
                assert rank["group"] in cycle["suspended"] or abs(cycle["released"]) < SOME, rank
