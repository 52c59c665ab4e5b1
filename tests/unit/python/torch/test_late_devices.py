"""Guards which devices are watched for their first use, and how a watch ends. PyTorch is a stand-in."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fake_torch import FakeMemPool, FakeTorch
from interruptions import every_interruption

from torch_memory_saver import _core, errors
from torch_memory_saver._torch.pools import late_devices
from torch_memory_saver._torch.pools.late_devices import LateDevices

MIB = 1 << 20
TIMEOUT = 60
DEVICES = 4

Told = list[tuple[Callable[[int], None] | None, int]]


class ProgramsPool:
    """torch.cuda.MemPool, as the program sees it."""

    def __init__(self, torch: WatchedTorch) -> None:
        self.pool = None if torch.own else FakeMemPool(torch, torch.current_device(), managed=False)


class WatchedTorch(FakeTorch):
    """With the functions that only late_devices.py uses."""

    def __init__(self, release: tuple[int, int] = (2, 11)) -> None:
        super().__init__(release)
        self.devices = DEVICES
        self.own = False
        self.pool_class = type("MemPool", (ProgramsPool,), {})
        self.torch.cuda = SimpleNamespace(MemPool=self.pool_class)
        self.begin_routing_of_all_threads = self.begin_routing

    def make_pool(self, device: int, managed: bool) -> FakeMemPool:
        self.own = True
        self.pool_class(self)
        self.own = False
        return super().make_pool(device, managed)

    def is_making(self, memory_pool: object) -> bool:
        return self.own

    @property
    def watched(self) -> list[int]:
        return [device for device, *_ in self.routings]


Watching = tuple[WatchedTorch, LateDevices]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """The listeners that were registered, and their devices; (None, 0) where the devices in use were given access."""
    told: Told = []
    monkeypatch.setattr(_core, "preloaded", False)
    monkeypatch.setattr(_core, "listen_devices", lambda listener, mask: told.append((listener, mask)))
    monkeypatch.setattr(_core, "device_count", lambda: DEVICES)
    monkeypatch.setattr(_core, "active_devices", lambda: 1 << 0)
    monkeypatch.setattr(_core, "refresh_peers", lambda: told.append((None, 0)))
    monkeypatch.setattr(late_devices, "before_capture", [])
    monkeypatch.setattr(late_devices, "before_emptying", [])
    return told


@pytest.fixture
def watching(told: Told) -> Watching:
    """PyTorch, whose devices 1, 2 and 3 are watched."""
    torch, late = WatchedTorch(), LateDevices()
    late.begin(torch)  # type: ignore[arg-type]
    return torch, late


def test_devices_that_are_neither_in_use_nor_current_are_watched(told: Told) -> None:
    torch, late = WatchedTorch(), LateDevices()
    torch.device = 2
    late.begin(torch)  # type: ignore[arg-type]
    assert torch.watched == [1, 3]
    assert [mask for _, mask in told] == [0b1010]
    late.begin(torch)  # type: ignore[arg-type]
    assert torch.watched == [1, 3], "once"


def test_the_first_use_ends_the_watch_of_that_device_only(watching: Watching, told: Told) -> None:
    torch, late = watching
    pools = {device: pool for device, pool, _ in torch.routings}
    ((listener, _),) = told
    assert listener is not None
    for _ in range(2):
        listener(2)
        assert torch.watched == [1, 3]
        assert torch.uses[pools[2]] == 0, "torch releases its memory"
    late.end_all()
    assert torch.routings == torch.crashes == []
    assert not any(torch.uses[pool] for pool in pools.values())


def test_a_pool_of_the_program_ends_every_watch_and_one_of_this_package_none(watching: Watching, told: Told) -> None:
    torch, _ = watching
    torch.make_pool(1, managed=False)
    assert torch.watched == [1, 2, 3]
    del torch.pool_class(torch).pool
    assert torch.routings == torch.crashes == []
    assert told[1:] == [(None, 0)], "a device in use has access"


@pytest.mark.parametrize(
    ("listeners", "of_device_0", "of_device_2"), [("before_capture", 0, 2), ("before_emptying", 0b001, 0b101)]
)
def test_a_capture_or_an_emptying_gives_access_and_ends_the_watch_of_its_device(
    watching: Watching, told: Told, listeners: str, of_device_0: int, of_device_2: int
) -> None:
    torch, _ = watching
    (begins,) = getattr(late_devices, listeners)
    begins(of_device_0)
    assert torch.watched == [1, 2, 3]
    for _ in range(2):
        begins(of_device_2)
        assert torch.watched == [1, 3]
        assert told[1:] == [(None, 0)]


def test_a_failure_to_give_access_does_not_stop_a_capture(watching: Watching, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise errors.DriverError("no access", operation="enable_peer_access")

    torch, _ = watching
    monkeypatch.setattr(_core, "refresh_peers", fail)
    late_devices.before_capture[0](1)
    assert torch.watched == [2, 3]


def test_the_class_of_pools_is_wrapped_once(told: Told) -> None:
    torch = WatchedTorch()
    for _ in range(2):
        late = LateDevices()
        late.begin(torch)  # type: ignore[arg-type]
        late.end_all()
    assert torch.pool_class.__init__.__wrapped__ is ProgramsPool.__init__  # type: ignore[misc]


@pytest.mark.parametrize("case", ["old torch", "preloaded", "one device"])
def test_nothing_is_watched(case: str, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = WatchedTorch((2, 9) if case == "old torch" else (2, 11))
    monkeypatch.setattr(_core, "preloaded", case == "preloaded")
    if case == "one device":
        monkeypatch.setattr(_core, "device_count", lambda: 1)
    LateDevices().begin(torch)  # type: ignore[arg-type]
    assert torch.routings == told == []
    assert "__init__" not in vars(torch.pool_class)


def test_a_failure_of_torch_ends_what_had_begun(told: Told) -> None:
    torch, late = WatchedTorch(), LateDevices()
    torch.fail_begin_of_new_pools_on = 2
    late.begin(torch)  # type: ignore[arg-type]
    assert torch.routings == torch.crashes == []
    assert torch.watched == []


def test_the_next_use_continues_after_a_signal(told: Told) -> None:
    """It watches each device once, whatever the handler has interrupted."""
    watching = [(WatchedTorch(), LateDevices())]

    def begin() -> None:
        torch, late = watching[-1]
        late.begin(torch)  # type: ignore[arg-type]

    for _ in every_interruption(begin):
        begin()
        torch, _late = watching[-1]
        assert (torch.watched, torch.crashes) == ([1, 2, 3], [])
        assert len(late_devices.before_capture) == len(late_devices.before_emptying) == 1
        watching.append((WatchedTorch(), LateDevices()))
        late_devices.before_capture.clear()
        late_devices.before_emptying.clear()


def test_a_device_that_another_thread_uses_while_its_watch_begins_is_watched_no_more(told: Told) -> None:
    torch, late = WatchedTorch(), LateDevices()
    begin = torch.begin_routing

    def begin_and_use(device: int, pool: Any) -> None:
        begin(device, pool)
        if device == 2:
            ((listener, _),) = told
            assert listener is not None
            listener(device)

    torch.begin_routing_of_all_threads = begin_and_use  # type: ignore[method-assign]
    late.begin(torch)  # type: ignore[arg-type]
    assert torch.watched == [1, 3]
    assert torch.crashes == []


def test_a_watch_that_is_ended_before_its_routing_begins_ends_once(told: Told) -> None:
    torch, late = WatchedTorch(), LateDevices()
    begin, pools = torch.begin_routing, []

    def end_and_begin(device: int, pool: Any) -> None:
        pools.append(pool)
        if device == 2:
            late.end(device)
        begin(device, pool)

    torch.begin_routing_of_all_threads = end_and_begin  # type: ignore[method-assign]
    late.begin(torch)  # type: ignore[arg-type]
    assert torch.watched == [1, 3]
    assert torch.uses[pools[1]] == 0, "torch releases its memory"
    assert torch.crashes == []


def test_a_failure_of_the_driver_is_no_error(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise errors.DriverError("no driver", operation="active_devices")

    monkeypatch.setattr(_core, "active_devices", fail)
    torch = WatchedTorch()
    LateDevices().begin(torch)  # type: ignore[arg-type]
    assert torch.routings == told == []


def test_a_forked_child_watches_nothing(watching: Watching) -> None:
    torch, late = watching
    before = list(torch.routings)
    late.after_fork_in_child()
    late.end_all()
    assert torch.routings == before, "they belong to the parent"


@pytest.fixture
def allocate(simulator: Any) -> Iterator[Callable[[], None]]:
    """Allocates on device 1 as torch does, without the GIL. Everything is freed at the end."""
    library = ctypes.CDLL(_core.library_path)
    library.tms_torch_ordinary_malloc.restype = ctypes.c_void_p
    library.tms_torch_ordinary_malloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    library.tms_torch_default_free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    addresses = []
    yield lambda: addresses.append(library.tms_torch_ordinary_malloc(MIB, 1, None))
    _core.listen_devices(None, 0)
    for address in addresses:
        assert _core.find(address) is None
        library.tms_torch_default_free(address, MIB, 1, None)


@pytest.mark.parametrize("in_thread", [False, True])
def test_the_main_thread_calls_a_listener_between_two_instructions(in_thread: bool, allocate: Callable[[], None]) -> None:
    told = []
    _core.listen_devices(lambda device: told.append((device, threading.get_ident())), 1 << 1)
    for _ in range(2):
        if in_thread:
            thread = threading.Thread(target=allocate)
            thread.start()
            thread.join(TIMEOUT)
        else:
            allocate()
        assert told == [(1, threading.get_ident())]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_makes_no_call_of_its_parent(allocate: Callable[[], None]) -> None:
    """The main thread waits, so the call is still pending when another thread forks. The child begins on that thread."""
    told: list[int] = []
    statuses: list[int] = []
    _core.listen_devices(told.append, 1 << 1)

    def work() -> None:
        allocate()
        child = os.fork()
        if child == 0:
            os.sched_yield()  # gives the GIL away and takes it again, which is when Python sees that calls are pending
            os._exit(len(told))
        statuses.append(os.waitpid(child, 0)[1])

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # no other thread runs before this one waits
    try:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(TIMEOUT)
    finally:
        sys.setswitchinterval(interval)
    assert statuses == [0] and told == [1]


def test_an_exception_of_a_listener_is_reported(allocate: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda report: reported.append(report.object))
    _core.listen_devices(divide := lambda device: device / 0, 1 << 1)
    allocate()
    assert reported == [divide]


@pytest.mark.parametrize("arguments", [(3, 1), (None,), (None, "1")])
def test_a_listener_is_callable_or_none(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError):
        _core.listen_devices(*arguments)
