"""Guards ``_core.compact``: its report, its callbacks, and that it releases the GIL."""

from __future__ import annotations

import threading
from array import array
from typing import Any

import pytest
from recorded_hooks import RUN_OF_FOUR, SIZE, TIMEOUT_S

from torch_memory_saver import _core


@pytest.fixture
def slack(simulator: Any) -> list[int]:
    """Three allocations that share a run with slack, filled."""
    depth = _core.region_push("compacted", _core.BACKUP_NONE, True)
    addresses = [_core.allocate(SIZE, 0) for _ in range(RUN_OF_FOUR)]
    _core.region_pop(depth)
    _core.pause(("compacted",), None)
    _core.resume(("compacted",), None)
    _core.free(addresses.pop(-2))
    for number, address in enumerate(addresses):
        simulator.write(address, bytes([number + 1]) * SIZE)
    assert _core.counters()["slack_bytes"] == SIZE
    return addresses[-3:]


def assert_filled(simulator: Any, addresses: list[int], size: int = SIZE) -> None:
    for number, address in enumerate(addresses, start=RUN_OF_FOUR - 3):
        assert simulator.read(address, size) == bytes([number]) * size


def test_the_report_and_the_live_bytes(simulator: Any, slack: list[int]) -> None:
    """`find_live` is called once, in the pause; what it leaves out is not copied in either direction."""
    asked: list[Any] = []
    half = SIZE // 2

    def find_live() -> tuple[bytes, bytes]:
        asked.append((threading.get_ident(), _core.in_transition(), [_core.find(each).state for each in slack]))  # type: ignore[union-attr]
        ends = [end for address in slack for end in (address, address + half)]
        return array("Q", slack).tobytes(), array("Q", ends).tobytes()

    report = _core.compact(("compacted", "never"), None, False, find_live)
    assert asked == [(threading.get_ident(), True, [_core.STATE_PAUSING] * 3)]
    assert (report.allocations, report.bytes, report.copied_bytes, report.unknown_tags) == (3, SIZE, 3 * half, 1)
    assert_filled(simulator, slack, half)
    assert simulator.read(slack[0] + half, half) != bytes([RUN_OF_FOUR - 3]) * half, "what is dead was copied"


def test_progress_is_reported_in_both_directions(simulator: Any, slack: list[int]) -> None:
    reported: list[tuple[int, int]] = []
    _core.compact(None, None, progress=lambda *numbers: reported.append(numbers))
    assert {total for _, total in reported} == {3 * SIZE}
    assert [done for done, _ in reported].count(3 * SIZE) == 2, "the end of the pause, and of the resume"
    assert_filled(simulator, slack)


@pytest.mark.parametrize("interruptible", [False, True])
def test_an_exception_of_find_live_changes_nothing(simulator: Any, slack: list[int], interruptible: bool) -> None:
    def refuse() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        _core.compact(None, None, interruptible, refuse)
    assert {row.state for row in _core.segments()} == {_core.STATE_ACTIVE}
    assert _core.counters()["slack_bytes"] == SIZE
    assert_filled(simulator, slack)
    assert _core.compact(None, None).bytes == SIZE


def test_other_threads_run_meanwhile(simulator: Any, slack: list[int]) -> None:
    reached, opened = threading.Event(), threading.Event()

    def progress(done: int, total: int) -> None:
        reached.set()
        assert opened.wait(TIMEOUT_S)

    thread = threading.Thread(target=_core.compact, args=(None, None, False, None, progress))
    thread.start()
    assert reached.wait(TIMEOUT_S)
    # `counters` needs the GIL and the saver's lock.
    assert _core.counters()["allocations"] == RUN_OF_FOUR - 1
    opened.set()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive() and _core.counters()["slack_bytes"] == 0
    assert_filled(simulator, slack)
