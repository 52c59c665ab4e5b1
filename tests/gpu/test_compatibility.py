"""Guards the private interfaces of the C++ package that programs use, with PyTorch."""

from __future__ import annotations

import ctypes
import gc
import sys

import pytest
from gpu_support import (
    MIB,
    checksum,
    core,
    cuda_runtime,
    empty,
    fill_random,
    is_managed,
    saver,
    segment_of,
    tms,
    torch,
)
from settling import wait_for_host_memory

from torch_memory_saver._torch.binding import layer


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
    """As slime and miles do around DeepEP's buffers, which cudaMalloc allocates."""
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
    assert segment_of(tensor).state == core.STATE_PAUSED
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
        pytest.skip("only in hook mode preload: cudaMalloc is interposed")
    runtime = cuda_runtime()
    preloaded = ctypes.CDLL(None)
    address = ctypes.c_void_p()
    with saver.region(tag="weights", enable_cpu_backup=True):
        assert preloaded.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(32 * MIB)) == 0
    found = core.find(int(address.value or 0))
    assert found is not None
    assert (found.bytes, found.tag, found.backup) == (32 * MIB, "weights", core.BACKUP_PINNED)
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


def test_querying_torch_for_the_segments_of_a_pool_drops_no_references() -> None:
    """torch 2.11 drops a caller's reference to each number of the pool's id: after some thousand calls the numbers, and
    False, would be destroyed while in use."""
    with saver.region():
        empty(2 * MIB)
    torch_layer = layer.loaded()
    assert torch_layer is not None
    numbers = [int("1000001"), int("1000002")]  # objects of their own: constants would be shared
    before = [sys.getrefcount(number) for number in numbers]
    for _ in range(20):
        assert torch_layer.segments((numbers[0], numbers[1])) == []
    lost = [earlier - sys.getrefcount(number) for earlier, number in zip(before, numbers, strict=True)]
    assert max(lost) <= 0


def retained_backup(device: int) -> tuple[torch.Tensor, int]:
    """A tensor whose backup stays after a resume, and the backup's address."""
    expected = torch.arange(4096, dtype=torch.int64) + device
    with torch.cuda.device(device), saver.region(tag="retained", enable_cpu_backup=True):
        tensor = expected.to(device)
    saver.retain_cpu_backup = True
    saver.pause("retained")
    backup = saver.get_cpu_backup(tensor, zero_copy=True)
    assert torch.equal(backup, expected)
    address = backup.data_ptr()
    del backup
    saver.resume("retained")
    backup = saver.get_cpu_backup(tensor, zero_copy=True)
    assert backup.data_ptr() == address
    assert torch.equal(tensor.cpu(), expected)
    return tensor, address


@pytest.mark.parametrize("paused", [False, True])
def test_a_removed_pool_releases_its_memory_and_backups(paused: bool) -> None:
    tensor, _ = retained_backup(0)
    if paused:
        saver.pause("retained")
    pool = saver._impl._mem_pools.pop(("retained", True, False, "pinned", 0))
    assert isinstance(pool, torch.cuda.MemPool)
    assert core.counters()["host_backup_bytes"] > 0
    with saver._impl._with_region_config(tag="retained", enable_cpu_backup=True, cpu_backup_backend="pinned"):
        del tensor, pool
        gc.collect()
        torch.cuda.empty_cache()
    counters = core.counters()
    assert (counters["allocations"], counters["host_backup_bytes"]) == (0, 0)


def test_the_cdll_has_the_runtimes_functions(cdll: ctypes.CDLL) -> None:
    """The C++ package's library is linked to the runtime; programs use it to query whether a backup is still pinned."""
    get_flags = cdll.cudaHostGetFlags
    get_flags.argtypes = [ctypes.POINTER(ctypes.c_uint), ctypes.c_void_p]

    def is_pinned(address: int) -> bool:
        flags = ctypes.c_uint()
        status: int = get_flags(ctypes.byref(flags), address)
        if status != 0:
            cdll.cudaGetLastError()
        return status == 0

    tensor, address = retained_backup(0)
    assert is_pinned(address)
    del tensor
    gc.collect()
    tms.empty_cache()
    wait_for_host_memory(core)
    assert not is_pinned(address)


def test_the_cdll_uses_the_runtime_that_torch_uses(cdll: ctypes.CDLL) -> None:
    device = ctypes.c_int(-1)
    torch.cuda.set_device(torch.cuda.device_count() - 1)
    try:
        assert cdll.cudaGetDevice(ctypes.byref(device)) == 0
    finally:
        torch.cuda.set_device(0)
    assert device.value == torch.cuda.device_count() - 1


def test_memory_is_printed_as_the_driver_reports_it(capsys: pytest.CaptureFixture[str]) -> None:
    from torch_memory_saver import testing_utils

    assert testing_utils.is_xpu() is False
    before = testing_utils.get_and_print_gpu_memory("before", gpu_id=0)
    with saver.region(tag="weights"):
        tensor = empty(64 * MIB)
    torch.cuda.synchronize()
    after = testing_utils.get_and_print_gpu_memory("after", gpu_id=0)
    assert after - before >= 64 * MIB
    assert "(before)" in capsys.readouterr().out
    saver.pause("")
    assert testing_utils._xpu_used_memory(0) <= after - 64 * MIB
    saver.resume("")
    assert is_managed(tensor)


def test_memory_cached_at_a_pause_is_not_restored() -> None:
    """The one intended difference: the C++ package maps everything again, cached memory too."""
    with saver.region(tag="weights"):
        kept = empty(32 * MIB)
        cached = empty(64 * MIB)
    del cached
    assert core.counters()["resident_bytes"] == 96 * MIB
    report = saver.pause("weights")
    assert report.bytes == 32 * MIB
    assert saver.resume("weights").bytes == 32 * MIB
    assert core.counters()["resident_bytes"] == 32 * MIB
    assert is_managed(kept)
