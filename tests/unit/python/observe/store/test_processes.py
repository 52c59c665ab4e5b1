"""Guards what is seen of two processes that share the contents of their backups."""

from __future__ import annotations

from pathlib import Path

from jobs import Job

from torch_memory_saver.observe._processes.shared_pages import read_pages
from torch_memory_saver.observe._store.cleaning import Removed, clean_store
from torch_memory_saver.observe._store.contents import read_store

MIB = 1 << 20


def pause_shared(job: Job, value: int) -> None:
    """Have a job pause 4 MiB of this value with a shared backup."""
    job.do("with module.region('weights', backup='shared'): address = cuda_malloc(4 * MIB)")
    job.do(f"fill(address, 4 * MIB, {value}); module.pause('weights')")


def shared_bytes(pages: Path) -> list[int]:
    return [row.shared_backup_bytes for page in read_pages(pages).pages for row in page.rows]


def test_what_two_processes_hold_counts_once(memory: Path, tmp_path: Path) -> None:
    path = memory / "store"
    with Job(tmp_path, TMS_SHARED_DIR=str(path)) as first, Job(tmp_path, TMS_SHARED_DIR=str(path)) as second:
        first.do("assert not os.path.exists(os.environ['TMS_SHARED_DIR'])")
        pause_shared(first, 7)
        pause_shared(second, 7)
        assert shared_bytes(tmp_path) == [4 * MIB, 4 * MIB]
        contents = read_store(path)
        assert ([each.holders for each in contents.objects], contents.bytes, contents.holders) == ([2], 4 * MIB, 2)
        for job, made in ((first, "4 MiB"), (second, "0 B")):
            job.do("text = str(module.stats())")
            job.do(f"assert 'shared objects: 4 MiB, {made} of it written by this process' in text, text")
        first.kill()
        contents = read_store(path)
        assert ([each.holders for each in contents.objects], contents.holders, contents.dead) == ([1], 1, 1)
        assert clean_store(path) == Removed(holders=1)
        second.do("module.resume(); assert read(address, 4 * MIB) == bytes([7]) * (4 * MIB)")
        assert shared_bytes(tmp_path) == [4 * MIB], "the links stay after a resume"
    assert (read_store(path).objects, read_store(path).holders) == ((), 0), "it has given up its links at exit"


def test_what_a_killed_process_alone_held_is_removed(memory: Path, tmp_path: Path) -> None:
    path = memory / "store"
    with Job(tmp_path, TMS_SHARED_DIR=str(path)) as job:
        pause_shared(job, 1)
        job.kill()
    assert (read_store(path).bytes, read_store(path).dead) == (4 * MIB, 1), "no process has come that removes it"
    assert clean_store(path) == Removed(holders=1, objects=1, bytes=4 * MIB)
    assert (read_store(path).bytes, read_store(path).dead) == (0, 0)
