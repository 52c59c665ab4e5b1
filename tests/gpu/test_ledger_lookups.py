"""Guards the ledger under `run --ledger`: memory of functions that libraries look up counts once, and nothing hangs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from gpu_support import subprocess_run

pytestmark = pytest.mark.outer

PROGRAMS = Path(__file__).parent / "programs"
RUN = ["-m", "torch_memory_saver", "run", "--ledger", "--"]


def test_every_holder_counts_once() -> None:
    done = subprocess_run([*RUN, sys.executable, str(PROGRAMS / "ledger_lookups.py")]).check()
    assert done.output == "ok\n"


def test_switched_off_by_the_variable() -> None:
    """The library stays, and changes no look-up."""
    text = (
        "import ctypes, os, torch\n"
        "from torch_memory_saver import _core, torch_memory_saver as saver\n"
        "torch.zeros(1, device='cuda')\n"
        "driver = ctypes.CDLL(os.environ.get('TMS_CUDA_DRIVER', 'libcuda.so.1'))\n"
        "before, address = _core.libraries(), ctypes.c_void_p()\n"
        "assert driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(64 << 20)) == 0\n"
        "assert len(_core.libraries()) == len(before)\n"
        "print(saver.ledger(0)[0].of('library')[-1].note)\n"
    )
    command = ["env", "TMS_LEDGER=0", sys.executable, "-c", text]
    assert "only with TMS_LEDGER=1" in subprocess_run([*RUN, *command]).check().output


@pytest.mark.multigpu
@pytest.mark.real_gpu("the simulated NCCL is a part of the simulated driver, which no look-up leads to")
def test_nccl_has_a_line() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess_run([*RUN, *torchrun, str(PROGRAMS / "ledger_nccl.py")]).check()
    rows = [json.loads(line) for line in done.output.splitlines() if line.startswith("{")]
    assert len(rows) == 2
    for row in rows:
        assert row["before"] == [0, 0]
        size, allocations = row["held"]
        # Device memory also goes to its kernels and buffers that it shares with the other process.
        assert 0 < size <= row["taken"] and allocations > 0, row
        assert row["paused"] == row["held"]
        assert row["after"][0] < size, row


@pytest.mark.real_gpu("the simulated GPU lacks functions that NCCL's own runtime needs")
def test_nccl_that_ctypes_loads() -> None:
    """As vLLM loads it: a group of one process, so that one GPU is enough. It hangs under other preloaded libraries."""
    text = (
        "import ctypes, torch\n"
        "torch.zeros(1, device='cuda')\n"
        "path = next(line.split()[-1] for line in open('/proc/self/maps') if '/libnccl.so' in line)\n"
        "nccl = ctypes.CDLL(path)\n"
        "class Id(ctypes.Structure):\n"
        "    _fields_ = [('data', ctypes.c_byte * 128)]\n"
        "identity, communicator = Id(), ctypes.c_void_p()\n"
        "assert nccl.ncclGetUniqueId(ctypes.byref(identity)) == 0\n"
        "nccl.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, Id, ctypes.c_int]\n"
        "assert nccl.ncclCommInitRank(ctypes.byref(communicator), 1, identity, 0) == 0\n"
        "assert nccl.ncclCommDestroy(communicator) == 0\n"
        "print('ok')\n"
    )
    done = subprocess_run([*RUN, sys.executable, "-c", text], environment={"NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "")})
    assert done.check().output.endswith("ok\n")
