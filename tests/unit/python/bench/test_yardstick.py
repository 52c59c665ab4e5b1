"""Guards the yardsticks of pause and resume on the bare driver: they copy all contents, keep them, and name failures."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from torch_memory_saver._bench import core_calls, driver, staged_copy, yardstick

MIB = 1 << 20


def test_no_yardstick_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for compiler, words in ((str(tmp_path / "none"), "could not be started"), ("false", "false failed")):
        yardstick._load.cache_clear()
        monkeypatch.setenv("CC", compiler)
        with pytest.raises(yardstick.NoYardstick, match=words):
            yardstick.open_driver(0)
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    yardstick._load.cache_clear()
    with pytest.raises(yardstick.NoYardstick, match="there is no C compiler"):
        yardstick.open_driver(0)
    yardstick._load.cache_clear()


@pytest.fixture
def own_context(simulator: Any) -> Iterator[None]:
    """A context that a test makes current on this thread is popped afterwards."""
    simulator.library.cuCtxSetCurrent.argtypes = [ctypes.c_void_p]
    yield
    assert simulator.library.cuCtxSetCurrent(None) == 0


@pytest.mark.usefixtures("own_context")
def test_the_limit_copies_all_contents(simulator: Any) -> None:
    device = driver.Device(0)
    copy = driver.PinnedCopy(device, 6 * MIB, 4 * MIB)
    assert copy.host.pieces() == [(0, 4 * MIB), (4 * MIB, 2 * MIB)]
    assert simulator.usage().host_bytes == 6 * MIB
    simulator.write(copy._address, bytes([7]) * (6 * MIB))
    copy.out()
    assert simulator.read(copy.host.address, 6 * MIB) == bytes([7]) * (6 * MIB)
    simulator.write(copy._address, bytes([9]) * (6 * MIB))
    copy.back_and_release()
    assert simulator.read(copy._address, 6 * MIB) == bytes([7]) * (6 * MIB)
    assert simulator.usage().host_bytes == 0
    copy.close()
    assert simulator.usage().runtime_allocations == 0
    other = driver.PinnedCopy(device, 4 * MIB)
    assert other.host.pieces() == [(0, 4 * MIB)]
    other.close()
    assert (simulator.usage().host_bytes, simulator.usage().runtime_allocations) == (0, 0)


@pytest.mark.usefixtures("own_context")
def test_copies_through_buffers_round_trip(monkeypatch: pytest.MonkeyPatch, simulator: Any) -> None:
    monkeypatch.setattr(staged_copy, "_BUFFER_BYTES", MIB)
    monkeypatch.setattr(staged_copy, "_BUFFERS", 3)
    size = 8 * MIB + 4096
    before = simulator.usage()
    staged = staged_copy.StagedCopy(driver.Device(0), size)
    assert simulator.usage().host_bytes == before.host_bytes + 3 * MIB, "only the buffers"
    for _ in range(2):
        contents = os.urandom(size)
        simulator.write(staged._address, contents)
        staged.out()
        assert staged.host is not None
        assert ctypes.string_at(staged.host.address, size) == contents
        simulator.write(staged._address, bytes(size))
        staged.back()
        assert simulator.read(staged._address, size) == contents
        assert staged.host is None
    staged.close()
    left = simulator.usage()
    assert (left.host_bytes, left.runtime_allocations) == (before.host_bytes, before.runtime_allocations)


@pytest.mark.usefixtures("own_context")
@pytest.mark.parametrize("last", [None, 10 * MIB])
def test_a_bare_first_pause_keeps_contents(simulator: Any, last: int | None) -> None:
    """Pieces of 64 MiB that begin in the middle of allocations, and one that is smaller. The last allocation may be, too."""
    driver.Device(0)
    before, calls = simulator.usage(), simulator.calls("cuMemHostRegister")
    size, count = 40 * MIB, 4
    total = size * (count - 1) + (last or size)
    bare = yardstick.BareAllocations(count, size, last=last)
    contents = os.urandom(1 << 20) * (total // MIB - 1) + os.urandom(1 << 20)
    source = driver.HostMemory(len(contents))
    ctypes.memmove(source.address, contents, len(contents))
    for _ in range(2):
        bare.resume_with_contents(source.address)
        address = bare.first_pause()
        assert ctypes.string_at(address, len(contents)) == contents
        assert simulator.usage().host_bytes == before.host_bytes + 2 * len(contents)
        assert simulator.usage().physical_bytes == before.physical_bytes
        bare.forget_host()
    bare.close()
    source.close()
    after = simulator.usage()
    assert (after.host_bytes, after.physical_bytes) == (before.host_bytes, before.physical_bytes)
    assert simulator.calls("cuMemHostRegister") == calls + 1 + 2 * 3


@pytest.mark.usefixtures("own_context")
def test_the_bare_calls_keep_contents(simulator: Any) -> None:
    driver.Device(0)
    before = simulator.usage()
    bare = yardstick.BareAllocations(3, 2 * MIB)
    host = driver.HostMemory(6 * MIB)
    contents = os.urandom(6 * MIB)
    simulator.write(host.address, contents)
    bare.resume_with_contents(host.address)
    assert simulator.usage().physical_bytes == before.physical_bytes + 6 * MIB
    ctypes.memset(host.address, 0, 6 * MIB)
    bare.pause_with_contents(host.address)
    assert ctypes.string_at(host.address, 6 * MIB) == contents
    assert simulator.usage().physical_bytes == before.physical_bytes
    bare.close()
    host.close()
    assert simulator.usage().host_bytes == before.host_bytes


@pytest.mark.usefixtures("own_context")
@pytest.mark.parametrize("total", [2 * MIB, 4 * MIB, 10 * MIB])
def test_few_large_handles_for_as_many_bytes(monkeypatch: pytest.MonkeyPatch, simulator: Any, total: int) -> None:
    monkeypatch.setattr(yardstick, "LARGE_HANDLE", 4 * MIB)
    driver.Device(0)
    before, made = simulator.usage(), simulator.calls("cuMemCreate")
    bare, notes = yardstick.bare_large_handles(total, 0)
    assert bare is not None
    assert notes == ""
    for cycle in range(1, 3):
        bare.resume()
        assert simulator.usage().physical_bytes == before.physical_bytes + total
        assert simulator.calls("cuMemCreate") == made + cycle * -(-total // (4 * MIB))
        bare.pause()
        assert simulator.usage().physical_bytes == before.physical_bytes
    bare.close()


@pytest.mark.usefixtures("own_context")
def test_the_core_allocates_and_frees_in_loops(simulator: Any) -> None:
    driver.Device(0)
    before = simulator.usage()
    core = core_calls.CoreCalls(0)
    addresses, seconds = core.allocate(3, 2 * MIB)
    assert len(set(addresses)) == 3
    assert seconds > 0
    assert simulator.usage().physical_bytes == before.physical_bytes + 6 * MIB
    assert core.free(addresses[1:]) > 0
    assert simulator.usage().physical_bytes == before.physical_bytes + 2 * MIB
    with pytest.raises(driver.DriverFailure, match="the loop free failed with 3"):
        core.free(addresses)
    assert simulator.usage().physical_bytes == before.physical_bytes, "the first of them was freed"
    simulator.fail_after("cuMemCreate", 0, 1, 2)
    with pytest.raises(driver.DriverFailure, match="the loop allocate failed with 4"):
        core.allocate(1, 2 * MIB)


@pytest.mark.usefixtures("own_context")
def test_failures_of_the_driver_have_names(simulator: Any) -> None:
    simulator.fail_after("cuMemHostRegister", 0, 1, 2)
    with pytest.raises(driver.DriverFailure, match="cuMemHostRegister_v2 failed with CUDA_ERROR_OUT_OF_MEMORY"):
        driver.HostMemory(4 * MIB)
    with pytest.raises(driver.DriverFailure, match="could not be mapped"):
        driver.HostMemory(1 << 60)


def test_using_memory_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    touched = []
    monkeypatch.setattr(driver, "_STEP_BYTES", 4 * MIB)
    monkeypatch.setattr(driver, "touch", lambda address, size: touched.append(size))
    driver.use_memory(10 * MIB)
    assert touched == [4 * MIB] * 3
    monkeypatch.setattr(driver, "_STEP_BYTES", 1 << 60)
    monkeypatch.setattr(driver, "_GROWING_S", 0.0)
    driver.use_memory(1 << 61)
    assert len(touched) == 3, "there is not as much"
