"""Guards the callbacks of pause and resume: which bytes are live, and the progress of the copies."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from core_regions import core_region

from torch_memory_saver import _core, errors

MIB = 1 << 20
SIZE = 4 * MIB
CONTENT = bytes(range(1, 256)) * (SIZE // 255 + 1)


def allocate(simulator: Any, tag: str = "a", backup: int = _core.BACKUP_PINNED, device: int = 0, size: int = SIZE) -> int:
    with core_region(tag, backup, True):
        address = _core.allocate(size, device)
    simulator.write(address, CONTENT[:size])
    return address


def numbers(*values: int) -> bytes:
    return array("Q", values).tobytes()


def state(address: int) -> int:
    row = _core.find(address)
    assert row is not None
    return row.state


def amounts(report: _core.Report) -> tuple[int, int, int]:
    return report.allocations, report.bytes, report.copied_bytes


def assert_untouched(simulator: Any, address: int) -> None:
    """Active, with its contents, and with no backup; and the next cycle works."""
    row = _core.find(address)
    assert row is not None and (row.backup_bytes, row.state) == (0, _core.STATE_ACTIVE)
    assert simulator.read(address, SIZE) == CONTENT[:SIZE]
    assert amounts(_core.pause(None, None)) == (1, SIZE, SIZE)
    assert amounts(_core.resume(None, None)) == (1, SIZE, SIZE)
    assert simulator.read(address, SIZE) == CONTENT[:SIZE]


# Live bytes.


@pytest.mark.parametrize("backup", [_core.BACKUP_PINNED, _core.BACKUP_MMAP], ids=["pinned", "mmap"])
def test_live_bytes_alone_are_copied(simulator: Any, backup: int) -> None:
    first, second = sorted(allocate(simulator, backup=backup) for _ in range(2))
    ranges = [(first, first + 512), (first + MIB, first + 2 * MIB + 1024), (second + SIZE - 512, second + SIZE)]
    calls: list[Any] = []

    def find_live() -> tuple[bytes, bytes]:
        calls.append((threading.get_ident(), _core.in_transition(), [row.state for row in _core.segments()]))
        return numbers(first, second), numbers(*(end for pair in ranges for end in pair))

    live = sum(end - begin for begin, end in ranges)
    report = _core.pause(None, None, False, None, find_live)
    assert calls == [(threading.get_ident(), True, [_core.STATE_PAUSING] * 2)]
    assert amounts(report) == (2, 2 * SIZE, live)
    assert sum(row.backup_bytes for row in _core.segments()) == live
    assert _core.host_backup(first, SIZE) is None, "it was not copied as a whole"
    assert _core.host_backup(first + 500, 13) is None
    assert _core.host_backup(first + MIB, 1) is not None
    assert amounts(_core.resume(None, None)) == (2, 2 * SIZE, live)
    for begin, end in ranges:
        base = first if begin < first + SIZE else second
        assert simulator.read(begin, end - begin) == CONTENT[begin - base : end - base]
    assert simulator.read(first + 512, MIB - 512) != CONTENT[512:MIB], "what is dead was copied"


def test_allocations_that_are_not_named_are_copied_whole(simulator: Any) -> None:
    named, other = allocate(simulator), allocate(simulator)
    report = _core.pause(None, None, False, None, lambda: (numbers(named), numbers(named, named + 4096)))
    assert report.copied_bytes == 4096 + SIZE
    _core.resume(None, None)
    assert simulator.read(named, 4096) == CONTENT[:4096]
    assert simulator.read(other, SIZE) == CONTENT[:SIZE]


def test_files_hold_the_live_bytes(simulator: Any) -> None:
    address = allocate(simulator, backup=_core.BACKUP_DISK)
    assert (
        _core.pause(None, None, False, None, lambda: (numbers(address), numbers(address, address + 512))).copied_bytes == 512
    )
    assert amounts(_core.resume(None, None)) == (1, SIZE, 512)
    assert simulator.read(address, 512) == CONTENT[:512]


def test_an_allocation_without_a_live_byte(simulator: Any) -> None:
    address = allocate(simulator)
    assert amounts(_core.pause(None, None, False, None, lambda: (numbers(address), b""))) == (1, SIZE, 0)
    assert _core.host_backup(address, 1) is None
    assert amounts(_core.resume(None, None)) == (1, SIZE, 0)
    simulator.write(address, CONTENT[:SIZE])
    assert amounts(_core.pause(None, None)) == (1, SIZE, SIZE)
    _core.resume(None, None)
    assert simulator.read(address, SIZE) == CONTENT[:SIZE]


def test_without_an_answer_everything_is_copied(simulator: Any) -> None:
    address = allocate(simulator)
    assert _core.pause(None, None, False, None, lambda: None).copied_bytes == SIZE
    _core.resume(None, None)
    assert simulator.read(address, SIZE) == CONTENT[:SIZE]


def test_live_bytes_of_unknown_allocations(simulator: Any) -> None:
    """An allocation of another tag, one that has been freed, and one that was never made."""
    address, other = allocate(simulator), allocate(simulator, "b")
    freed = allocate(simulator)
    assert _core.free(freed)
    known = sorted([other, freed, 1 << 12])

    def find_live() -> tuple[bytes, bytes]:
        return numbers(*known), numbers(*(end for begin in known for end in (begin, begin + 512)))

    assert amounts(_core.pause(("a",), None, False, None, find_live)) == (1, SIZE, SIZE)
    assert state(other) == _core.STATE_ACTIVE
    _core.resume(None, None)
    assert simulator.read(address, SIZE) == CONTENT[:SIZE]


@pytest.mark.parametrize(
    ("answer", "exception", "message"),
    [
        (lambda base: 3, TypeError, "must return None or two or three bytes objects, not 3"),
        (lambda base: (numbers(base),), TypeError, "two or three bytes objects"),
        (lambda base: (numbers(base),) * 4, TypeError, "two or three bytes objects"),
        (lambda base: ([base], []), TypeError, "bytes"),
        (lambda base: (numbers(base), bytearray(numbers(base, base + 1))), TypeError, "bytes"),
        (lambda base: (numbers(base)[:7], b""), ValueError, "groups of 8"),
        (lambda base: (numbers(base), numbers(base)), ValueError, "groups of 16"),
        (lambda base: (numbers(base, base), b""), ValueError, "in order"),
        (lambda base: (numbers(base + MIB, base), b""), ValueError, "in order"),
        (lambda base: (numbers(base), numbers(base + 1, base + 1)), ValueError, "in order"),
        (lambda base: (numbers(base), numbers(base, base + 2, base + 1, base + 3)), ValueError, "in order"),
        (lambda base: (numbers(base), numbers(base, base + 2), [base + 1]), TypeError, "bytes"),
        (lambda base: (numbers(base), numbers(base, base + 2), b""), ValueError, "for each range an end"),
        (lambda base: (numbers(base), numbers(base, base + 2), numbers(base)), ValueError, "inside it"),
        (lambda base: (numbers(base), numbers(base, base + 2), numbers(base + 3)), ValueError, "inside it"),
    ],
)
def test_invalid_answers_change_nothing(
    simulator: Any, answer: Callable[[int], Any], exception: type[Exception], message: str
) -> None:
    address = allocate(simulator)
    with pytest.raises(exception, match=message):
        _core.pause(None, None, False, None, lambda: answer(address))
    assert_untouched(simulator, address)


class Stop(BaseException):
    """Not an Exception, like KeyboardInterrupt."""


def raise_stop(*unused: Any) -> Any:
    raise Stop("in the callback")


@pytest.mark.parametrize("interruptible", [True, False])
def test_an_exception_of_find_live_ends_the_pause_with_nothing_changed(simulator: Any, interruptible: bool) -> None:
    address = allocate(simulator)
    with pytest.raises(Stop, match="in the callback") as failure:
        _core.pause(None, None, interruptible, None, raise_stop)
    assert failure.traceback[-1].name == "raise_stop"
    assert_untouched(simulator, address)


def test_an_exception_of_find_live_on_another_thread(simulator: Any) -> None:
    address = allocate(simulator)
    caught: list[BaseException] = []

    def pause() -> None:
        try:
            _core.pause(None, None, False, None, raise_stop)
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=pause)
    thread.start()
    thread.join()
    assert [type(error) for error in caught] == [Stop]
    assert_untouched(simulator, address)


@pytest.mark.parametrize("call", [_core.pause, _core.resume])
def test_a_callback_cannot_pause_or_resume(simulator: Any, call: Callable[..., Any]) -> None:
    address = allocate(simulator)
    with pytest.raises(errors.InvalidStateError):
        _core.pause(None, None, False, None, lambda: call(None, None))
    assert_untouched(simulator, address)


def test_memory_is_allocated_and_freed_in_a_callback(simulator: Any) -> None:
    address = allocate(simulator)
    made: list[int] = []

    def find_live() -> None:
        assert _core.free(address), "its owner: the pause finishes it"
        made.append(allocate(simulator))

    report = _core.pause(None, None, False, None, find_live)
    assert report.allocations <= 1
    assert _core.find(address) is None
    assert state(made[0]) == _core.STATE_ACTIVE
    assert simulator.read(made[0], SIZE) == CONTENT[:SIZE]


def test_a_failure_of_the_pause_after_the_question(simulator: Any) -> None:
    """The answer's references are released, whatever follows."""
    address = allocate(simulator)
    simulator.fail_after("cuMemcpyDtoHAsync", 0, 1, 719)
    with pytest.raises(errors.TorchMemorySaverError):
        _core.pause(None, None, False, None, lambda: (numbers(address), numbers(address, address + 4096)))
    simulator.stop_failing()
    assert_untouched(simulator, address)


