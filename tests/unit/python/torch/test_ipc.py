"""Guards the bytes that describe shared memory to PyTorch in other processes, and the counters and events that are sent with
it. PyTorch is a stand-in.
"""

from __future__ import annotations

import errno
import gc
import os
import struct
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
from fake_sending import FakeEvent, FakeStream, FakeTorch, add, reset

from torch_memory_saver import _core
from torch_memory_saver._torch.sharing import ipc
from torch_memory_saver._torch.sharing.ipc import Counters, StreamEvents
from torch_memory_saver.errors import InvalidArgumentError, InvalidStateError

MIB = 1 << 20


def export(generation: int) -> _core.Export:
    return _core.Export((0x7000000000, 64 * MIB, generation, 0, 4096))  # type: ignore[call-arg,arg-type]


EXPORT = export(5)
NONCE = b"12345678"


def test_a_description_has_the_importers_layout() -> None:
    old, new = (ipc.describe(layout, [EXPORT], NONCE) for layout in (1, 3))
    assert old[:2] == b"\x01e" and new[:2] == b"\x03e"
    assert struct.unpack_from("<iIQQi", old, 2) == (os.getpid(), 0, 64 * MIB, 1, 4096)
    assert struct.unpack_from("<iIQQiIi", new, 2) == (os.getpid(), 0, 64 * MIB, 1, 1, 0, 4096)
    assert old[30:] == new[38:] == NONCE + struct.pack("<Q", 5)


def test_several_pieces_are_described_with_a_descriptor_each() -> None:
    pieces = [EXPORT, export(6)]
    text = ipc.describe(1, pieces, NONCE)
    assert struct.unpack_from("<iIQQii", text, 2) == (os.getpid(), 0, 64 * MIB, 2, 4096, 4096)
    assert text != ipc.describe(1, pieces[::-1], NONCE), "other memory under the same descriptors"


def test_a_description_is_unique_to_its_memory() -> None:
    assert ipc.describe(1, [EXPORT], NONCE) == ipc.describe(1, [EXPORT], NONCE)
    assert ipc.describe(1, [EXPORT], NONCE) != ipc.describe(1, [export(6)], NONCE), "under the same descriptor"


@pytest.mark.parametrize(
    ("release", "layout"),
    [("2.6", 1), ("2.6.0+cu124", 1), ("2.12.1", 1), ("2.13", 3), ("2.15.0a0+git1", 3), ("3.0", 3)],
)
def test_the_layout_of_a_release(release: str, layout: int) -> None:
    assert ipc.format_of_importer(release) == layout
    assert ipc.check_importer(release) == release


@pytest.mark.parametrize("release", ["2.5", "1.13", "", "2", "new", 2.11, (2, 11)])
def test_a_release_that_cannot_import_is_refused(release: object) -> None:
    with pytest.raises(InvalidArgumentError, match="share_for"):
        ipc.check_importer(release)


def test_the_format_of_this_pytorch_is_read_from_its_own_description() -> None:
    assert [ipc.format_of_own_description(bytes([version]) + b"c") for version in (1, 2, 3)] == [1, 1, 3]
    with pytest.raises(InvalidStateError, match=r"by version 4 of its format.*Update torch_memory_saver"):
        ipc.format_of_own_description(b"\x04c")


TIMEOUT = 60


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the files of counters are."""
    reset(monkeypatch, tmp_path)
    return tmp_path


def test_counters_are_laid_out_as_importers_expect(files: Path) -> None:
    counters = Counters()
    taken = [counters.take() for _ in range(3)]
    (path,) = files.iterdir()
    assert [(file.name.decode(), number) for file, number in taken] == [(f"/{path.name}", number) for number in range(3)]
    contents = path.read_bytes()
    assert len(contents) == 64 + 10_000 * 8
    assert struct.unpack("=i60x10000q", contents) == (1,) * 10_001, "one process has it open, and every counter is 1"
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("value", "is_in_use"), [(2, True), (1, True), (0, False), (-1, False)])
def test_a_counter_above_0_is_in_use(files: Path, value: int, is_in_use: bool) -> None:
    file, number = Counters().take()
    assert file.is_in_use(number)
    assert add(files, file.name, number, value - 1) == value
    assert file.is_in_use(number) == is_in_use


def test_a_counter_is_used_once_and_full_files_go_with_their_last_counter(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ipc, "_COUNTERS", 2)
    monkeypatch.setattr(ipc, "_FILE_BYTES", 64 + 2 * 8)
    counters = Counters()
    taken = []
    for _ in range(5):
        taken.append(counters.take())
        add(files, taken[-1][0].name, taken[-1][1], -1)
    assert len({(file.name, number) for file, number in taken}) == 5
    assert len(list(files.iterdir())) == 3
    kept = taken[2][0].name
    del taken[3:], taken[:2]
    gc.collect()
    assert {path.name for path in files.iterdir()} >= {kept.decode().lstrip("/")}
    assert len(list(files.iterdir())) == 2, "that one, and the one from which counters are taken"


@pytest.mark.parametrize("end", ["exit", "multiprocessing", "fork"])
def test_files_are_removed_at_the_end_of_the_process_that_created_them(files: Path, end: str) -> None:
    program = f"""
import multiprocessing, os
from torch_memory_saver._torch.sharing import ipc
ipc._SHARED_MEMORY = {str(files)!r}
def take():
    global taken
    taken = ipc.Counters().take()
    assert len(os.listdir({str(files)!r})) == 1
if {end!r} == "multiprocessing":
    process = multiprocessing.get_context("fork").Process(target=take)
    process.start()
    process.join()
    assert process.exitcode == 0
else:
    take()
if {end!r} == "fork":
    process = multiprocessing.get_context("fork").Process(target=len, args=("",))
    process.start()
    process.join()
    assert len(os.listdir({str(files)!r})) == 1, "it is the parent's"
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=TIMEOUT)
    assert list(files.iterdir()) == []


def test_no_shared_memory_is_an_error_that_says_what_to_do(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    counters = Counters()
    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(InvalidStateError, match=r"80064 bytes of shared memory .*No space left on device\)\. Free some"):
        counters.take()
    gc.collect()
    assert list(files.iterdir()) == []
    monkeypatch.undo()
    reset(monkeypatch, files)
    assert counters.take()[1] == 0, "it may be tried again"


def test_a_stream_has_one_event_which_is_recorded_at_each_send(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events, default, own = StreamEvents(), (0, 0, 1), (3, 0, 1)
    handles = []
    for stream in (default, default, own, default, own):
        monkeypatch.setattr(FakeStream, "current", stream)
        handles.append(events.record(FakeTorch, 0).handle)
    assert handles == [b"event0", b"event0", b"event1", b"event0", b"event1"]
    assert [event.records for event in FakeEvent.made] == [[default] * 3, [own] * 2]


def test_a_stream_of_another_library_gets_an_event_each_time(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = StreamEvents()
    monkeypatch.setattr(FakeStream, "current", (0x5555_0000, 0, 1))
    recorded = [events.record(FakeTorch, 0) for _ in range(2)]
    assert [each.handle for each in recorded] == [b"event0", b"event1"], "its address may become another stream's"
    alive = weakref.ref(recorded[0].event)
    FakeEvent.made.clear()
    del recorded
    gc.collect()
    assert alive() is None
