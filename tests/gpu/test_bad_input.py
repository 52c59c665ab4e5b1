"""Guards that bad input raises a named exception with a remedy, and changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_support import (
    MIB,
    checksum,
    core,
    empty,
    errors,
    fill_random,
    saver,
    state_of,
    tms,
    torch,
    write_and_check,
)

Refused = (TypeError, ValueError, RuntimeError)


@pytest.mark.parametrize(
    "settings",
    [
        {"enable_cpu_backup": True, "enable_disk_backup": True},
        {"enable_cpu_backup": True, "cpu_backup_backend": "paper"},
        {"cpu_backup_backend": "pinned"},
    ],
    ids=["both backups", "unknown backend", "backend without backup"],
)
def test_invalid_region_settings(settings: dict[str, object]) -> None:
    with pytest.raises(errors.TorchMemorySaverError), saver.region(tag="weights", **settings):  # type: ignore[arg-type]
        pass
    assert core.region_current().depth == 0
    with saver.region(tag="weights"):
        tensor = empty(2 * MIB)
    write_and_check(tensor, 1)


def test_disable_outside_a_region() -> None:
    with pytest.raises(errors.TorchMemorySaverError), saver.disable():
        pass
    assert core.region_current().depth == 0


def test_hook_mode_is_checked_and_fixed_after_the_first_use(mode: str) -> None:
    with saver.region(tag="weights"):
        tensor = empty(2 * MIB)
    assert saver.enabled
    assert saver.hook_mode == mode
    with pytest.raises(errors.TorchMemorySaverError):
        saver.hook_mode = "carrier pigeon"
    if mode == "torch":
        with pytest.raises(errors.TorchMemorySaverError):
            saver.hook_mode = "preload"
    else:
        saver.hook_mode = "torch"  # as Megatron-LM does at import, in processes that SGLang has preloaded and used
    assert saver.hook_mode == mode
    write_and_check(tensor, 1)


def test_a_disk_directory_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("not a directory")
    saver.set_disk_backup_dir(str(tmp_path / "made when needed"))
    with pytest.raises(errors.BackupIOError, match="create its parent directories first"):
        saver.set_disk_backup_dir(str(tmp_path / "misspelled" / "backups"))
    with pytest.raises(errors.TorchMemorySaverError):
        saver.set_disk_backup_dir(str(file / "below"))
    with saver.region(tag="weights", enable_disk_backup=True):
        tensor = empty(16 * MIB)
    fill_random(tensor, 1)
    expected = checksum(tensor)
    saver.pause("weights")
    saver.resume("weights")
    assert checksum(tensor) == expected


def test_foreign_and_interior_addresses() -> None:
    ordinary = empty(2 * MIB)
    assert core.free(ordinary.data_ptr()) is False
    assert core.find(ordinary.data_ptr()) is None
    write_and_check(ordinary, 1)
    address = core.allocate(4 * MIB)
    with pytest.raises(errors.InvalidArgumentError):
        core.free(address + 2 * MIB)
    assert core.find(address) is not None
    assert core.free(address)


def test_get_cpu_backup_arguments() -> None:
    with saver.region(tag="weights", enable_cpu_backup=True):
        tensor = empty(2 * MIB)
    tensor.fill_(6)
    saver.pause("weights")
    for wrong in (torch.zeros(4), 5, None, tensor[::2]):
        with pytest.raises(Refused):
            saver.get_cpu_backup(wrong)  # type: ignore[arg-type]
    assert state_of(tensor) == core.STATE_PAUSED
    saver.resume("weights")
    assert bool((tensor == 6).all())


def test_a_device_that_does_not_exist() -> None:
    before = core.counters()["allocations"]
    with pytest.raises(errors.TorchMemorySaverError):
        core.allocate(2 * MIB, torch.cuda.device_count())
    assert core.counters()["allocations"] == before


def test_the_module_has_the_functions_of_the_singleton() -> None:
    assert tms.torch_memory_saver is tms.memory_saver
    with tms.region(tag="weights"):
        tensor = empty(2 * MIB)
    assert tms.pause("weights").allocations == 1
    assert tms.resume("weights").allocations == 1
    write_and_check(tensor, 1)
