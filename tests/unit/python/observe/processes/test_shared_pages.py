"""Guards the reading of pages of real processes: what they say, whose are shown, and which are removed."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import pytest
from jobs import Job
from processes import wait_until

from torch_memory_saver import _core
from torch_memory_saver.observe._processes import shared_pages
from torch_memory_saver.observe._processes.shared_pages import is_alive, page_directory, read_page, read_pages

MIB = 1 << 20


def test_two_processes(tmp_path: Path) -> None:
    with Job(tmp_path, RANK="1") as first, Job(tmp_path) as second:
        second.do("sys.argv = ['rollout.py']")
        assert read_pages(tmp_path).pages == (), "nothing is made before an allocation"
        first.allocate("weights", 4)
        first.do("module.pause()")
        second.allocate("cache")
        found = {page.pid: page for page in read_pages(tmp_path).pages}
        assert set(found) == {first.pid, second.pid}
        page = found[first.pid]
        assert (page.rank, page.serves, page.foreign, page.running) == (1, True, False, "")
        (row,) = page.rows
        assert (row.tag, row.device, row.allocations, row.state) == ("weights", 0, 1, "paused")
        assert (row.paused_bytes, row.resident_bytes, row.pauses_total) == (4 * MIB, 0, 1)
        assert page.counters["pauses_total"] == 1
        assert row.last_pause_ended <= page.counters["last_pause_ended"] <= time.monotonic_ns()
        assert page.devices[0].total_bytes == 512 * MIB and page.devices[0].uuid.startswith("GPU-")
        assert found[second.pid].name == "rollout"
        assert found[second.pid].rows[0].state == "resident"
    assert list(tmp_path.iterdir()) == [], "they are gone at exit"


def test_the_page_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        job.allocate("a")
        path = job.page
        results = [path.with_suffix(suffix) for suffix in (".snapshot.pickle", ".events.json")]
        results.append(path.with_name(f".{results[0].name}.1-2.tmp"))  # of a process that was killed while it wrote
        for result in results:
            result.write_text("{}")
        for result in (results[0], results[2]):
            os.utime(result, (0, 0))
        assert len(read_pages(tmp_path).pages) == 1
        assert all(result.exists() for result in results), "its process lives"
        job.kill()
        assert read_pages(tmp_path).pages == ()
        assert [result.exists() for result in results] == [False, True, False], "what it wrote stays for a day"
    assert not path.exists()


def test_a_forked_child_does_not_keep_its_parents_page(tmp_path: Path) -> None:
    """The lock of a killed parent's page is free although the child lives."""
    gate, ready = tmp_path / "gate", tmp_path / "ready"
    os.mkfifo(gate)
    with Job(tmp_path) as job:
        job.allocate("a")
        job.do(f"child = os.fork() or (open({str(ready)!r}, 'w').close(), open({str(gate)!r}).read(), os._exit(0))")
        wait_until(ready.exists)
        descriptor = os.open(job.page, os.O_RDONLY)
        assert [page.pid for page in read_pages(tmp_path).pages] == [job.pid]
        job.kill()
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        os.close(descriptor)
        gate.write_text("")  # the child ends; it waits for this writer
    assert read_pages(tmp_path).pages == ()


def test_a_page_whose_process_has_another_start_time_is_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a reused number: a child that is made without fork's handlers may still hold the lock."""
    with Job(tmp_path) as job:
        job.allocate("a")
        descriptor = os.open(job.page, os.O_RDONLY)
        page = read_page(descriptor, job.page)
        assert is_alive(descriptor, page)
        monkeypatch.setattr(shared_pages, "_start_of", lambda _: page.process_started + 1)
        assert not is_alive(descriptor, page)
        os.close(descriptor)


def test_a_page_of_another_namespace_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Job(tmp_path) as job:
        job.allocate("a")
        monkeypatch.setattr(shared_pages, "own_namespace", lambda: 1)
        (page,) = read_pages(tmp_path).pages
        assert page.foreign
        job.kill()
        assert read_pages(tmp_path).pages == (), "its lock tells that it is dead"


