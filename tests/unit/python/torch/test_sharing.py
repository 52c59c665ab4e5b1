"""Guards what is sent to other processes: what goes with a storage, how long it is kept, and pauses that refuse. PyTorch is
a stand-in; the native core runs on the simulated GPU."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_sending import FakeEvent, FakeStorage, FakeStream, FakeTorch, fall, reset
from interruptions import every_interruption

from torch_memory_saver import _core
from torch_memory_saver._torch.base.steps import InterruptSafeLock
from torch_memory_saver._torch.sharing import ipc, sent_memory
from torch_memory_saver._torch.sharing.sent_memory import SharedMemory
from torch_memory_saver.errors import CaptureInProgressError, InvalidArgumentError, InvalidStateError
from torch_memory_saver.options import check_if_shared

MIB = 1 << 20


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SharedMemory]:
    reset(monkeypatch, tmp_path)
    yield SharedMemory(FakeTorch.ordinary_memory)
    for row in _core.segments():
        _core.free(row.address)


def allocate(tag: str = "weights", size: int = 4 * MIB) -> int:
    level = _core.region_enter(tag, _core.BACKUP_NONE, True)
    try:
        return _core.allocate(size, 0)
    finally:
        _core.region_leave(level)


def send(shared: SharedMemory, storage: FakeStorage) -> tuple[Any, ...]:
    row = _core.find(storage.address)
    assert row is not None
    return shared.send(FakeTorch, FakeTorch.share, storage, row)


def test_a_storage_goes_with_its_memory_a_counter_and_an_event(shared: SharedMemory, tmp_path: Path) -> None:
    address = allocate()
    fields = send(shared, FakeStorage(1000, address=address + MIB))
    exported = _core.export_memory(address)
    assert fields[1] == ipc.describe(1, [exported], shared.nonce)
    assert (fields[0], fields[2], fields[3]) == (0, 1000, MIB)
    (path,) = tmp_path.iterdir()
    assert fields[4:] == (f"/{path.name}".encode(), 0, b"event0", True)
    again = send(shared, FakeStorage(10, address=address))
    assert again[1] == fields[1] and again[5] != fields[5]
    assert FakeEvent.made[0].records == [FakeStream.current] * 2
    assert len(FakeStorage.imported) == 1, "tested once"
    tested = FakeStorage.imported[0]
    assert tested[1] == fields[1] and tested[5] not in (fields[5], again[5]) and tested[-1] is False
    assert (FakeTorch.ordinary, len(FakeTorch.shared)) == (1, 1), "PyTorch's format is looked at once"
    assert FakeStorage.released == [(b"/torch_counters", 7)], "what was shared for that is gone"


def test_a_pytorch_that_does_not_import_is_an_error(shared: SharedMemory) -> None:
    address = allocate()
    FakeStorage.refuses = "received a handle from the future"
    with pytest.raises(InvalidStateError, match=r"2\.11\.0 does not import .*from the future\). Send tensor\.cpu"):
        send(shared, FakeStorage(10, address=address))
    assert shared.possibly_shared_bytes(None) == 0


def test_counters_that_do_not_fall_are_reported_once(
    shared: SharedMemory, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = allocate()
    monkeypatch.setattr(FakeStorage, "counts", False)
    for _ in range(2):
        send(shared, FakeStorage(10, address=address))
    assert [record.getMessage().partition(". ")[0] for record in caplog.records] == [
        "share: PyTorch 2.11.0 does not count the receivers of a tensor as expected"
    ]


def test_a_storage_is_kept_until_its_counter_falls(shared: SharedMemory) -> None:
    address = allocate()
    storages = [FakeStorage(10, address=address) for _ in range(2)]
    alive = [weakref.ref(storage) for storage in storages]
    sent = [send(shared, storage) for storage in storages]
    storages.clear()
    shared.collect()
    assert [reference() is not None for reference in alive] == [True, True]
    fall(sent[0])
    shared.collect()
    gc.collect()
    assert [reference() is not None for reference in alive] == [False, True]
    assert shared.possibly_shared_bytes(None) == 4 * MIB
    fall(sent[1])
    assert shared.possibly_shared_bytes(None) == 0
    gc.collect()
    assert [reference() is not None for reference in alive] == [False, False]


def test_two_first_sends_of_the_same_memory_at_once_are_both_kept(
    shared: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = allocate()
    storages = [FakeStorage(10, address=address) for _ in range(2)]
    alive = [weakref.ref(storage) for storage in storages]
    record = FakeEvent.record

    def send_another(event: FakeEvent, stream: tuple[int, int, int]) -> None:
        monkeypatch.setattr(FakeEvent, "record", record)
        send(shared, storages.pop())
        event.record(stream)

    monkeypatch.setattr(FakeEvent, "record", send_another)
    send(shared, storages[0])
    storages.clear()
    shared.collect()
    gc.collect()
    assert [reference() is not None for reference in alive] == [True, True]


def test_a_pause_ends_what_was_sent(shared: SharedMemory) -> None:
    addresses = {tag: allocate(tag) for tag in ("a", "b")}
    alive = {}
    for tag, address in addresses.items():
        storage = FakeStorage(10, address=address)
        alive[tag] = weakref.ref(storage)
        send(shared, storage)
    del storage
    assert shared.possibly_shared_bytes(("a",)) == 4 * MIB
    _core.pause(("a",), None)
    shared.collect()
    gc.collect()
    assert [alive[tag]() is not None for tag in ("a", "b")] == [False, True]
    _core.resume(("a",), None)
    assert (shared.possibly_shared_bytes(("a",)), shared.possibly_shared_bytes(("b",))) == (0, 4 * MIB)
    send(shared, FakeStorage(10, address=addresses["b"]))
    _core.pause(("b",), None)
    _core.resume(("b",), None)
    assert shared.possibly_shared_bytes(None) == 0, "paused and resumed unseen"


def test_memory_that_was_freed_is_forgotten(shared: SharedMemory) -> None:
    address = allocate()
    send(shared, FakeStorage(10, address=address))
    assert _core.free(address)
    assert shared.possibly_shared_bytes(None) == 0


def test_counters_are_looked_at_while_more_is_sent(shared: SharedMemory) -> None:
    address = allocate()
    storage = FakeStorage(10, address=address)
    alive = weakref.ref(storage)
    fall(send(shared, storage))
    del storage
    other = FakeStorage(20, address=address)
    for _ in range(sent_memory._COLLECT_AFTER):
        send(shared, other)
    gc.collect()
    assert alive() is None


def test_waiting_for_importers_ends_when_they_drop_it(shared: SharedMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = send(shared, FakeStorage(10, address=allocate()))
    for tags, left in ((("other",), 0), (None, 4 * MIB)):
        with shared.closed(tags, 0.0) as bytes:
            assert bytes == left
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            fall(fields)

    monkeypatch.setattr(sent_memory.time, "sleep", nap)
    with shared.closed(None, 1e9) as bytes:
        assert (bytes, len(naps)) == (0, 3)


def test_nothing_is_sent_between_the_look_and_the_pause(shared: SharedMemory) -> None:
    address, other = allocate("weights"), allocate("other")
    fields = send(shared, FakeStorage(10, address=address))
    with shared.closed(("weights",), 0.0) as left:
        assert left == 4 * MIB
        fall(send(shared, FakeStorage(10, address=address)))  # the pause does not come
    fall(fields)
    with shared.closed(("weights",), 0.0) as left, shared.closed(None, 0.0):
        assert left == 0
        for _ in range(2):
            with pytest.raises(InvalidStateError, match=r"share: this memory is being paused\. Share it after") as caught:
                send(shared, FakeStorage(10, address=address))
            assert (caught.value.operation, caught.value.tag, caught.value.device) == ("share", "weights", 0)
        assert len(FakeEvent.made[0].records) == 2, "what is refused leaves no trace"
    with shared.closed(("weights",), 0.0):
        fall(send(shared, FakeStorage(10, address=other)))
    fall(send(shared, FakeStorage(10, address=address)))


def test_a_send_that_has_begun_counts_as_shared(shared: SharedMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread's pause may look before it is known what goes with the storage."""
    address = allocate()
    looks: list[int] = []

    def look_and_record(event: FakeEvent, stream: tuple[int, int, int]) -> None:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        record(event, stream)

    def look() -> None:
        with shared.closed(("weights",), 0.0) as left:
            looks.append(left)
        looks.append(shared.possibly_shared_bytes(None))

    record = FakeEvent.record
    monkeypatch.setattr(FakeEvent, "record", look_and_record)
    fields = send(shared, FakeStorage(10, address=address))
    assert set(looks) == {4 * MIB}
    fall(fields)
    monkeypatch.setattr(FakeTorch, "capturing", {0})
    with pytest.raises(CaptureInProgressError):
        send(shared, FakeStorage(10, address=address))
    assert shared.possibly_shared_bytes(None) == 0, "nor does one that has failed"


