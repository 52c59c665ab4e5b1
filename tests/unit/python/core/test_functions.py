"""Guards the functions of the extension module: memory, regions, captures, counters and events.

The native core behind them is tested in tests/unit, and through the package in the other folders here.
"""

from __future__ import annotations

import ctypes
import re
import sys
import threading
import time
import types
from array import array
from pathlib import Path
from typing import Any

import pytest
from core_regions import core_region
from other_threads import in_thread

from torch_memory_saver import _core, errors

MIB = 1 << 20


# Steps and their records.


def test_each_call_is_recorded_until_one_fails() -> None:
    results: list[int] = []
    calls = iter([("7",), ("2c", 16), ("x",), ("9",)])
    with pytest.raises(ValueError, match="'x'"):
        _core.record_each(results, int, calls)
    assert results == [7, 0x2C]
    _core.record_each(results, int, calls)
    assert results == [7, 0x2C, 9], "the iterator continues after the call that failed"


def test_an_iterator_that_fails_raises_its_error() -> None:
    results: list[int] = []
    with pytest.raises(ZeroDivisionError):
        _core.record_each(results, int, ((1 // number,) for number in (1, 0)))
    assert results == [1]


def test_an_item_moves_to_the_end_of_another_list() -> None:
    source, target = ["a", "b", "c", "d"], ["x"]
    _core.move(source, target)
    _core.move(source, target, 1)
    assert (source, target) == (["a", "c"], ["x", "d", "b"])
    with pytest.raises(IndexError):
        _core.move(source, target, 2)
    with pytest.raises(IndexError):
        _core.move([], target)
    assert (source, target) == (["a", "c"], ["x", "d", "b"])


class Manager:
    """A context manager whose end raises `error`, if there is one."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.exits: list[tuple[object, ...]] = []

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        self.exits.append(exception)
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("end", [None, KeyError("end")])
def test_within_raises_the_exception_of_the_function(end: BaseException | None) -> None:
    manager = Manager(end)
    with pytest.raises(ValueError, match="'x'") as raised:
        _core.within(manager, int, "x")
    assert raised.value.__context__ is end
    assert manager.exits == [(None, None, None)]


def test_within_raises_what_ends_the_program_rather_than_an_error() -> None:
    end = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt) as raised:
        _core.within(Manager(end), int, "x")
    assert raised.value is end
    assert isinstance(end.__context__, ValueError)


def test_within_raises_the_exception_of_the_end() -> None:
    with pytest.raises(KeyError):
        _core.within(Manager(KeyError("end")), int, "7")


def test_within_passes_all_arguments_and_leaves_no_references() -> None:
    item = object()
    before = sys.getrefcount(item)
    assert _core.within(Manager(), lambda *given: given == (item, 1, item), item, 1, item)
    assert _core.within(Manager(), lambda *given: given == ())
    assert sys.getrefcount(item) == before


def test_moves_and_records_leave_no_references() -> None:
    item, source, target = object(), [], []
    before = sys.getrefcount(item)
    _core.record_each(source, getattr, [(types.SimpleNamespace(item=item), "item")])
    assert source == [item]
    _core.move(source, target)
    assert sys.getrefcount(item) == before + 1
    target.clear()
    assert sys.getrefcount(item) == before


def test_wrong_types_of_steps_are_named() -> None:
    for call, text in (
        (lambda: _core.record_each((), int, []), r"record_each\(\): results must be a list, not <class 'tuple'>"),
        (lambda: _core.record_each([], int, ["12"]), r"record_each\(\): each of calls must be a tuple, not <class 'str'>"),
        (lambda: _core.record_each([], int, None), "not iterable"),
        (lambda: _core.record_each([], None, [()]), "not callable"),
        (lambda: _core.move((1,), []), r"move\(\): source must be a list, not <class 'tuple'>"),
        (lambda: _core.move([1], None), r"move\(\): target must be a list, not <class 'NoneType'>"),
    ):
        with pytest.raises(TypeError, match=text):
            call()  # type: ignore[no-untyped-call]


# Memory.


def test_pause_and_resume_with_bytes_through_the_module(simulator: Any) -> None:
    size = 3 * MIB
    reserved = 4 * MIB
    with core_region("module bytes", _core.BACKUP_PINNED, True):
        address = _core.allocate(size, 1)
    content = bytes(range(256)) * (size // 256)
    simulator.write(address, content)
    kind, tag = _core.BACKUP_PINNED, "module bytes"
    active = (address, size, reserved, 0, 1, _core.STATE_ACTIVE, kind, tag, _core.CONTENTS_OWN)
    assert _core.find(address + size - 1)[:9] == active
    assert [row[:9] for row in _core.segments()] == [active]
    assert _core.tag_info("module bytes") == (0, 0, 0)

    report = _core.pause(("module bytes", "unused"), None)
    assert report[:4] == (1, reserved, size, 1)
    assert isinstance(report[4], float) and report[4] >= 0
    assert simulator.usage(1).physical_bytes == 0
    row = _core.find(address)
    assert row is not None
    assert row[:9] == (address, size, reserved, size, 1, _core.STATE_PAUSED, kind, tag, _core.CONTENTS_OWN)
    assert row.allocated_at < row.changed_at <= time.monotonic()
    assert _core.tag_info("module bytes") == (1, 1, 0)

    done = _core.resume(None, 0)
    assert (done.allocations, done.bytes, done.copied_bytes, done.unknown_tags) == (1, reserved, size, 0)
    assert simulator.read(address, size) == content
    assert simulator.usage(1).physical_bytes == reserved
    assert _core.tag_info("module bytes") == (0, 1, 0)
    row = _core.find(address)
    assert row is not None
    assert row.contents == _core.CONTENTS_RESTORED
    assert _core.free(address) is True
    assert _core.free(address) is False
    assert _core.find(address) is None
    assert simulator.usage(1).handles == 0


def test_a_tag_counts_discarded_contents(simulator: Any) -> None:
    address = _core.allocate(MIB, 0)

    def cycle(**arguments: Any) -> int:
        _core.pause(None, None, **arguments)
        _core.resume(None, 0)
        return _core.tag_info("default").discards - before.discards

    before = _core.tag_info("default")
    assert cycle() == 1, "without a backup"
    assert cycle(backup=_core.BACKUP_PINNED) == 1
    assert cycle(backup=_core.BACKUP_DISK) == 1
    assert cycle(backup=_core.BACKUP_NONE) == 2
    live = (array("Q", [address]).tobytes(), array("Q", [address, address + 4096]).tobytes())
    assert cycle(find_live=lambda: live, preserves=True) == 3, "all but the preserved block"
    assert cycle(find_live=lambda: live, backup=_core.BACKUP_PINNED) == 3, "the rest was not in use"
    _core.pause(None, None, backup=_core.BACKUP_PINNED)
    assert cycle(backup=_core.BACKUP_NONE) == 4, "the backup of the pause before was given up"
    assert cycle(backup=_core.BACKUP_PINNED) == 4


def test_no_tags_selects_nothing_and_none_selects_everything(simulator: Any) -> None:
    _core.allocate(MIB, 0)
    nothing = _core.pause((), None)
    assert (nothing.allocations, nothing.bytes, nothing.copied_bytes, nothing.unknown_tags) == (0, 0, 0, 0)
    assert simulator.usage(0).handles == 1
    everything = _core.pause(None, None)
    assert (everything.allocations, everything.bytes) == (1, 2 * MIB)
    assert simulator.usage(0).handles == 0


def test_size_zero_and_absurd_sizes(simulator: Any) -> None:
    assert _core.allocate(0, 0) == 0
    assert _core.segments() == []
    for size in (simulator.device_memory + 1, 1 << 46, (1 << 64) - 1):
        with pytest.raises(errors.OutOfMemoryError) as failure:
            _core.allocate(size, 0)
        assert failure.value.bytes == size
    assert simulator.usage(0).reservations == 0


def test_segments_lists_more_than_it_first_has_room_for(simulator: Any) -> None:
    addresses = [_core.allocate(MIB, 0) for _ in range(100)]
    assert [row.address for row in _core.segments()] == addresses


def test_free_of_unmanaged_addresses(simulator: Any) -> None:
    address = _core.allocate(4 * MIB, 0)
    assert _core.free(0xDEAD000) is False
    with pytest.raises(errors.InvalidArgumentError):
        _core.free(address + MIB)
    assert _core.free(address) is True


def test_settings_of_allocations(simulator: Any, tmp_path: Path) -> None:
    _core.set_memory_margin(simulator.device_memory)
    assert _core.get_memory_margin() == simulator.device_memory
    with pytest.raises(errors.OutOfMemoryError):
        _core.allocate(MIB, 0)
    _core.set_memory_margin(0)
    _core.set_retain_backup(True)
    assert _core.get_retain_backup() is True
    _core.set_retain_backup(False)
    assert _core.get_retain_backup() is False
    for policy in (_core.HOST_POOL, _core.HOST_RETAIN, _core.HOST_RELEASE):
        _core.set_host_policy(policy)
        assert _core.get_host_policy() == policy
        assert _core.get_retain_backup() is (policy == _core.HOST_RETAIN)
    _core.set_retain_backup(True)
    assert _core.get_host_policy() == _core.HOST_RETAIN
    _core.set_retain_backup(False)
    assert _core.get_host_policy() == _core.HOST_RELEASE
    _core.set_disk_directory(tmp_path / "made here")  # type: ignore[arg-type]
    assert (tmp_path / "made here").is_dir()


def test_devices(simulator: Any) -> None:
    assert _core.device_count() == simulator.devices
    primary = ctypes.c_void_p()
    assert simulator.library.cuDevicePrimaryCtxRetain(ctypes.byref(primary), 1) == 0
    assert _core.active_devices() & 2
    assert simulator.library.cuDevicePrimaryCtxRelease_v2(1) == 0
    _core.allocate(MIB, 1)
    memory = _core.device_memory(1)
    assert (memory.total - memory.free, memory.total) == (2 * MIB, simulator.device_memory)
    _core.refresh_peers()
    infos = [_core.device_info(device) for device in range(2)]
    assert [info.total_bytes for info in infos] == [simulator.device_memory] * 2
    assert all(re.fullmatch(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", info.uuid) for info in infos)
    assert infos[0].uuid != infos[1].uuid
    with pytest.raises(errors.InvalidArgumentError, match="device"):
        _core.device_memory(simulator.devices)
    with pytest.raises(errors.InvalidArgumentError, match="devices 0 to"):
        _core.device_info(simulator.devices)


def test_without_the_preload_library_no_other_library_is_counted(simulator: Any) -> None:
    def allocate() -> None:
        address = ctypes.c_void_p()
        assert simulator.library.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(MIB)) == 0
        assert _core.libraries() == []
        assert simulator.library.cudaFree(address) == 0

    in_thread(allocate)  # cudaMalloc leaves the device's context current


def test_guard_bytes_are_counted(simulator: Any) -> None:
    first, second = sorted(_core.allocate(2 * MIB, device) for device in (0, 1))
    simulator.write(first, b"\xff" * 100 + b"\0" * 100)
    simulator.write(second, b"\xff\0" * 100)
    ranges = [(first, first + 100), (first + 100, first + 101), (first + 2 * MIB - 1, first + 2 * MIB + 1)]
    ranges += [(second, second + 200), (1 << 50, (1 << 50) + 1)]
    packed = array("Q", [end for pair in ranges for end in pair]).tobytes()
    assert _core.count_guard_bytes(None, None, packed) == [100, 0, None, 100, None]
    assert _core.count_guard_bytes(None, 0, packed, interruptible=True) == [100, 0, None, 100, None]
    assert _core.count_guard_bytes(("never used for bytes",), None, packed) == [None] * 5
    assert _core.count_guard_bytes((), None, b"") == []
    with pytest.raises(errors.CaptureInProgressError, match="check_fresh"):
        _core.capture_begin(None, 0)
        try:
            _core.count_guard_bytes(None, None, packed)
        finally:
            _core.capture_end()
    _core.pause(None, None)
    assert _core.count_guard_bytes(None, None, packed) == [None] * 5


def test_the_tags_of_regions_and_allocations(simulator: Any) -> None:
    _core.region_leave(_core.region_enter("listed: entered", _core.BACKUP_NONE, True))
    with core_region("listed: allöcated", _core.BACKUP_NONE, True):
        _core.free(_core.allocate(MIB, 0))
    tags = {tag: used for tag, used in _core.tags().items() if tag.startswith("listed: ")}
    assert list(tags.items()) == [("listed: entered", False), ("listed: allöcated", True)]


def test_counters_follow(simulator: Any) -> None:
    before = _core.counters()
    address = _core.allocate(MIB, 0)
    _core.pause(None, None)
    after = _core.counters()
    changed = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    assert changed.pop("pause_nanoseconds_total") > 0
    changed.pop("resident_peak_bytes", None)  # of all tests of this process
    assert changed == {
        "allocations": 1,
        "allocations_total": 1,
        "paused_bytes": 2 * MIB,
        "pauses_total": 1,
        "pause_bytes_total": 2 * MIB,
    }
    _core.free(address)
    assert _core.counters()["frees_total"] == before["frees_total"] + 1


# Regions and captures.


def test_regions_nest_and_belong_to_their_thread() -> None:
    outside = _core.region_current()
    with core_region("outer", _core.BACKUP_MMAP):
        with core_region("inn\u00e9r", _core.BACKUP_NONE, managed=False, runs=False):
            assert _core.region_current() == ("inn\u00e9r", _core.BACKUP_NONE, False, 2, False)
            seen: list[Any] = []
            thread = threading.Thread(target=lambda: seen.append(_core.region_current()))
            thread.start()
            thread.join()
            assert seen == [outside]
            _core.region_set("changed", _core.BACKUP_DISK, True)
            assert _core.region_current() == ("changed", _core.BACKUP_DISK, True, 2, True)
            _core.region_set("changed", _core.BACKUP_DISK, True, runs=False)
            assert not _core.region_current().runs
        assert _core.region_current() == ("outer", _core.BACKUP_MMAP, True, 1, True)
    assert _core.region_current() == outside
    assert outside.depth == 0


def test_a_region_that_another_thread_leaves_ends_on_its_own() -> None:
    outside = _core.region_current()
    elsewhere: list[int] = []

    def leave(region: int) -> None:
        thread = threading.Thread(target=lambda: elsewhere.append(_core.region_leave(region)))
        thread.start()
        thread.join()

    for _ in range(100):  # more than are remembered
        leave(_core.region_enter("left", _core.BACKUP_NONE, True))
        assert _core.region_current() == outside
    outer, inner = (_core.region_enter(tag, _core.BACKUP_NONE, True) for tag in ("outer", "inner"))
    leave(outer)
    assert _core.region_current().tag == "inner"
    leave(inner)
    assert _core.region_current() == outside
    assert set(elsewhere) == {-1}
    assert [_core.region_leave(region) for region in (inner, outer)] == [-1, -1]
    assert _core.region_leave(_core.region_enter("left", _core.BACKUP_NONE, True)) == 0


def test_regions_are_left_in_any_order_on_their_thread() -> None:
    outside = _core.region_current()
    outer = _core.region_enter("outer", _core.BACKUP_MMAP, True)
    inner = _core.region_enter(tag="inner", backup=_core.BACKUP_NONE, managed=False, host_policy=_core.HOST_POOL, runs=False)
    assert len({0, outer, inner}) == 3
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(_core.region_leave(outer)))
    thread.start()
    thread.join()
    assert seen == [-1]
    assert _core.region_leave(outer) == 1
    assert _core.region_current() == ("inner", _core.BACKUP_NONE, False, 1, False)
    assert _core.region_leave(region=inner) == 0
    assert _core.region_leave(inner) == -1
    assert _core.region_current() == outside


def test_capture_refuses_pause_and_lends_its_settings(simulator: Any) -> None:
    _core.capture_begin("cuda_graph", _core.BACKUP_NONE)
    address = _core.allocate(MIB, 0)
    row = _core.find(address)
    assert row is not None and row.tag == "cuda_graph"
    with pytest.raises(errors.CaptureInProgressError):
        _core.pause(None, None)
    assert _core.counters()["visible_captures"] == 1
    _core.capture_begin(None, _core.BACKUP_NONE)
    _core.capture_end()
    _core.capture_end()
    assert _core.counters()["visible_captures"] == 0
    assert _core.pause(None, None).allocations == 1


def test_each_capture_ends_by_its_own_name(simulator: Any) -> None:
    first = _core.capture_begin("cuda_graph", _core.BACKUP_NONE)
    second = _core.capture_begin("other", _core.BACKUP_NONE)
    assert first and second and first != second
    assert _core.capture_end(first)
    assert not _core.capture_end(first)
    address = _core.allocate(MIB, 0)
    row = _core.find(address)
    assert row is not None and row.tag == "other"
    begun = _core.capture_begin_on(1 << 40)  # The announced one, of this thread.
    assert _core.counters()["visible_captures"] == 1
    assert _core.capture_end(second) and _core.counters()["visible_captures"] == 1
    assert _core.capture_end(identity=begun, unless_it_goes_on=True) and _core.counters()["visible_captures"] == 0
    _core.free(address)


# Events.


def test_events_come_with_what_is_held_after_them(simulator: Any) -> None:
    before = _core.events()
    with core_region("module events", _core.BACKUP_PINNED, True):
        addresses = [_core.allocate(size, 0) for size in (3 * MIB, 2 * MIB)]
    _core.pause(("module events",), None)
    copy = _core.events()
    assert copy.recorded > before.recorded and copy.capacity == before.capacity
    new = copy.events[before.recorded - copy.recorded :]
    kinds = [row.phase or row.kind for row in new]
    assert kinds == ["allocate", "allocate", "begin", "turn", "synchronize", "plan", "copy", "unmap", "move", "end"]
    assert new[0][:3] == ("allocate", "", "")
    assert {row.operation for row in new[2:]} == {"pause"}
    assert (new[0].tag, new[0].device, new[0].address, new[0].bytes) == ("module events", 0, addresses[0], 3 * MIB)
    assert (new[-2].resident_change, new[-2].paused_change, new[-2].backup_change) == (-6 * MIB, 6 * MIB, 5 * MIB)
    assert (new[-1].allocations, new[-1].bytes, new[-1].copied_bytes) == (2, 6 * MIB, 5 * MIB)
    assert (new[-1].tag, new[-1].device, new[-1].status, new[-1].status_name) == (None, -1, 0, "OK")
    assert {row.thread for row in new} == {threading.get_native_id()}
    levels = [row for row in copy.levels if row.tag == "module events"]
    assert levels == [("module events", 0, 0, 6 * MIB, 5 * MIB)]
    for address in addresses:
        _core.free(address)
    assert not [row for row in _core.events().levels if row.tag == "module events"]


def test_the_free_memory_of_devices_is_sampled_on_request(simulator: Any) -> None:
    with core_region("module samples", _core.BACKUP_NONE, True):
        address = _core.allocate(2 * MIB, 1)
    _core.pause(("module samples",), None)
    _core.resume(("module samples",), None)
    assert not [row for row in _core.events().events if row.kind == "memory"], "nothing is sampled by default"
    _core.set_event_samples(True)
    try:
        _core.pause(("module samples",), None)
    finally:
        _core.set_event_samples(False)
    copy = _core.events()
    samples = [row for row in copy.events if row.kind == "memory" and row.call == copy.events[-1].call]
    assert [row.device for row in samples] == [1, 1]
    assert samples[1].bytes - samples[0].bytes == 2 * MIB
    _core.free(address)