def test_what_is_no_page_of_this_release_is_named_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Job(tmp_path) as job:
        job.allocate("a")
        other, short = tmp_path / "tms-1-0.page", tmp_path / "tms-2-0.page"
        other.write_bytes(b"TMS_PLAY".ljust(32768))
        short.write_bytes(b"being made")
        found = read_pages(tmp_path)
        assert [page.pid for page in found.pages] == [job.pid]
        assert found.unreadable == {str(other): "it is not a shared page of torch_memory_saver"}
        assert short.exists()
        os.utime(short, (0, 0))
        newer = bytearray(job.page.read_bytes())
        newer[8:16] = (99).to_bytes(8, "little")
        other.write_bytes(newer)
        with open(other, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            assert "format 99" in read_pages(tmp_path).unreadable[str(other)]
        assert read_pages(tmp_path).unreadable == {} and not other.exists(), "its process has ended"
        assert not short.exists(), "no process is making it any more"
        monkeypatch.setattr(shared_pages, "_own_boot_id", lambda: bytes(16))
        assert "of another machine or boot" in read_pages(tmp_path).unreadable[str(job.page)]


def test_a_page_that_is_being_made_is_not_shown(tmp_path: Path) -> None:
    """It has its full length before its first word."""
    path = tmp_path / "tms-1-0.page"
    path.write_bytes(bytes(32768))
    with open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        os.utime(path, (0, 0))
        assert read_pages(tmp_path) == shared_pages.Pages((), {}) and path.exists()
    assert read_pages(tmp_path) == shared_pages.Pages((), {})
    assert not path.exists(), "its process was killed"


def test_nothing_is_read_or_removed_in_a_directory_that_others_can_write_to(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir(mode=0o700)
    result = place / "tms-1-0.snapshot.pickle"
    with Job(place) as job:
        job.allocate("a")
        for mode in (0o777, 0o1777, 0o720):
            result.write_text("{}")
            os.utime(result, (0, 0))
            place.chmod(mode)
            if mode & 0o1000 and os.geteuid() == 0:
                continue  # as /dev/shm, in which a directory of this user is used
            found = read_pages(place)
            assert found.pages == () and result.exists()
            assert f"(owner: uid {os.getuid()}, mode {mode:o})" in found.unreadable[str(place)]
        place.chmod(0o755)
        assert [page.pid for page in read_pages(place).pages] == [job.pid] and not result.exists()


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_page_to_which_others_can_write_is_not_read(tmp_path: Path, mode: int) -> None:
    with Job(tmp_path) as job:
        job.allocate("a")
        job.page.chmod(mode)
        found = read_pages(tmp_path)
        assert found.pages == () and f"mode {mode:o}" in found.unreadable[str(job.page)]


def test_a_fifo_is_no_page_and_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tms-1-0.page", 0o600)
    assert "not a file" in read_pages(tmp_path).unreadable[str(tmp_path / "tms-1-0.page")]


def test_a_directory_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert read_pages(file).unreadable == {str(file): "Not a directory"}


def test_a_name_of_a_file_cannot_command_a_terminal(tmp_path: Path) -> None:
    name = os.fsencode(tmp_path) + b"/tms-1-\x1b[31m\xff.page"
    with open(name, "wb") as file:
        file.write(b"no page".ljust(32768))
    (path,) = read_pages(tmp_path).unreadable
    assert path == f"{tmp_path}/tms-1-?[31m?.page"


def test_texts_of_programs_cannot_command_a_terminal(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        job.allocate("red\x1b[31m")
        job.allocate("größe")
        (page,) = read_pages(tmp_path).pages
        assert [row.tag for row in page.rows] == ["red?[31m", "größe"]


def test_the_shared_page_is_turned_off(tmp_path: Path) -> None:
    with Job(tmp_path, TMS_SHARED_PAGE="0") as job:
        job.allocate("a")
        job.do("module.pause()")
        job.do("assert _core.page_path() is None and _core.page_requests() == 0")
        assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_used_changes_nothing_else(tmp_path: Path) -> None:
    with Job(tmp_path / "missing" / "deeper") as job:
        job.allocate("a")
        job.do("assert module.pause().bytes == 2 * MIB")
        job.do("assert _core.page_path() is None")


def test_the_default_directory() -> None:
    if not os.environ.get("TMS_SHARED_PAGE"):
        assert page_directory() == Path(f"/dev/shm/torch_memory_saver-{os.geteuid()}")
    with pytest.raises(OSError, match="Bad file descriptor"):
        _core.read_page(-1)
    with pytest.raises(ValueError, match="there is no request 7"):
        _core.request_page(0, 7)
