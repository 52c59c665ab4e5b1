"""Guards the pages of processes against another user: no page of that user is read or asked, no page that is truncated kills
its reader, and nothing is removed for that user. Root may look at the pages of a user.

Two unprivileged users act in child processes, so the tests need root. The children import
nothing, because their users may not read it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import ELSEWHERE, PRELUDE, TIMEOUT_S, environment
from users import ATTACKER, USER, as_user, become, folder_of

import torch_memory_saver.errors
from torch_memory_saver.observe._processes import requests
from torch_memory_saver.observe._processes.shared_pages import Pages, read_pages

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as two users")

#: Imports what the user may not read later, and becomes the user.
_JOB = f"""
import importlib, pkgutil
for found in pkgutil.walk_packages(module.__path__, "torch_memory_saver."):
    if found.name.split(".")[1] in ("_engine", "observe"):
        importlib.import_module(found.name)
sys.path.insert(0, {str(Path(__file__).parents[1] / "support")!r})
from users import become
become(int(sys.argv[1]))
print("ready", flush=True)
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""


class Job:
    """A process of a user that has a page in a folder. It executes lines."""

    def __init__(self, uid: int, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + _JOB, str(uid)],
            env=environment(True, TMS_SHARED_PAGE=str(folder)),
            cwd=ELSEWHERE,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def do(self, line: str) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n", self.end()

    def end(self) -> str:
        """What it wrote to stderr until its end, which must be a success."""
        _, errors = self._process.communicate(timeout=TIMEOUT_S)
        assert self._process.returncode == 0, errors
        return errors

    def allocate(self) -> None:
        self.do('with module.region(tag="a"): cuda_malloc(2 * MIB)')

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self.end()


@contextlib.contextmanager
def public_folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="tms-two-users-", dir="/tmp"))
    path.chmod(0o755)
    try:
        yield path
    finally:
        shutil.rmtree(path)


@pytest.fixture
def base() -> Iterator[Path]:
    with public_folder() as path:
        yield path


@pytest.fixture(scope="module")
def page() -> Iterator[bytes]:
    """The content of a page of a process of the attacker, which lives."""
    with public_folder() as path:
        folder = folder_of(ATTACKER, path / "attackers", 0o700)
        with Job(ATTACKER, folder) as job:
            job.allocate()
            (file,) = folder.glob("*.page")
            yield file.read_bytes()


def look(folder: Path) -> Pages:
    return read_pages(folder)


def ask(folder: Path, pid: int) -> str:
    """Why a process was not asked."""
    requests.page_directory = lambda: folder  # type: ignore[attr-defined]  # in this child only
    try:
        return str(requests.request_file(pid, "snapshot", 0.01))
    except torch_memory_saver.errors.TorchMemorySaverError as error:
        return str(error)


def forge(folder: Path, content: bytes, pid: int = 1) -> Path:
    """Have the attacker put a page of its own into a folder, and the file that it wants to be delivered."""
    path = folder / f"tms-{pid}-{0:016x}.page"

    def act() -> None:
        path.write_bytes(content)
        path.chmod(0o666)
        path.with_suffix(".snapshot.pickle").write_text("forged")

    as_user(ATTACKER, act)
    return path


@pytest.mark.parametrize("owner, mode", [(ATTACKER, 0o755), (ATTACKER, 0o1777), (USER, 0o777), (USER, 0o1777), (0, 0o777)])
def test_a_folder_that_another_user_can_change_is_not_read(base: Path, page: bytes, owner: int, mode: int) -> None:
    folder = folder_of(owner, base / "pages", mode)
    forged = forge(folder, page)
    os.utime(forged.with_suffix(".snapshot.pickle"), (0, 0))
    found = as_user(USER, look, folder)
    assert found.pages == () and "choose a folder of this user" in found.unreadable[str(folder)]
    assert sorted(os.listdir(folder)) == sorted([forged.name, forged.with_suffix(".snapshot.pickle").name])
    with Job(USER, folder) as job:
        job.allocate()
        assert sorted(os.listdir(folder)) == sorted([forged.name, forged.with_suffix(".snapshot.pickle").name])
        assert "this process has no shared page" in job.end()


def test_in_a_sticky_folder_of_root_a_process_makes_a_folder_of_its_own(base: Path) -> None:
    folder = folder_of(0, base / "pages", 0o1777)
    with Job(USER, folder) as job:
        job.allocate()
        own = folder / f"torch_memory_saver-{USER}"
        found = own.stat()
        assert found.st_uid == USER and stat.S_IMODE(found.st_mode) == 0o700
        assert [page.pid for page in as_user(USER, look, folder).pages] == [job.pid]


def test_a_page_of_another_user_is_neither_read_nor_asked_nor_removed(base: Path, page: bytes) -> None:
    """It got there while the folder was open to others."""
    folder = folder_of(USER, base / "pages", 0o777)
    path = forge(folder, page)
    path.chmod(0o644)  # nobody but the attacker can write to it
    folder.chmod(0o755)
    found = as_user(USER, look, folder)
    assert found.pages == () and f"owner: uid {ATTACKER}" in found.unreadable[str(path)]
    assert "cannot be used: it is not a file to which only its user can write" in as_user(USER, ask, folder, 1)
    assert path.exists()


def test_a_link_to_a_page_is_not_followed(base: Path, page: bytes) -> None:
    folder = folder_of(USER, base / "pages", 0o700)
    goal = base / "goal"
    goal.write_bytes(page)
    os.chown(goal, USER, USER)
    (folder / "tms-1-0.page").symlink_to(goal)
    found = as_user(USER, look, folder)
    assert found.pages == () and len(found.unreadable) == 1 and goal.exists()


def test_root_reads_the_pages_of_a_user_and_does_not_ask_or_remove(base: Path) -> None:
    folder = folder_of(USER, base / "pages", 0o700)
    dead = folder / "tms-1-0.page"
    with Job(USER, folder) as job:
        job.allocate()
        dead.write_bytes(b"")
        os.chown(dead, USER, USER)
        os.utime(dead, (0, 0))
        assert [page.pid for page in as_user(0, look, folder).pages] == [job.pid]
        assert "choose a folder of this user" in as_user(0, ask, folder, job.pid)
        assert dead.exists(), "its user removes it"
        assert [page.pid for page in as_user(USER, look, folder).pages] == [job.pid]
        assert not dead.exists()


def test_pages_that_are_truncated_kill_no_reader(base: Path, page: bytes) -> None:
    """The attacker's folder, which root looks at: a write that never ends, truncated again and again."""
    folder = folder_of(ATTACKER, base / "pages", 0o700)
    odd = page[:16] + (1).to_bytes(8, "little") + page[24:]
    names = [folder / f"tms-{number}-0.page" for number in range(8)]
    child = os.fork()
    if child == 0:
        signal.alarm(TIMEOUT_S)
        become(ATTACKER)
        descriptors = [os.open(name, os.O_RDWR | os.O_CREAT, 0o600) for name in names]
        while True:
            for descriptor in descriptors:
                os.pwrite(descriptor, odd, 0)
                os.ftruncate(descriptor, 0)
    try:
        for _ in range(20):
            as_user(0, look, folder)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
