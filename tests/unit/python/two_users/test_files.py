"""Guards what the package writes in a folder that another user can change: it follows and overwrites nothing of anybody, its
files are the user's alone, and it removes nothing of others.

Two unprivileged users act in child processes, so the tests need root. The children import
nothing, because their users may not read it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from users import ATTACKER, USER, as_user, folder_of

from torch_memory_saver import _files, _folders
from torch_memory_saver._engine import background
from torch_memory_saver._simulate import stubs
from torch_memory_saver.observe import events
from torch_memory_saver.observe._out_of_memory import folder as reports
from torch_memory_saver.observe.events.chrome_trace import write_chrome_trace
from torch_memory_saver.observe.events.metrics import write_metrics
from torch_memory_saver.observe.memory import log as memory_log
from torch_memory_saver.observe.memory.sampler import MemorySnapshotSampler, next_moment, remove_oldest

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as two users")

LOG = events.EventLog(
    events=(),
    before=(),
    after=(),
    dropped=0,
    capacity=1,
    taken_ns=1,
    wall_offset_ns=0,
    pid=1,
    rank=None,
    role="role",
    host="host",
    boot_id="boot",
)
SECRET = "the user's own"
TOKEN = "0" * 16
STICKY, OPEN = 0o1777, 0o777


class Place:
    """A folder of root with the home of the user, a file in it, and a shared folder."""

    def __init__(self, base: Path) -> None:
        self.base = base
        base.chmod(0o755)
        self.home = folder_of(USER, base / "home", 0o700)
        self.victim = self.home / "victim"
        self.victim.write_text(SECRET)
        os.chown(self.victim, USER, USER)
        self.shared = folder_of(ATTACKER, base / "shared", OPEN)

    def plant(self, name: str, how: str) -> Path:
        """Have the attacker put something under a name of the shared folder."""
        path = self.shared / name

        def act() -> None:
            if how == "link":
                path.symlink_to(self.victim)
            elif how == "link to a folder":
                path.symlink_to(self.home)
            elif how == "FIFO":
                os.mkfifo(path)
                path.chmod(0o666)
            elif how == "file":
                path.write_text("")
                path.chmod(0o666)
            elif how == "folder":
                path.mkdir()

        if how == "hard link":  # the kernel may allow it to the attacker: fs.protected_hardlinks
            os.link(self.victim, path)
        else:
            as_user(ATTACKER, act)
        return path

    def is_safe(self) -> bool:
        found = self.victim.stat()
        return self.victim.read_text() == SECRET and found.st_uid == USER and os.listdir(self.home) == ["victim"]


@pytest.fixture
def place() -> Iterator[Place]:
    base = Path(tempfile.mkdtemp(prefix="tms-two-users-", dir="/tmp"))
    try:
        yield Place(base)
    finally:
        shutil.rmtree(base)


def write(path: Path) -> None:
    events.write_events(path, log=LOG)


def failure(function: Callable[..., Any], *arguments: Any) -> str:
    """The text of the OSError that a call raises, or ""."""
    try:
        function(*arguments)
    except OSError as error:
        return str(error)
    return ""


def warnings_of(function: Callable[..., Any], *arguments: Any) -> list[str]:
    """The warnings that a call logs."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("torch_memory_saver").addHandler(handler)
    function(*arguments)
    return found


def assert_private(path: Path, text: str = "") -> None:
    found = path.lstat()
    assert stat.S_ISREG(found.st_mode) and found.st_uid == USER and stat.S_IMODE(found.st_mode) == 0o600
    assert text.encode() in path.read_bytes()


WRITERS: dict[str, Callable[[Path], object]] = {
    "events": write,
    "trace": lambda path: write_chrome_trace(path, log=LOG),
    "snapshot": lambda path: _files.write_file({}, path, aside=path.parent),
    "picture": lambda path: _files.write_bytes_file(b"", path, "plot", "the picture was"),
}


@pytest.mark.parametrize("how", ["link", "hard link", "FIFO", "file"])
@pytest.mark.parametrize("kind", WRITERS)
def test_what_stands_under_the_name_of_a_file_is_replaced(place: Place, kind: str, how: str) -> None:
    path = place.plant("out", how)
    as_user(USER, WRITERS[kind], path)
    assert_private(path)
    assert place.is_safe()
    assert os.listdir(place.shared) == ["out"]


def test_a_folder_under_the_name_of_a_file_is_an_error(place: Place) -> None:
    path = place.plant("out", "folder")
    assert "write_events: Is a directory" in as_user(USER, failure, write, path)
    assert os.listdir(place.shared) == ["out"]