# Progress.


def test_progress_is_reported(simulator: Any) -> None:
    addresses = [allocate(simulator) for _ in range(3)]
    reported: list[tuple[int, int]] = []
    for call in (_core.pause, _core.resume):
        reported.clear()
        report = call(None, None, progress=lambda *numbers: reported.append(numbers))
        assert report.copied_bytes == 3 * SIZE
        assert reported[-1] == (3 * SIZE, 3 * SIZE)
        assert {total for _, total in reported} == {3 * SIZE}
        assert [done for done, _ in reported] == sorted(done for done, _ in reported)
    assert all(simulator.read(address, SIZE) == CONTENT[:SIZE] for address in addresses)


def test_progress_of_live_bytes(simulator: Any) -> None:
    address = allocate(simulator)
    reported: list[tuple[int, int]] = []
    _core.pause(
        None,
        None,
        find_live=lambda: (numbers(address), numbers(address, address + 4096)),
        progress=lambda *numbers: reported.append(numbers),
    )
    assert reported[-1] == (4096, 4096)


def test_no_progress_is_reported_if_nothing_is_copied(simulator: Any) -> None:
    allocate(simulator, backup=_core.BACKUP_NONE)
    reported: list[tuple[int, int]] = []
    _core.pause(None, None, progress=lambda *numbers: reported.append(numbers))
    _core.resume(None, None, progress=lambda *numbers: reported.append(numbers))
    assert all(numbers == (0, 0) for numbers in reported)


