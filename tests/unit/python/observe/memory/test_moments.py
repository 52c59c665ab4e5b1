"""Guards the folders of moments: the shared counter, and the removal of the oldest by several processes at once."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
from pathlib import Path

import pytest

from torch_memory_saver._files import write_file
from torch_memory_saver.errors import InvalidStateError
from torch_memory_saver.observe.memory import sampler as module
from torch_memory_saver.observe.memory.sampler import moment_folder, moments, next_moment, remove_oldest

PROCESSES, ROUNDS = 4, 25


def make(directory: Path, *steps: int) -> None:
    for step in steps:
        folder = moment_folder(directory, step)
        folder.mkdir(parents=True)
        (folder / "pid1.pickle").write_bytes(b"x")


def test_processes_that_sample_once_each_share_a_moment(tmp_path: Path) -> None:
    first = next_moment(tmp_path, None)
    assert first == 1
    assert next_moment(tmp_path, None) == 1, "the second process joins"
    assert next_moment(tmp_path, first) == 2, "the first one begins the next"
    assert next_moment(tmp_path, 1) == 2, "and the second one joins it"


def test_a_process_that_missed_moments_joins_the_one_under_way(tmp_path: Path) -> None:
    last = None
    for _ in range(5):
        last = next_moment(tmp_path, last)
    assert last == 5
    assert next_moment(tmp_path, 1) == 5


def test_a_lost_counter_does_not_begin_before_the_last_moment(tmp_path: Path) -> None:
    assert next_moment(tmp_path, next_moment(tmp_path, None)) == 2
    (tmp_path / ".moment").unlink()
    assert next_moment(tmp_path, 2) == 3


def test_a_counter_with_other_contents_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / ".moment").write_text("tomorrow")
    with pytest.raises(InvalidStateError, match=r"\.moment holds 'tomorrow' .*: remove it"):
        next_moment(tmp_path, None)


def is_free(path: Path) -> bool:
    """Whether another process could read the counter now."""
    with open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def test_a_second_process_waits_for_the_counter(tmp_path: Path) -> None:
    with module._locked(tmp_path / ".moment"):
        assert not is_free(tmp_path / ".moment")
    assert is_free(tmp_path / ".moment")


def _count(directory: str, queue: multiprocessing.queues.Queue[list[int]]) -> None:
    seen: list[int] = []
    for _ in range(ROUNDS):
        seen.append(next_moment(Path(directory), seen[-1] if seen else None))
    queue.put(seen)


def _start(target: object, *arguments: object) -> list[multiprocessing.process.BaseProcess]:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=target, args=arguments) for _ in range(PROCESSES)]  # type: ignore[arg-type]
    for process in processes:
        process.start()
    return list(processes)


def test_processes_that_count_at_once_see_every_moment_once(tmp_path: Path) -> None:
    queue: multiprocessing.queues.Queue[list[int]] = multiprocessing.get_context("fork").Queue()
    processes = _start(_count, str(tmp_path), queue)
    seen = [queue.get() for _ in processes]
    for process in processes:
        process.join()
    for one in seen:
        assert one == sorted(set(one)), "no process meets a moment twice"
    numbers = {number for one in seen for number in one}
    assert numbers == set(range(1, max(numbers) + 1)), "none is skipped by all"


def test_the_lock_is_given_up_although_a_forked_child_has_the_descriptor(tmp_path: Path) -> None:
    end, go_on = os.pipe()
    with module._locked(tmp_path / ".moment"):
        child = os.fork()
        if child == 0:
            os.close(go_on)
            os.read(end, 1)
            os._exit(0)
    try:
        assert is_free(tmp_path / ".moment")
    finally:
        os.close(go_on)
        os.waitpid(child, 0)
        os.close(end)


def test_the_lowest_steps_are_removed(tmp_path: Path) -> None:
    make(tmp_path, 7, 8, 100, 1_000_000)
    remove_oldest(tmp_path, 2, frozenset(), 1_000_000)
    assert moments(tmp_path) == [100, 1_000_000]
    assert sorted(os.listdir(tmp_path)) == ["step-000100", "step-1000000"]


def test_what_an_earlier_run_left_goes_first_and_the_current_moment_never(tmp_path: Path) -> None:
    make(tmp_path, 3, 498, 499, 500)
    remove_oldest(tmp_path, 3, frozenset({498, 499, 500}), 3)
    assert moments(tmp_path) == [3, 499, 500]
    remove_oldest(tmp_path, 1, frozenset({3, 499, 500}), 3)
    assert moments(tmp_path) == [3]


def test_other_folders_and_files_stay(tmp_path: Path) -> None:
    make(tmp_path, 1, 2)
    (tmp_path / "step-final").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    remove_oldest(tmp_path, 1, frozenset(), 2)
    assert sorted(os.listdir(tmp_path)) == ["notes.txt", "step-000002", "step-final"]


def test_an_interrupted_removal_is_finished(tmp_path: Path) -> None:
    make(tmp_path, 1)
    moment_folder(tmp_path, 1).rename(tmp_path / ".removed-1-4711")
    make(tmp_path, 2)
    remove_oldest(tmp_path, 5, frozenset(), 2)
    assert os.listdir(tmp_path) == ["step-000002"]


def _remove_repeatedly(directory: str) -> None:
    for step in range(ROUNDS):
        write_file({}, moment_folder(Path(directory), step) / f"pid{os.getpid()}.pickle", aside=Path(directory))
        remove_oldest(Path(directory), 2, frozenset(), step)


def test_processes_that_remove_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    processes = _start(_remove_repeatedly, str(tmp_path))
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * PROCESSES
    remove_oldest(tmp_path, 2, frozenset(), ROUNDS - 1)
    assert moments(tmp_path) == [ROUNDS - 2, ROUNDS - 1]
