"""Guards against damaged files, killed processes, lost devices, and random operations: nothing is lost and no process is
killed. The tests check states, bytes and contents."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest
from gpu_programs import Program, run_programs
from gpu_support import (
    LARGE,
    MIB,
    RANDOM_OPERATIONS,
    STARTED_PRELOADED,
    assert_close_to,
    checksum,
    core,
    empty,
    errors,
    fill_random,
    free_bytes,
    saver,
    state_of,
    tms,
)
from random_operations import Operations
from second_process import SecondProcess

# -- backup files ------------------------------------------------------------------------------------------------------


def backup_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix == ".backup")


@pytest.mark.parametrize("damage", ["truncated", "emptied", "first byte", "last byte", "middle"])
def test_a_backup_file_that_was_changed_never_reaches_the_device(damage: str, tmp_path: Path) -> None:
    saver.set_disk_backup_dir(str(tmp_path))
    with saver.region(tag="weights", enable_disk_backup=True):
        tensor = empty(LARGE // 2)
    fill_random(tensor, 7)
    expected = checksum(tensor)
    saver.pause("weights")
    (file,) = backup_files(tmp_path)
    assert file.stat().st_mode & 0o777 == 0o600
    size = file.stat().st_size
    assert size >= LARGE // 2
    kept = file.read_bytes()
    where = {"first byte": 0, "last byte": LARGE // 2 - 1, "middle": LARGE // 4}.get(damage)
    if where is None:
        os.truncate(file, 0 if damage == "emptied" else LARGE // 2 - 1)
    else:
        with file.open("r+b") as stream:
            stream.seek(where)
            stream.write(bytes([kept[where] ^ 1]))
    free = free_bytes()
    for _ in range(2):
        with pytest.raises(errors.BackupIOError, match="changed or truncated"):
            saver.resume("weights")
        assert state_of(tensor) == core.STATE_PAUSED
        assert_close_to(free_bytes(), free, "free memory", slack=4 * MIB)
    file.write_bytes(kept)
    del kept
    assert saver.resume("weights").allocations == 1
    assert checksum(tensor) == expected
    del tensor
    tms.empty_cache()
    assert backup_files(tmp_path) == []


def test_a_process_killed_in_the_middle_of_a_pause_leaves_files_that_the_next_one_removes(tmp_path: Path) -> None:
    """And only those: a live process keeps its own."""
    with SecondProcess() as alive:
        alive.do("directory", tmp_path)
        alive.do("allocate", "weights", 4 * MIB, "disk")
        alive.do("pause")
        (others,) = backup_files(tmp_path)
        arguments = (str(tmp_path), str(4 * LARGE))
        (killed,) = run_programs([Program("killed_in_pause.py", arguments, preload=STARTED_PRELOADED)])
        killed.check(-signal.SIGKILL)
        left = set(tmp_path.iterdir())
        assert set(backup_files(tmp_path)) > {others}, "the killed process has left a file"
        saver.set_disk_backup_dir(str(tmp_path))
        with saver.region(tag="weights", enable_disk_backup=True):
            tensor = empty(LARGE // 4)
        fill_random(tensor, 8)
        expected = checksum(tensor)
        saver.pause("weights")
        assert others in backup_files(tmp_path)
        assert len(backup_files(tmp_path)) == 2, "this process's and the living one's"
        assert len(left & set(tmp_path.iterdir())) == 2, "of what there was, the living one's lock and backup"
        saver.resume("weights")
        assert checksum(tensor) == expected
        alive.do("resume", 0, 0)
        alive.do("check")
    del tensor
    tms.empty_cache()
    assert backup_files(tmp_path) == []


# -- a device that is lost ---------------------------------------------------------------------------------------------


def lose(device: int) -> None:
    (done,) = run_programs([Program("lost_device.py", (str(device), "7"), preload=STARTED_PRELOADED)])
    done.check(7)
    print(done.output)
    assert done.output.endswith("ready\n")
    assert "torch_memory_saver" not in done.error, "the exit is silent"
    assert "terminate" not in done.error


def test_a_lost_device_is_an_exception_and_the_exit_is_silent() -> None:
    lose(0)


@pytest.mark.multigpu
def test_one_of_two_devices_is_lost() -> None:
    lose(1)


@pytest.mark.multigpu
def test_a_free_waits_for_one_device_although_the_other_is_lost() -> None:
    (done,) = run_programs([Program("lost_beside.py", preload=STARTED_PRELOADED)])
    print(done.check().output)
    assert done.output.endswith("waited\n")


# -- random operations -------------------------------------------------------------------------------------------------


@pytest.mark.timeout(600)
def test_random_operations(tmp_path: Path) -> None:
    """TMS_GPU_SEED repeats a run."""
    seed = int(os.environ.get("TMS_GPU_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"TMS_GPU_SEED={seed}")
    saver.set_disk_backup_dir(str(tmp_path))
    operations = Operations(seed)
    try:
        operations.run(RANDOM_OPERATIONS)
    except BaseException as error:
        raise AssertionError(f"TMS_GPU_SEED={seed}, after {operations.done}: {error!r}") from error
    finally:
        operations.close()
    print(f"{sum(operations.done.values())} operations, {operations.compared_bytes} bytes compared: {operations.done}")
    assert sum(operations.done.values()) >= RANDOM_OPERATIONS
    assert set(operations.done) == {"allocate", "write", "fill", "copy", "compare", "free", "pause", "resume"} | {
        "read_backup",
        "empty_cache",
        "retain",
    }
