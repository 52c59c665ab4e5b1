"""Guards that a signal handler that raises leaves no lock of the records of blocks held, and that a finalizer may change a
record while its own thread does."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from interruptions import every_interruption, finalize_at_every_place
from other_threads import in_thread

from torch_memory_saver import _core
from torch_memory_saver._engine.tensors.preserved import PreservedObjects
from torch_memory_saver._torch.binding.history import Request as HistoryRequest
from torch_memory_saver._torch.binding.history import _Recorder
from torch_memory_saver._torch.memory.live_blocks import ResumedBlocks


class Module:
    """A module without submodules, and with no buffers."""

    def modules(self) -> list[Any]:
        return []


def _preserve() -> Callable[[], object]:
    def storage(tensor: object) -> Any:
        raise AssertionError("there are no tensors")

    tensor = type("Tensor", (), {"layout": property(lambda self: None), "untyped_storage": storage})
    torch = SimpleNamespace(
        Tensor=tensor, nn=SimpleNamespace(Parameter=tensor), strided=None, UntypedStorage=SimpleNamespace()
    )
    torch.UntypedStorage._new_with_weak_ptr = storage
    objects, modules, numbers = PreservedObjects(), [Module(), Module()], iter(range(1 << 20))

    def use() -> None:
        tag = f"tag{next(numbers) % 4}"
        added = objects.add(torch, modules, tag, True)
        for _, found in objects.find_storages(torch):
            assert list(found) == []
        objects.remove(added, tag)

    return use


def _history() -> Callable[[], object]:
    def record(enabled: object, context: object = None, stacks: object = None, max_entries: int = 0) -> None:
        pass

    memory = SimpleNamespace(_record_memory_history=record)
    torch = SimpleNamespace(cuda=SimpleNamespace(memory=memory, device_count=lambda: 1), __version__="2.11")
    recorder = _Recorder()

    def use() -> None:
        recorder.start(torch, HistoryRequest("all", "alloc", "python", 8, False, False))
        recorder.stop(torch)

    return use


def _resumed(monkeypatch: pytest.MonkeyPatch) -> Callable[[], object]:
    resumed = ResumedBlocks()
    rows = [SimpleNamespace(address=address, state=_core.STATE_PAUSED, tag="a") for address in (1, 2)]
    segments = [
        {"address": address, "total_size": 512, "blocks": [{"size": 512, "state": "active_allocated"}]} for address in (1, 2)
    ]
    torch: Any = SimpleNamespace(segments=lambda: segments)
    monkeypatch.setattr(_core, "segments", lambda: rows)

    def use() -> None:
        resumed.note(torch, None)
        assert resumed.live_in(segments[0]) == frozenset({(1, 512)})

    return use


@pytest.fixture(params=["preserved", "history", "resumed"])
def use(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], object]:
    if request.param == "resumed":
        return _resumed(monkeypatch)
    return _preserve() if request.param == "preserved" else _history()


def test_an_interrupted_change_leaves_no_lock_held(use: Callable[[], object]) -> None:
    for _ in every_interruption(use):
        in_thread(use)


def test_a_finalizer_may_change_what_its_thread_changes(use: Callable[[], object]) -> None:
    in_thread(lambda: finalize_at_every_place(use, use))
