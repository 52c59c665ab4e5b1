"""Guards when the entry of a region returns PyTorch's cache: where that may be needed, and seldom elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
from fake_torch import FakeTorch

from torch_memory_saver import _core
from torch_memory_saver.saver import TorchMemorySaver

MIB = 1 << 20
#: The device's memory.
TOTAL = 1000 * MIB


class Device:
    """A device whose free memory is what PyTorch's segments, and `other` memory, leave."""

    def __init__(self, torch: FakeTorch) -> None:
        self.torch = torch
        self.other = 0
        self.queries = 0
        self.returns = 0

    def memory(self, device: int) -> _core.DeviceMemory:
        self.queries += 1
        return _core.DeviceMemory((TOTAL - self.other - self.torch.reserved_bytes(device), TOTAL))

    def cache(self, size: int) -> None:
        """Has PyTorch cache that many bytes outside of regions."""
        missing = size - self.cached
        if missing > 0:
            idle = [row for row in self.torch.rows if not row.in_use]
            for row in idle:  # so that the allocation takes a new segment
                row.in_use = True
            self.torch.free(self.torch.allocate(missing))
            for row in idle:
                row.in_use = False

    @property
    def cached(self) -> int:
        return sum(row.size for row in self.torch.rows if not row.in_use and row.pool == (0, 0))


@pytest.fixture
def device(fake_torch: FakeTorch, monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device(fake_torch)
    real = fake_torch.empty_cache

    def empty_cache() -> None:
        before = made.cached
        real()
        made.returns += made.cached < before

    monkeypatch.setattr(fake_torch, "empty_cache", empty_cache)
    monkeypatch.setattr(_core, "device_memory", made.memory)
    return made


@pytest.fixture(params=["region", "disable"])
def enter(request: pytest.FixtureRequest, saver: TorchMemorySaver, fake_torch: FakeTorch, device: Device) -> Any:
    """Enters a region of tag "a", or disable() in a region. Returns how often the cache has been returned before the end,
    because the end of disable() returns it as well."""

    def enter() -> int:
        if request.param == "region":
            with saver.region("a"):
                return device.returns
        with saver.region("outer"), saver.disable():
            return device.returns

    with saver.region("outer"):
        pass
    return enter


@pytest.mark.parametrize(("cached", "returns"), [(11 * MIB, 1), (9 * MIB, 0)])
def test_the_first_region_returns_a_cache_of_more_than_a_hundredth(
    enter: Any, device: Device, cached: int, returns: int
) -> None:
    device.cache(cached)
    assert enter() == returns


def test_later_regions_leave_it(saver: TorchMemorySaver, device: Device) -> None:
    with saver.region("a"):
        pass
    device.cache(300 * MIB)
    with saver.region("a"):
        pass
    assert device.returns == 0
    with saver.region("b"):
        pass
    assert device.returns == 1, "each tag has a first region"


def test_a_later_region_gets_as_much_as_one_has_taken(
    saver: TorchMemorySaver, fake_torch: FakeTorch, device: Device
) -> None:
    with saver.region("a"):
        taken = fake_torch.allocate(200 * MIB)
    fake_torch.free(taken)
    with saver.region("a"):  # returns it
        fake_torch.free(fake_torch.allocate(MIB))
    device.other = 609 * MIB
    device.cache(190 * MIB)
    with saver.region("a"):
        pass
    assert device.returns == 0, "201 MiB are free"
    device.cache(192 * MIB)
    with saver.region("a"):
        fake_torch.allocate(200 * MIB)
    assert device.returns == 1, "199 MiB were"


def test_less_than_half_free_and_less_than_cached(saver: TorchMemorySaver, device: Device) -> None:
    with saver.region("a"):
        pass
    device.other = 399 * MIB
    device.cache(300 * MIB)
    with saver.region("a"):
        pass
    assert device.returns == 0, "301 MiB are free"
    device.other = 401 * MIB
    with saver.region("a"):
        pass
    assert device.returns == 1


@pytest.mark.parametrize("taken", [0, MIB, 200 * MIB, 400 * MIB])
def test_many_entries_return_it_once(saver: TorchMemorySaver, fake_torch: FakeTorch, device: Device, taken: int) -> None:
    """PyTorch caches 30 % of the device again before each; the tag holds what its first region has taken."""
    with saver.region("a"):
        kept = fake_torch.allocate(taken) if taken else 0
    for _ in range(10_000):
        device.cache(295 * MIB)
        with saver.region("a"):
            pass
    assert device.returns <= 1
    if taken:
        fake_torch.free(kept)


def test_many_entries_with_temporaries_return_it_once(
    saver: TorchMemorySaver, fake_torch: FakeTorch, device: Device
) -> None:
    for _ in range(1000):
        device.cache(300 * MIB)
        with saver.region("a"):
            fake_torch.free(fake_torch.allocate(2 * MIB))
    assert device.returns == 1
    assert device.cached == 300 * MIB


def test_a_return_in_vain_is_repeated_once_the_tag_holds_less(
    saver: TorchMemorySaver, fake_torch: FakeTorch, device: Device
) -> None:
    with saver.region("a"):
        kept = fake_torch.allocate(400 * MIB)
    for _ in range(2):
        device.cache(250 * MIB)
        with saver.region("a"):
            pass
    assert device.returns == 1
    fake_torch.free(kept)
    saver.empty_cache()
    device.cache(650 * MIB)
    with saver.region("a"):
        fake_torch.allocate(400 * MIB)
    assert device.cached == 0


def test_a_tag_whose_memory_was_returned_begins_anew(saver: TorchMemorySaver, fake_torch: FakeTorch, device: Device) -> None:
    with saver.region("a"):
        taken = fake_torch.allocate(100 * MIB)
    fake_torch.free(taken)
    saver.empty_cache()
    device.cache(190 * MIB)
    with saver.region("a"):
        pass
    assert device.returns == 1


def test_inner_regions_query_nothing(saver: TorchMemorySaver, device: Device) -> None:
    with saver.region("a"):
        before = device.queries
        with saver.region("a"), saver.region("b"):
            pass
        assert device.queries == before


def test_nothing_is_returned_during_a_capture(saver: TorchMemorySaver, fake_torch: FakeTorch, device: Device) -> None:
    device.cache(300 * MIB)
    with fake_torch.capture(fake_torch.torch.cuda.CUDAGraph(), fake_torch.make_pool(0, False).id, None, "global"):
        with saver.region("a"):
            pass
        assert device.returns == 0