def test_a_name_that_follows_from_the_process_is_not_used(place: Place) -> None:
    """A link under the name that process and thread determine."""

    def act() -> None:
        hidden = place.shared / f".out.{os.getpid()}-{threading.get_ident()}.tmp"
        hidden.symlink_to(place.victim)
        write(place.shared / "out")
        hidden.unlink()

    as_user(USER, act)
    assert_private(place.shared / "out")
    assert place.is_safe()


@pytest.mark.parametrize("how", ["link", "hard link", "FIFO", "file", "folder"])
def test_even_a_name_that_is_known_is_not_followed(place: Place, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(secrets, "token_hex", lambda _: TOKEN)
    place.plant(f".out.{TOKEN}.tmp", how)
    assert "File exists" in as_user(USER, failure, write, place.shared / "out")
    assert place.is_safe()


@pytest.mark.parametrize("deeper", ["", "deeper"])
def test_a_link_of_another_user_in_the_path_is_not_followed(place: Place, deeper: str) -> None:
    link = place.plant("events", "link to a folder")
    assert "the check for a symbolic link of another user in its path failed" in as_user(
        USER, failure, write, link / deeper / "out"
    )
    assert place.is_safe()


def test_a_link_of_the_user_or_of_root_is_followed(place: Place) -> None:
    for owner in (USER, 0):
        goal = folder_of(USER, place.base / f"goal-{owner}", 0o700)
        link = place.base / f"link-{owner}"
        link.symlink_to(goal)
        os.lchown(link, owner, owner)
        as_user(USER, write, link / "deeper" / "out")
        assert_private(goal / "deeper" / "out")


@pytest.mark.parametrize(
    "owner, mode, warned",
    [(ATTACKER, 0o777, 1), (ATTACKER, 0o1777, 1), (USER, 0o777, 1), (0, 0o777, 1), (0, 0o1777, 0), (USER, 0o755, 0)],
)
def test_a_shared_folder_is_reported_once(place: Place, owner: int, mode: int, warned: int) -> None:
    folder = folder_of(owner, place.base / "folder", mode)

    def act() -> None:
        for name in ("a", "b"):
            write(folder / name)
            write(folder / "below" / name)

    found = as_user(USER, warnings_of, act)
    assert len(found) == warned and all(str(folder) in text and "shared with other users" in text for text in found)
    for name in ("a", "b"):
        assert_private(folder / name)
        assert_private(folder / "below" / name)
    assert stat.S_IMODE((folder / "below").stat().st_mode) == 0o700


def test_a_folder_of_root_that_nobody_else_writes_to_is_trusted(place: Place) -> None:
    """As the volume of a container, whose root has another name outside."""
    folder = folder_of(0, place.base / "volume", 0o755)
    assert as_user(USER, entered, folder) == folder


def entered(folder: Path) -> Path:
    with _folders.private_directory(folder) as found:
        return found.path


@pytest.mark.parametrize(
    "owner, mode",
    [(ATTACKER, 0o777), (ATTACKER, 0o755), (ATTACKER, 0o1777), (USER, 0o770), (USER, 0o1777), (0, 0o777), (0, 0o775)],
)
def test_what_others_can_change_is_not_private(place: Place, owner: int, mode: int) -> None:
    folder = folder_of(owner, place.base / "folder", mode)
    message = as_user(USER, failure, entered, folder)
    assert "choose a folder of this user" in message and f"owner: uid {owner}" in message


def test_in_a_sticky_folder_of_root_the_recordings_have_a_folder_of_their_own(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(0, place.base / "tmp", STICKY)
    monkeypatch.setenv("TMS_DEBUG_DIR", str(folder))
    own = folder / f"torch_memory_saver-{USER}"
    assert as_user(USER, lambda: str(_folders.chosen_folder(background.debug_folder()))) == str(own)
    as_user(USER, write, own / "events" / "out")
    assert stat.S_IMODE(own.stat().st_mode) == stat.S_IMODE((own / "events").stat().st_mode) == 0o700
    assert as_user(USER, lambda: str(MemorySnapshotSampler(folder)._directory)) == str(own)


def test_the_recordings_of_one_run_warn_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMS_DEBUG_DIR", str(place.shared))
    monkeypatch.setenv("TMS_DEBUG", "events,snapshots")
    started: list[str] = []
    monkeypatch.setattr(background, "added", lambda event: {"events": started.append, "snapshots": started.append})

    def act() -> None:
        background._start_recordings()
        for folder in started:
            write(Path(folder) / "out")

    assert len(as_user(USER, warnings_of, act)) == 1
    for name in ("events", "snapshots"):
        assert_private(place.shared / name / "out")


def test_a_file_with_wider_permissions_becomes_private(place: Place) -> None:
    def act() -> None:
        os.umask(0)
        path = place.home / "out"
        path.write_text("old")
        path.chmod(0o666)
        write(path)

    as_user(USER, act)
    assert_private(place.home / "out", "torch_memory_saver.events")


def test_a_collector_reads_the_metrics(place: Place) -> None:
    path = place.base / "home" / "metrics" / "out.prom"
    place.home.chmod(0o755)
    as_user(USER, write_metrics, path)
    assert "# EOF" in as_user(ATTACKER, path.read_text)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    planted = place.plant("out.prom", "link")
    as_user(USER, write_metrics, planted)
    assert "# EOF" in as_user(ATTACKER, planted.read_text) and place.victim.read_text() == SECRET


# ---- libraries that are made once and loaded later ----


def make_stubs(root: Path) -> None:
    stubs.make_folder(root / "torch_memory_saver" / "simulate", list, root, [])


def test_stub_libraries_lie_in_a_folder_of_the_user(place: Place) -> None:
    for _ in range(2):
        assert as_user(USER, failure, make_stubs, place.home) == ""
    made = place.home / "torch_memory_saver"
    assert stat.S_IMODE(made.stat().st_mode) == 0o700 and "libcuda.so.1" in os.listdir(made / "simulate")


def test_stub_libraries_of_another_user_are_not_loaded(place: Place) -> None:
    as_user(ATTACKER, (place.shared / "torch_memory_saver" / "simulate").mkdir, 0o755, True)
    assert "is this user's or root's" in as_user(USER, failure, make_stubs, place.shared)


@pytest.mark.parametrize("folder", ["shared", "home"])
def test_stub_libraries_that_another_user_can_replace_are_not_loaded(place: Place, folder: str) -> None:
    """The folder itself is the user's, but one above it, or the folder of the libraries, is open to others."""

    def act() -> str:
        os.umask(0)
        with contextlib.suppress(OSError):
            make_stubs(place.base / folder)
        if folder == "home":
            (place.home / "torch_memory_saver" / "simulate").chmod(OPEN)
        return failure(make_stubs, place.base / folder)

    assert "choose a folder of this user" in as_user(USER, act)


# ---- files that are changed in place ----


@pytest.mark.parametrize("how", ["link", "hard link", "FIFO", "file", "folder"])
def test_rows_are_appended_to_a_file_of_the_user_only(place: Place, how: str) -> None:
    path = place.plant("log.csv", how)
    assert str(path) in as_user(USER, failure, memory_log.append_rows, path, [])
    assert place.is_safe()


def test_a_new_memory_log_is_private(place: Place) -> None:
    path = place.shared / "log.csv"
    for _ in range(2):
        as_user(USER, memory_log.append_rows, path, [])
    assert_private(path, "peak_allocated")
    assert len(path.read_text().splitlines()) == 1


@pytest.mark.parametrize("how", ["link", "hard link", "FIFO", "file"])
def test_the_counter_of_moments_is_a_file_of_the_user(place: Place, how: str) -> None:
    place.victim.write_text("")  # as a counter that has not counted yet
    path = place.plant(".moment", how)
    assert str(path) in as_user(USER, failure, next_moment, place.shared, None)
    assert place.victim.read_text() == ""


# ---- files that are removed ----


def test_moments_are_removed_without_following_links(place: Place) -> None:
    place.plant("step-000001", "link to a folder")
    place.plant(".removed-1-1", "link to a folder")
    foreign = place.plant("step-000002", "folder")
    as_user(ATTACKER, (foreign / "file").write_text, "theirs")
    foreign.chmod(OPEN)

    def act() -> None:
        for step in (3, 4, 5):
            _files.write_file({}, place.shared / f"step-{step:06d}" / "a.pickle", aside=place.shared)
        (place.shared / "step-000003" / "link").symlink_to(place.victim)
        remove_oldest(place.shared, 1, frozenset(), 5)

    as_user(USER, act)
    assert sorted(os.listdir(place.shared)) == [".removed-1-1", "step-000001", "step-000002", "step-000005"]
    assert os.listdir(foreign) == ["file"]
    assert place.is_safe()


def test_reports_of_others_stay(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "MAX_IN_FOLDER", 1)
    theirs = "oom-20200101T000000.000Z-pid1-1.txt"
    place.plant(theirs, "file")

    def act() -> None:
        folder = reports.ReportFolder(place.shared)
        for number in (1, 2):
            folder.write("text", "{}", number=number, rank=None, time_ns=number * 10**9)

    as_user(USER, act)
    left = os.listdir(place.shared)
    assert theirs in left and len(left) == 3
    assert {name.rsplit("-", 1)[1] for name in left} == {"1.txt", "2.txt", "2.json"}


def test_a_file_is_removed_in_its_own_folder_only(place: Place) -> None:
    """As an event file without the rank is, while the attacker has replaced its folder."""
    link = place.plant("events", "link to a folder")
    assert "symbolic link of another user" in as_user(USER, failure, _files.remove_file, link / "victim")
    assert place.is_safe()
