"""TMS_INIT_ENABLE=1 in a preloaded process: everything is managed, pauses, and comes back.

    python init_enable.py [expandable|toggled]

With TMS_INIT_ENABLE_CPU_BACKUP=1 contents are checked too. With `expandable`, expandable segments are on: a named error.
With `toggled`, they are switched on and off at run time, as some trainers do around each step.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys

import torch

from torch_memory_saver import _core, errors
from torch_memory_saver import torch_memory_saver as saver
from torch_memory_saver._engine.process import pool_store
from torch_memory_saver._text import binary_size

MIB = 1 << 20
BYPASSING = 80 * MIB  # expandable segments grow by 20 MiB
backup = os.environ.get("TMS_INIT_ENABLE_CPU_BACKUP") == "1"


def expect_named_error() -> None:
    try:
        torch.zeros(64 * MIB, device="cuda")
        saver.pause()
    except errors.TorchMemorySaverError as error:
        assert "expandable" in str(error), error
        print("ok")
        return
    raise SystemExit("expandable segments with TMS_INIT_ENABLE=1 raised nothing")


def train() -> None:
    assert _core.preloaded
    torch.manual_seed(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(8)]).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(256, 2048, device="cuda")
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
    # A workspace of cuBLAS, of 32 MiB at most, is freed and made again in ordinary memory.
    assert -36 * MIB <= gained - resident <= 4 * MIB, (gained, resident, report)
    # Free blocks of segments that hold tensors as well, unless another pool takes the place of the default pool.
    is_replaced = pool_store.substitutes.target(0) != (0, 0)
    assert report.reusable_bytes == 0 if is_replaced else 0 < report.reusable_bytes < report.bytes, report
    assert _core.counters()["resident_bytes"] == 0
    with saver.disable():
        other = torch.full((256 * MIB,), 0xEE, dtype=torch.uint8, device="cuda")
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
        weights = torch.ones(16 * MIB, device="cuda")
    found = _core.find(weights.data_ptr())
    assert found is not None and found.tag == "weights"
    saver.pause("weights")
    torch.cuda.synchronize()
    assert (batch * 0).numel() == batch.numel()  # everything else is usable while one tag is paused
    torch.cuda.synchronize()
    saver.resume("weights")
    assert ctypes.CDLL(None).cudaFree(raw) == 0
    print("ok")


def toggle() -> None:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("torch_memory_saver").addHandler(handler)
    # Before PyTorch 2.9 it has another name.
    settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
    managed = torch.full((64 * MIB,), 1, dtype=torch.uint8, device="cuda")
    report = saver.pause()
    assert (report.bytes, report.unmanaged_bytes) == (64 * MIB, 0), report
    saver.resume()
    settings("expandable_segments:True")
    try:
        bypassing = torch.full((BYPASSING,), 2, dtype=torch.uint8, device="cuda")
        with saver.region(tag="weights", enable_cpu_backup=True):
            weights = torch.full((32 * MIB,), 3, dtype=torch.uint8, device="cuda")
        cached = torch.full((BYPASSING,), 2, dtype=torch.uint8, device="cuda")
        del cached
        for _ in range(2):
            report = saver.pause()
            assert (report.bytes, report.unmanaged_bytes) == (96 * MIB, BYPASSING), report
            assert bool((bypassing == 2).all())
            saver.resume()
            assert saver.pause("weights").unmanaged_bytes == 0, "another tag than the one that has everything"
            saver.resume()
    finally:
        settings("expandable_segments:False")
    assert bool((weights == 3).all())
    del bypassing
    report = saver.pause()
    assert report.unmanaged_bytes == 0, report
    saver.resume()
    reports = [record for record in records if "expandable" in record]
    assert len(reports) == 1 and reports[0].startswith(f"{binary_size(BYPASSING)} stay on the GPU"), records
    managed.fill_(4)
    print("ok")


if sys.argv[1:] == ["expandable"]:
    expect_named_error()
elif sys.argv[1:] == ["toggled"]:
    toggle()
else:
    train()
