"""Guards pause(backup="discard") of memory that is paused already: reports, hooks, events, and calls at the same time."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from recorded_hooks import SIZE, TIMEOUT_S, Recorder

from torch_memory_saver import _core, errors
from torch_memory_saver.observe.events import events


def write(simulator: Any, addresses: list[int]) -> None:
    for address in addresses:
        simulator.write(address, b"\x07" * SIZE)


def read(simulator: Any, addresses: list[int]) -> set[bytes]:
    return {simulator.read(address, SIZE) for address in addresses}


@pytest.fixture
def lost(hooks: Recorder, simulator: Any, tmp_path: Path) -> list[int]:
    """Two paused allocations of the tag "w" with a backup on disk. The file of one was deleted."""
    hooks.saver.set_disk_backup_dir(tmp_path)
    addresses = hooks.allocate("w", "w", backup=_core.BACKUP_DISK)
    write(simulator, addresses)
    hooks.saver.pause()
    min(tmp_path.glob("*.backup")).unlink()
    return addresses


def test_the_error_of_the_resume_says_what_to_do(hooks: Recorder, simulator: Any, lost: list[int]) -> None:
    for _ in range(2):
        with pytest.raises(errors.BackupIOError, match=r'pause\(tag, backup="discard"\) gives them up'):
            hooks.saver.resume(hooks.tag("w"))
    assert hooks.states() == {_core.STATE_PAUSED}
    report = hooks.saver.pause(hooks.tag("w"), backup="discard")
    assert (report.allocations, report.bytes, report.copied_bytes, report.unknown_tags) == (0, 0, 0, 0)
    assert hooks.saver.stats().total.backup_bytes == hooks.saver.stats().counters["disk_backup_bytes"] == 0
    assert hooks.saver.resume(zero=True).copied_bytes == 0
    assert read(simulator, lost) == {bytes(SIZE)}


def test_a_pending_resume_says_it_as_well(hooks: Recorder, lost: list[int]) -> None:
    with pytest.raises(errors.BackupIOError, match='backup="discard"'):
        hooks.saver.resume(wait=False).wait()


def test_other_pauses_leave_backups_alone(hooks: Recorder, simulator: Any) -> None:
    addresses = hooks.allocate("w", backup=_core.BACKUP_PINNED)
    write(simulator, addresses)
    for backup in (None, "host", "disk"):
        hooks.saver.pause(backup=backup)
    hooks.saver.pause(hooks.tag("other"), backup="discard")
    hooks.saver.resume()
    assert read(simulator, addresses) == {b"\x07" * SIZE}


def test_no_hook_is_called_for_what_is_paused_already(hooks: Recorder) -> None:
    hooks.allocate("w", backup=_core.BACKUP_PINNED)
    hooks.saver.pause()
    hooks.on_pause("p")
    hooks.saver.pause(backup="discard")
    assert hooks.take_events() == []
    hooks.allocate("w")
    hooks.saver.pause(backup="discard")
    assert hooks.received["p", "before"].allocations == 1


def test_a_discard_is_counted_and_logs_no_warning(
    hooks: Recorder, lost: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    before = hooks.saver.stats().counters["pauses_total"]
    hooks.saver.pause(backup="discard")
    assert hooks.saver.stats().counters["pauses_total"] == before + 1
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


def test_a_resume_that_goes_on_comes_first(hooks: Recorder, simulator: Any, pool: ThreadPoolExecutor) -> None:
    """The pause waits for it, and then finds resident memory."""
    addresses = hooks.allocate("w", backup=_core.BACKUP_PINNED)
    write(simulator, addresses)
    hooks.saver.pause()
    reached, opened = threading.Event(), threading.Event()

    def progress(done: int, total: int) -> None:
        reached.set()
        assert opened.wait(TIMEOUT_S)

    resumed = pool.submit(lambda: hooks.saver.resume(progress=progress))
    assert reached.wait(TIMEOUT_S)
    paused = pool.submit(lambda: hooks.saver.pause(backup="discard"))
    opened.set()
    assert resumed.result(TIMEOUT_S).allocations == 1
    paused.result(TIMEOUT_S)
    hooks.saver.pause(backup="discard")
    hooks.saver.resume(zero=True)
    assert read(simulator, addresses) == {bytes(SIZE)}


def test_the_events_show_it(hooks: Recorder) -> None:
    hooks.allocate("w", backup=_core.BACKUP_PINNED)
    hooks.saver.pause()
    hooks.saver.pause(backup="discard")
    move = [event for event in events().events if event.kind == "move" and event.tag == hooks.tag("w")][-1]
    assert (move.operation, move.allocations) == ("pause", 1)
    assert (move.resident_change, move.paused_change, move.backup_change) == (0, 0, -SIZE)
