"""The private corners of the C++ package that programs use, on the real thing."""

from __future__ import annotations

import ctypes
import sys

import pytest
from gpu_support import MIB, checksum, core, cuda_runtime, empty, fill_random, is_managed, saver, segment_of, torch

from torch_memory_saver import torch_layer


@pytest.fixture
def cdll() -> ctypes.CDLL:
    with saver.region():
        pass  # the first use makes _impl
    library: ctypes.CDLL = saver._impl._binary_wrapper.cdll
    library.tms_get_interesting_region.restype = ctypes.c_bool
    library.tms_get_current_tag.restype = ctypes.c_char_p
    library.tms_get_cpu_backup_pointer.restype = ctypes.c_void_p
    library.tms_get_cpu_backup_pointer.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
    library.tms_torch_malloc.restype = ctypes.c_void_p
    library.tms_torch_malloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    library.tms_torch_free.restype = None
    library.tms_torch_free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    return library


def test_settings_of_the_region_by_the_cdll(cdll: ctypes.CDLL) -> None:
    assert not cdll.tms_get_interesting_region()
    with saver.region(tag="weights"):
        assert cdll.tms_get_interesting_region()
        assert cdll.tms_get_current_tag() == b"weights"
        cdll.tms_set_current_tag(b"other")
        assert cdll.tms_get_current_tag() == b"other"
        cdll.tms_set_current_tag(b"weights")
        with saver.disable():
            assert not cdll.tms_get_interesting_region()
        assert cdll.tms_get_interesting_region()
    assert not cdll.tms_get_interesting_region()


def test_the_region_flag_around_allocations_inside_disable(cdll: ctypes.CDLL, mode: str) -> None:
    """As slime and miles do around DeepEP's buffers, which are allocated by cudaMalloc."""
    with saver.region(tag="weights"), saver.disable():
        preloaded = ctypes.CDLL(None)
        address = ctypes.c_void_p()
        before = core.counters()["allocations"]
        cdll.tms_set_interesting_region(True)
        try:
            if mode == "preload":
                assert preloaded.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(32 * MIB)) == 0
        finally:
            cdll.tms_set_interesting_region(False)
        assert not cdll.tms_get_interesting_region()
        tensor = empty(16 * MIB)
    assert not is_managed(tensor)
    if mode == "preload":
        assert core.counters()["allocations"] == before + 1
        assert core.find(int(address.value or 0)) is not None
        assert preloaded.cudaFree(address) == 0
        assert core.find(int(address.value or 0)) is None


def test_pause_and_resume_by_the_cdll(cdll: ctypes.CDLL) -> None:
    with saver.region(tag="weights", enable_cpu_backup=True):
        tensor = empty(16 * MIB)
    fill_random(tensor, 1)
    expected = checksum(tensor)
    host = tensor.cpu()
    torch.cuda.synchronize()
    assert cdll.tms_pause(ctypes.c_char_p(b"weights")) == 0
    assert segment_of(tensor)[5] == core.STATE_PAUSED
    pointer = cdll.tms_get_cpu_backup_pointer(tensor.data_ptr(), 16 * MIB)
    assert ctypes.string_at(pointer, 4096) == bytes(host[:4096].tolist())
    assert cdll.tms_resume(None) == 0
    assert checksum(tensor) == expected


def test_the_pluggable_allocators_entry_points(cdll: ctypes.CDLL) -> None:
    address = cdll.tms_torch_malloc(4 * MIB, 0, None)
    assert address
    assert core.find(address) is not None
    cdll.tms_torch_free(address, 4 * MIB, 0, None)
    assert core.find(address) is None


def test_cuda_malloc_of_other_libraries_is_managed_in_preload_mode(mode: str) -> None:
    if mode != "preload":
        pytest.skip("cudaMalloc is interposed in preload mode only")
    runtime = cuda_runtime()
    preloaded = ctypes.CDLL(None)
    address = ctypes.c_void_p()
    with saver.region(tag="weights", enable_cpu_backup=True):
        assert preloaded.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(32 * MIB)) == 0
    found = core.find(int(address.value or 0))
    assert found is not None
    assert (found[1], found[7], found[6]) == (32 * MIB, "weights", core.BACKUP_PINNED)
    assert runtime.cudaMemset(address, 7, ctypes.c_size_t(32 * MIB)) == 0
    assert saver.pause("weights").allocations == 1
    assert saver.resume("weights").allocations == 1
    host = (ctypes.c_uint8 * 4096)()
    assert runtime.cudaMemcpy(host, address, ctypes.c_size_t(4096), 2) == 0
    assert bytes(host) == b"\x07" * 4096
    assert preloaded.cudaFree(address) == 0
    assert preloaded.cudaFree(None) == 0
    ordinary = ctypes.c_void_p()
    assert preloaded.cudaMalloc(ctypes.byref(ordinary), ctypes.c_size_t(32 * MIB)) == 0
    assert core.find(int(ordinary.value or 0)) is None
    assert preloaded.cudaFree(ordinary) == 0
    assert preloaded.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(1 << 46)) == 2, "cudaErrorMemoryAllocation"
    runtime.cudaGetLastError()  # torch would take it for a failure of its own


def test_asking_torch_for_the_segments_of_a_pool_takes_no_references_away() -> None:
    """torch 2.11 gives away a reference of its caller's to each number of the pool's id: after some thousand questions the
    numbers, and False, would be destroyed while in use."""
    with saver.region():
        empty(2 * MIB)
    layer = torch_layer.loaded()
    assert layer is not None
    numbers = [int("1000001"), int("1000002")]  # objects of their own: constants would be shared
    before = [sys.getrefcount(number) for number in numbers]
    for _ in range(20):
        assert layer.segments((numbers[0], numbers[1])) == []
    lost = [earlier - sys.getrefcount(number) for earlier, number in zip(before, numbers, strict=True)]
    assert max(lost) <= 0
