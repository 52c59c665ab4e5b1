"""Guards guard mode with PyTorch: what a tensor shows while it is paused, and after a resume without contents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from gpu_programs import Program, run_programs
from gpu_support import MIB, core, free_bytes, saver, torch

#: What 0xFF bytes mean in each type, by its name in torch. A release that lacks a type skips it. The table of
#: docs/guides/late-use.md.
NAN = float("nan")
MEANINGS: dict[str, Any] = {
    "float64": NAN,
    "float32": NAN,
    "float16": NAN,
    "bfloat16": NAN,
    "complex64": NAN,
    "float8_e5m2": NAN,
    "float8_e4m3fn": NAN,
    "float8_e8m0fnu": NAN,
    "float8_e4m3fnuz": -240.0,
    "float8_e5m2fnuz": -57344.0,
    "int64": -1,
    "int32": -1,
    "int16": -1,
    "int8": -1,
    "uint8": 0xFF,
    "uint16": 0xFFFF,
    "uint32": 0xFFFFFFFF,
    "uint64": 0xFFFFFFFFFFFFFFFF,
    "bool": True,
}
ELEMENTS = 1 << 20


@pytest.fixture(autouse=True)
def guard() -> Iterator[None]:
    saver.guard = True
    yield
    saver.guard = False


def in_region(values: torch.Tensor, tag: str = "a", **settings: Any) -> torch.Tensor:
    with saver.region(tag=tag, **settings):
        return values.cuda()


def guard_bytes(tensor: torch.Tensor) -> bool:
    return bool((tensor.contiguous().view(torch.uint8).cpu() == core.GUARD_BYTE).all())


@pytest.mark.parametrize("name", MEANINGS)
def test_what_the_bytes_mean(name: str) -> None:
    """By a copy to the host, which every type has; the meaning is the same on the CPU."""
    kind = getattr(torch, name, None)
    if kind is None:
        pytest.skip(f"this release of torch has no {name}")
    with saver.region(tag="a"):
        tensor = torch.empty(64 * 1024, dtype=torch.uint8, device="cuda").view(kind)
    saver.pause()
    late = tensor.cpu()
    saver.resume()
    on_the_cpu = torch.full((late.element_size(),), core.GUARD_BYTE, dtype=torch.uint8).view(kind)
    expected = MEANINGS[name]
    for values in (late, on_the_cpu):
        found = values.to(torch.float64) if kind.is_floating_point else values
        if kind.is_complex:
            found = torch.view_as_real(values)
        if expected is not True and expected != expected:
            assert bool(found.isnan().all())
        else:
            assert set(found.flatten().tolist()) == {expected}


def test_a_late_kernel_reads_nan_and_nothing_is_lost() -> None:
    weights = in_region(torch.ones(ELEMENTS), enable_cpu_backup=True)
    saver.pause()
    assert bool((weights * 2).isnan().all())
    assert bool(weights.sum().isnan())
    torch.cuda.synchronize()
    saver.resume()
    assert bool((weights == 1).all())


def test_a_late_graph_computes_nan() -> None:
    weights, result = in_region(torch.ones(ELEMENTS), enable_cpu_backup=True), torch.zeros(ELEMENTS, device="cuda")
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.mul(weights, 2, out=result)
    stream.synchronize()
    with torch.cuda.graph(graph):
        torch.mul(weights, 2, out=result)
    saver.pause()
    graph.replay()
    assert bool(result.isnan().all())
    saver.resume()
    graph.replay()
    assert bool((result == 2).all())


def test_a_late_copy_into_it_is_an_error_of_that_call() -> None:
    weights, host = in_region(torch.ones(ELEMENTS), enable_cpu_backup=True), torch.zeros(ELEMENTS)
    saver.pause()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="invalid argument"):
            weights.copy_(host)
    torch.cuda.synchronize()
    assert bool(weights.isnan().all())
    saver.resume()
    assert bool((weights == 1).all())
    weights.copy_(host)
    assert not weights.any()


@pytest.mark.outer
@pytest.mark.parametrize("preload", [False, True])
def test_a_late_write_of_a_kernel_is_a_fault(preload: bool) -> None:
    (done,) = run_programs([Program("late_write.py", environment=(("TMS_GUARD", "1"),), preload=preload)])
    output = done.check().output
    assert output.startswith("read -1\nwrite ")
    assert "illegal memory access" in output
    assert output.endswith("lost\n")


def test_what_was_not_kept_comes_back_as_the_guard_byte() -> None:
    lost, kept = in_region(torch.ones(ELEMENTS)), in_region(torch.ones(ELEMENTS), tag="b", enable_cpu_backup=True)
    preserved = in_region(torch.ones(4096))
    handle = saver.preserve(preserved)
    for _ in range(2):
        saver.pause()
        assert all(guard_bytes(tensor) for tensor in (lost, kept, preserved))
        saver.resume()
        assert guard_bytes(lost)
        assert bool((kept == 1).all())
        assert bool((preserved == 1).all())
        lost.fill_(1)
    handle.remove()
    saver.pause()
    saver.resume(zero=True)
    assert not lost.any()


def test_memory_and_statistics() -> None:
    tensor = torch.ones(16 * MIB, dtype=torch.uint8)
    tensors = [in_region(tensor, tag) for tag in "ab"]
    before = free_bytes()
    saver.pause("a")
    assert saver.stats().guard
    assert saver.stats().guarded_bytes == saver.stats().counters["paused_bytes"] > 0
    saver.pause()
    assert saver.stats().guarded_bytes >= 32 * MIB
    assert free_bytes() - before >= 28 * MIB  # all that is paused shows one page
    saver.resume()
    assert saver.stats().guarded_bytes == 0
    assert all(guard_bytes(each) for each in tensors)
    assert saver.stats().counters["guard_failures_total"] == 0


@pytest.mark.multigpu
def test_another_gpu_reads_nan() -> None:
    weights, other = in_region(torch.ones(ELEMENTS), enable_cpu_backup=True), torch.zeros(ELEMENTS, device="cuda:1")
    other.copy_(weights)
    saver.pause()
    other.copy_(weights)
    assert bool(other.isnan().all())
    with pytest.raises(RuntimeError, match="invalid argument"):
        weights.copy_(other)
    saver.resume()
    other.copy_(weights)
    assert bool((other == 1).all())
