"""A folder of the shared store, made by hand. A holder whose lock this process has is one of a live process."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import pytest
from processes import TIMEOUT_S

__all__ = ["MadeStore", "killed", "made", "memory", "start_holder", "tree"]

#: What a process does that uses the store: it keeps the lock of its holder, until it is killed.
_HOLDER = """
import fcntl, os, sys
folder, name = sys.argv[1:]
os.mkdir(f"{folder}/holders/.{name}")
lock = os.open(f"{folder}/holders/.{name}/lock", os.O_RDWR | os.O_CREAT, 0o600)
fcntl.flock(lock, fcntl.LOCK_EX)
os.rename(f"{folder}/holders/.{name}", f"{folder}/holders/{name}")
print("ready", flush=True)
sys.stdin.read()
"""


class MadeStore:
    """Makes the files of a store, and keeps the locks of what is alive until it is left."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(mode=0o700)
        for name in ("objects", "holders", "names"):
            (path / name).mkdir(mode=0o700)
        self._locks: list[int] = []

    def holder(self, name: str, *, alive: bool = True) -> Path:
        """Make a holder of a live process, or of a dead one."""
        folder = self.path / "holders" / name
        folder.mkdir(mode=0o700)
        self._make(folder / "lock", locked=alive)
        return folder

    def object(self, digit: str, size: int, *links: Path, listed: bool = True) -> Path:
        """Make an object whose name consists of one digit, and links to it in other directories."""
        path = self.path / "objects" / (digit * 32)
        path.write_bytes(bytes(size))
        path.chmod(0o400)
        for folder in links:
            os.link(path, folder / path.name)
        if not listed:
            path.unlink()
        return path

    def part(self, digit: str, size: int, *, alive: bool = True) -> Path:
        """Make an unfinished object of a live process, or of a dead one."""
        path = self.path / "objects" / f"{digit * 32}.part"
        self._make(path, locked=alive)
        path.write_bytes(bytes(size))
        return path

    def published(self, name: str, *objects: str) -> Path:
        """Make the directory of a published name, with a manifest that was written at the beginning of 1970. Each object has
        1 MiB according to the manifest."""
        folder = self.path / "names" / name
        folder.mkdir(mode=0o700)
        tensors = {str(index): ["torch.uint8", [1 << 20], [1], index, 0] for index in range(len(objects))}
        storages = [[1 << 20, True, 0]] * len(objects)
        contents = {"format": 1, "identity": "files=made rank=0", "extra": None, "tensors": tensors, "storages": storages}
        (folder / "manifest.json").write_text(json.dumps({"objects": objects, "contents": contents}))
        os.utime(folder / "manifest.json", (0, 0))
        return folder

    def _make(self, path: Path, *, locked: bool) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        self._locks.append(descriptor)
        if locked:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def __enter__(self) -> MadeStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for descriptor in self._locks:
            os.close(descriptor)


def start_holder(path: Path, name: str) -> subprocess.Popen[str]:
    """Start a process that has a holder in a store, and return it once the holder is there."""
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(path), name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def killed(process: subprocess.Popen[str]) -> None:
    """Kill a process as the OOM killer does, and wait until it has ended."""
    process.kill()
    process.communicate(timeout=TIMEOUT_S)


def tree(path: Path) -> list[tuple[str, int, int]]:
    """Return every path below a folder, with its inode and its number of links."""
    found = sorted(path.rglob("*"))
    return [(str(each.relative_to(path)), each.lstat().st_ino, each.lstat().st_nlink) for each in found]


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder on /dev/shm of this test alone."""
    folder = Path(tempfile.mkdtemp(prefix="torch_memory_saver-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def made(memory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MadeStore]:
    """A store without objects and holders, which TMS_SHARED_DIR names."""
    with MadeStore(memory / "store") as store:
        monkeypatch.setenv("TMS_SHARED_DIR", str(store.path))
        yield store