def test_an_exception_of_progress_is_raised(simulator: Any) -> None:
    """Before the commit point everything is undone; the last call may come after it, when the work is complete."""
    address = allocate(simulator)
    with pytest.raises(Stop):
        _core.pause(None, None, progress=raise_stop)
    assert state(address) in (_core.STATE_ACTIVE, _core.STATE_PAUSED)
    _core.resume(None, None)
    assert_untouched(simulator, address)
    _core.pause(None, None)
    with pytest.raises(Stop):
        _core.resume(None, None, progress=raise_stop)
    assert state(address) in (_core.STATE_ACTIVE, _core.STATE_PAUSED)
    _core.resume(None, None)
    assert_untouched(simulator, address)


def test_progress_is_not_called_again_after_it_has_raised(simulator: Any) -> None:
    """The thread of the call copies for one device, and then only runs the callbacks."""
    sizes = {allocate(simulator, size=size, device=min(number, 1)): size for number, size in enumerate([512, *[SIZE] * 7])}
    reported: list[int] = []

    def progress(done: int, total: int) -> None:
        if not done:
            return  # The thread of the call has not copied yet.
        reported.append(done)
        simulator.set_bandwidth(64 * MIB)  # The other device needs several intervals between two calls for the rest.
        raise Stop

    simulator.set_bandwidth(8 << 10)  # The other device would need an hour, and this one a moment.
    with pytest.raises(Stop):
        _core.pause(None, None, progress=progress)
    simulator.set_bandwidth(0)
    assert reported == [512]
    assert {state(address) for address in sizes} == {_core.STATE_ACTIVE}, "it was reported before the commit point"
    assert all(simulator.read(address, size) == CONTENT[:size] for address, size in sizes.items())
