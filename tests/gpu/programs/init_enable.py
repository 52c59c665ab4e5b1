"""TMS_INIT_ENABLE=1 in a preloaded process: everything is managed, pauses, and comes back.

    python init_enable.py

With TMS_INIT_ENABLE_CPU_BACKUP=1 contents are checked too.
"""

from __future__ import annotations

import ctypes
import os

import torch

from torch_memory_saver import _core
from torch_memory_saver import torch_memory_saver as saver
from torch_memory_saver._engine.process import pool_store

MIB = 1 << 20
backup = os.environ.get("TMS_INIT_ENABLE_CPU_BACKUP") == "1"


def train() -> None:
    assert _core.preloaded
    torch.manual_seed(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)]).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(64, 1024, device="cuda")
    for _ in range(2):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = [value.cpu() for value in model.state_dict().values()]
    moments = [entry["exp_avg"].cpu() for entry in optimizer.state.values()]
    raw = ctypes.c_void_p()
    assert ctypes.CDLL(None).cudaMalloc(ctypes.byref(raw), ctypes.c_size_t(32 * MIB)) == 0
    assert _core.find(int(raw.value or 0)) is not None
    for parameter in model.parameters():
        assert _core.find(parameter.data_ptr()) is not None
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    resident = _core.counters()["resident_bytes"]
    report = saver.pause()
    gained = torch.cuda.mem_get_info()[0] - before
    # Memory that torch only cached (the freed gradients) is released to the driver instead of paused.
    assert 0 < report.bytes < resident, (report, resident)
    # A workspace of cuBLAS, of 32 MiB at most, is freed and made again in ordinary memory: in two pieces, if expandable
    # segments are on.
    assert -44 * MIB <= gained - resident <= 4 * MIB, (gained, resident, report)
    # Free blocks of segments that hold tensors as well, unless another pool takes the place of the default pool.
    is_replaced = pool_store.substitutes.target(0) != (0, 0)
    assert report.reusable_bytes == 0 if is_replaced else 0 < report.reusable_bytes < report.bytes, report
    assert _core.counters()["resident_bytes"] == 0
    with saver.disable():
        other = torch.full((64 * MIB,), 0xEE, dtype=torch.uint8, device="cuda")
        assert _core.find(other.data_ptr()) is None
        assert bool((other == 0xEE).all())
        del other
    assert abs(torch.cuda.mem_get_info()[0] - before - gained) <= 4 * MIB, "disable() gives its memory back"
    saver.resume()
    if backup:
        for value, expected in zip(model.state_dict().values(), state, strict=True):
            assert torch.equal(value.cpu(), expected)
        for entry, expected in zip(optimizer.state.values(), moments, strict=True):
            assert torch.equal(entry["exp_avg"].cpu(), expected)
        model(batch).square().mean().backward()
        optimizer.step()
        assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())
    with saver.region(tag="weights"):
        weights = torch.ones(4 * MIB, device="cuda")
    found = _core.find(weights.data_ptr())
    assert found is not None and found.tag == "weights"
    saver.pause("weights")
    torch.cuda.synchronize()
    assert (batch * 0).numel() == batch.numel()  # everything else is usable while one tag is paused
    torch.cuda.synchronize()
    saver.resume("weights")
    assert ctypes.CDLL(None).cudaFree(raw) == 0
    print("ok")


train()
