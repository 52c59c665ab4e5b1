"""Guards when the entry of a region returns PyTorch's cache: where that may be needed, and seldom elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pooled_tensors import MIB, empty

from torch_memory_saver import _core
from torch_memory_saver import torch_memory_saver as saver
from torch_memory_saver._torch.binding import layer
from torch_memory_saver._torch.routing.entry_room import EntryRoom

pytestmark = pytest.mark.usefixtures("clean_device")

#: Bytes of memory that the device appears to have.
TOTAL = 1000 * MIB


class Device:
    """A device whose free memory is what PyTorch's segments, and `other` memory, leave."""

    def __init__(self) -> None:
        self.other = 0
        self.queries = 0
        self.returns = 0
        self._before = 0
        self._before = self.cached

    def memory(self, device: int) -> Any:
        used = self.other + layer.require().reserved_bytes(0) - self._before if device == 0 else 0
        self.queries += device == 0
        return _core.DeviceMemory((TOTAL - used, TOTAL))  # type: ignore[call-arg, arg-type]

    @property
    def cached(self) -> int:
        """Return the ordinary memory that PyTorch has taken since the test began. No test keeps an ordinary tensor."""
        counters = _core.counters()
        managed = counters["resident_bytes"] + counters["paused_bytes"]
        return layer.require().reserved_bytes(0) - managed - self._before

    def cache(self, size: int) -> None:
        """Have PyTorch cache that many bytes outside of regions."""
        if self.cached != size:
            torch._C._cuda_emptyCache()
            empty(size)
            assert self.cached == size


@pytest.fixture
def device(store: Any, monkeypatch: pytest.MonkeyPatch) -> Device:
    found = layer.require()
    made = Device()
    real, releasable = found.empty_cache, found.releasable_bytes
    # Pools of workspaces, which earlier tests have made, keep idle memory that no emptying returns.
    kept = releasable(0)

    def empty_cache() -> None:
        before = made.cached
        real()
        made.returns += made.cached < before

    monkeypatch.setattr(found, "empty_cache", empty_cache)
    monkeypatch.setattr(found, "releasable_bytes", lambda device: releasable(device) - (kept if device == 0 else 0))
    monkeypatch.setattr(_core, "device_memory", made.memory)
    monkeypatch.setattr(store.regions, "room", EntryRoom())
    return made


@pytest.fixture(params=["region", "disable"])
def enter(request: pytest.FixtureRequest, tag: str, device: Device) -> Callable[[], int]:
    """Enter a region of the tag, or disable() in a region. Return how often the cache has been returned before the end,
    because the end of disable() returns it as well."""

    def enter() -> int:
        if request.param == "region":
            with saver.region(tag):
                return device.returns
        with saver.region("outer"), saver.disable():
            return device.returns

    with saver.region("outer"):
        pass
    return enter


@pytest.mark.parametrize(("cached", "returns"), [(12 * MIB, 1), (8 * MIB, 0)])
def test_the_first_region_returns_a_cache_of_more_than_a_hundredth(
    enter: Callable[[], int], device: Device, cached: int, returns: int
) -> None:
    if cached < 10 * MIB:  # small tensors, two in each segment
        tensors = [empty(MIB) for _ in range(cached // MIB)]
        tensors.clear()
    else:
        device.cache(cached)
    assert device.cached == cached
    assert enter() == returns


def test_later_regions_leave_it(tag: str, device: Device) -> None:
    with saver.region(tag):
        pass
    device.cache(300 * MIB)
    with saver.region(tag):
        pass
    assert device.returns == 0
    with saver.region(f"{tag}/b"):
        pass
    assert device.returns == 1, "each tag has a first region"


def test_a_later_region_gets_as_much_as_one_has_taken(tag: str, device: Device) -> None:
    with saver.region(tag):
        taken = empty(200 * MIB)
    del taken
    with saver.region(tag):  # returns it
        empty(20 * MIB)
    device.other = 610 * MIB
    device.cache(190 * MIB)
    with saver.region(tag):
        pass
    assert device.returns == 0, "200 MiB are free"
    device.cache(192 * MIB)
    with saver.region(tag):
        assert empty(200 * MIB).numel()
    assert device.returns == 1, "198 MiB were"


def test_less_than_half_free_and_less_than_cached(tag: str, device: Device) -> None:
    with saver.region(tag):
        pass
    device.other = 399 * MIB
    device.cache(300 * MIB)
    with saver.region(tag):
        pass
    assert device.returns == 0, "301 MiB are free"
    device.other = 401 * MIB
    with saver.region(tag):
        pass
    assert device.returns == 1


@pytest.mark.parametrize("taken", [0, 200 * MIB, 400 * MIB])
def test_many_entries_return_it_once(tag: str, device: Device, taken: int) -> None:
    """PyTorch caches 30 % of the device again before each; the tag holds what its first region has taken."""
    with saver.region(tag):
        kept = empty(taken) if taken else None
    for _ in range(10_000):
        device.cache(296 * MIB)
        with saver.region(tag):
            pass
    assert device.returns <= 1
    del kept


def test_many_entries_with_temporaries_return_it_once(tag: str, device: Device) -> None:
    for _ in range(1000):
        device.cache(300 * MIB)
        with saver.region(tag):
            empty(20 * MIB)
    assert device.returns == 1
    assert device.cached == 300 * MIB


def test_a_return_in_vain_is_repeated_once_the_tag_holds_less(tag: str, device: Device) -> None:
    with saver.region(tag):
        kept = empty(400 * MIB)
    for _ in range(2):
        device.cache(250 * MIB)
        with saver.region(tag):
            pass
    assert device.returns == 1
    del kept
    saver.empty_cache()
    device.cache(650 * MIB)
    with saver.region(tag):
        kept = empty(400 * MIB)
    assert device.cached == 0
    del kept


def test_a_tag_whose_memory_was_returned_begins_again(tag: str, device: Device) -> None:
    with saver.region(tag):
        taken = empty(100 * MIB)
    del taken
    saver.empty_cache()
    device.cache(190 * MIB)
    with saver.region(tag):
        pass
    assert device.returns == 1


def test_inner_regions_query_nothing(tag: str, device: Device) -> None:
    with saver.region(tag):
        before = device.queries
        with saver.region(tag), saver.region(f"{tag}/b"):
            pass
        assert device.queries == before
