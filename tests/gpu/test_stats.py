"""Guards stats(), snapshot() and tag_of() with PyTorch's tensors: bytes by tag and device, peaks, and what they print."""

from __future__ import annotations

import json

import pytest
from gpu_support import MIB, errors, free_bytes, saver, torch

SIZE = 32 * MIB


def filled(tag: str, size: int = SIZE, **settings: bool) -> torch.Tensor:
    with saver.region(tag, **settings):
        return torch.ones(size, dtype=torch.uint8, device="cuda")


def test_a_cycle_in_numbers() -> None:
    kept, dropped = filled("kept", enable_cpu_backup=True), filled("dropped")
    saver.reset_peaks()
    before = saver.stats()
    assert before.total.resident_bytes == before.total.resident_peak_bytes == 2 * SIZE
    free = free_bytes()
    saver.pause()
    paused = saver.stats()
    assert free_bytes() - free >= paused.total.paused_bytes - 4 * MIB
    assert (paused.total.resident_bytes, paused.total.paused_bytes) == (0, 2 * SIZE)
    assert paused.tags["kept"].backup_bytes == SIZE and paused.tags["dropped"].backup_bytes == 0
    assert paused.devices[0].paused_bytes == 2 * SIZE
    assert paused.pauses.bytes - before.pauses.bytes == 2 * SIZE
    assert paused.pauses.copied_bytes - before.pauses.copied_bytes == SIZE
    saver.resume("kept")
    stats = saver.stats(["kept"], device=torch.device("cuda:0"))
    assert (stats.total.resident_bytes, stats.total.paused_bytes) == (SIZE, 0)
    assert [row.address for row in stats.allocations] == [kept.data_ptr()]
    saver.resume()
    assert saver.stats().total.resident_peak_bytes == 2 * SIZE
    assert str(saver.stats()).splitlines()[0].split()[:3] == ["MiB", "allocations", "resident"]
    del dropped


def test_a_device_without_an_ordinal_is_the_current_one() -> None:
    tensor = filled("a")
    stats = saver.stats(device=torch.device("cuda"))
    assert [row.address for row in stats.allocations] == [tensor.data_ptr()]
    assert list(stats.devices) == [torch.cuda.current_device()]


def test_a_snapshot_says_where_a_tensor_lies() -> None:
    tensor = filled("a")
    saver.pause()
    (segment,) = json.loads(json.dumps(saver.stats().as_dict()))["allocations"]
    assert segment["address"] <= tensor.data_ptr() < segment["address"] + segment["reserved_bytes"]
    assert (segment["tag"], segment["state"]) == ("a", "paused")
    saver.resume()


def test_the_tag_of_a_tensor() -> None:
    tensor, ordinary = filled("weights"), torch.ones(4, device="cuda")
    assert saver.tag_of(tensor) == saver.tag_of(tensor[8:].view(torch.int64)) == "weights"
    assert saver.tag_of(ordinary) is saver.tag_of(torch.ones(4)) is None
    saver.pause()
    assert saver.tag_of(tensor) == "weights"
    saver.resume()
    with pytest.raises(errors.InvalidArgumentError, match=r"tag_of\(\) needs a torch.Tensor, not list"):
        saver.tag_of([tensor])


@pytest.mark.multigpu
def test_devices_apart() -> None:
    tensors = []
    for device in range(2):
        with torch.cuda.device(device):
            tensors.append(filled("a", (device + 1) * SIZE))
    saver.reset_peaks()
    stats = saver.stats()
    assert {number: usage.resident_bytes for number, usage in stats.devices.items()} == {0: SIZE, 1: 2 * SIZE}
    assert {number: usage.resident_peak_bytes for number, usage in stats.devices.items()} == {0: SIZE, 1: 2 * SIZE}
    assert saver.stats(device=1).total.resident_bytes == 2 * SIZE
    saver.pause()
    assert saver.stats("a", device=1).total.paused_bytes == 2 * SIZE
    saver.resume()