def test_every_interruption_of_a_send(shared: SharedMemory) -> None:
    """No pause waits for a call that has ended, and the lock is free."""
    address = allocate()
    storage = FakeStorage(10, address=address)
    for _ in every_interruption(lambda: send(shared, storage)):
        assert shared._sending == {}
        assert is_free(shared)


def test_every_interruption_of_a_pause_that_waits(shared: SharedMemory) -> None:
    address = allocate()

    def close() -> None:
        with shared.closed(None, 0.0) as left:
            assert left == 0

    for _ in every_interruption(close):
        assert is_free(shared)
        fall(send(shared, FakeStorage(10, address=address)))
        shared.collect()  # so that the next call has no more places than the last one


def is_free(shared: SharedMemory) -> bool:
    """Whether another thread gets the lock."""
    seen: list[bool] = []
    thread = threading.Thread(target=lambda: seen.append(shared._lock._lock.acquire(timeout=0)))
    thread.start()
    thread.join()
    shared._lock = InterruptSafeLock()
    return seen == [True]


def test_sharing_in_a_capture_or_of_paused_memory_changes_nothing(shared: SharedMemory) -> None:
    address = allocate()
    for current in range(2):
        FakeTorch.current, FakeTorch.capturing = current, {0}
        with pytest.raises(CaptureInProgressError, match="before or after the capture"):
            send(shared, FakeStorage(10, address=address))
        assert FakeTorch.current == current
    FakeTorch.capturing = {1}  # another device's stream
    _core.pause(None, None)
    with pytest.raises(InvalidStateError, match="this memory is paused"):
        send(shared, FakeStorage(10, address=address))
    assert (FakeTorch.shared, FakeEvent.made) == ([], [])
    _core.resume(None, None)
    assert send(shared, FakeStorage(10, address=address))[5] == 0, "a refused send uses up no counter"


def test_a_forked_child_keeps_what_its_parent_sent(shared: SharedMemory) -> None:
    storage = FakeStorage(10, address=allocate())
    alive = weakref.ref(storage)
    send(shared, storage)
    del storage
    shared.after_fork_in_child()
    shared.collect()
    gc.collect()
    assert alive() is not None, "its release would call CUDA"
    assert shared.possibly_shared_bytes(None) == 0


def test_forked_siblings_identify_themselves_differently(shared: SharedMemory) -> None:
    storage = FakeStorage(10, address=allocate())
    descriptions = []
    for _ in range(2):
        shared.after_fork_in_child()
        descriptions.append(send(shared, storage)[1])
    assert descriptions[0] != descriptions[1], "the process id is the same, as when it is used again"


# ---- the hooks ----


def test_hooks_wait_for_the_end_of_an_import_of_torch() -> None:
    def share(storage: object) -> None:
        pass

    storage = SimpleNamespace(_share_cuda_=share)
    torch = SimpleNamespace(UntypedStorage=storage, __spec__=SimpleNamespace(_initializing=True))
    sent_memory.install(torch, SharedMemory(FakeTorch.ordinary_memory))
    assert storage._share_cuda_ is share
    torch.__spec__._initializing = False
    torch.cuda = SimpleNamespace(ipc_collect=lambda: 7)
    torch.multiprocessing = SimpleNamespace(reductions=SimpleNamespace(reduce_tensor=share))
    sent_memory.install(torch, SharedMemory(FakeTorch.ordinary_memory))
    assert storage._share_cuda_ is not share
    assert torch.cuda.ipc_collect() == 7


# ---- options ----


def test_what_a_pause_may_do_about_shared_memory() -> None:
    assert [check_if_shared(each) for each in ("allow", "refuse", "wait")] == ["allow", "refuse", "wait"]
    for wrong in ("maybe", None, 3):
        with pytest.raises(InvalidArgumentError, match="if_shared"):
            check_if_shared(wrong)
