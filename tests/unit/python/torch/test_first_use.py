"""Guards the first use of PyTorch: captures are watched before anything else, the next use continues after an exception, and
no other thread uses PyTorch before."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from interruptions import every_interruption

from torch_memory_saver._torch.binding import layer

TIMEOUT_S = 60
SHORT_S = 0.2


class FirstUse:
    """The first use of a stand-in for PyTorch.

    Attributes:
        done: The steps that were made, in their order.
        actions: What a step does, by its name.
    """

    def __init__(self) -> None:
        self.done: list[str] = []
        self.actions: dict[str, Callable[[], object]] = {}
        cuda = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True, init=lambda: None)
        self.torch = SimpleNamespace(__version__="2.11.0", cuda=cuda, _C=SimpleNamespace())

    def step(self, name: str) -> Callable[..., None]:
        def make(*_: Any) -> None:
            self.actions.get(name, lambda: None)()
            self.done.append(name)

        return make

    def make_torch_cuda(self, torch: Any) -> Any:
        return SimpleNamespace(torch=torch, watch_caching=self.step("caching"))

    def begin(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Begin as a new process does."""
        self.done.clear()
        monkeypatch.setattr(layer, "_at_first_use", [self.step("a"), self.step("b"), self.step("c")])
        layer.after_fork_in_child()


@pytest.fixture
def first_use(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = FirstUse()
    monkeypatch.setattr(layer, "_torch_cuda", None)
    monkeypatch.setitem(sys.modules, "torch", made.torch)
    monkeypatch.setattr(layer, "TorchCuda", made.make_torch_cuda)
    monkeypatch.setattr(layer, "watch_captures", made.step("captures"))
    made.begin(monkeypatch)
    yield made
    layer.after_fork_in_child()


def test_captures_are_watched_first(first_use: FirstUse) -> None:
    found = layer.loaded()
    assert found is not None and found.torch is first_use.torch
    assert first_use.done == ["captures", "caching", "a", "b", "c"]
    assert layer.in_use() is layer.require() is layer.loaded() is found
    assert len(first_use.done) == 5


@pytest.mark.parametrize("exception", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("name", ["captures", "caching", "a", "b", "c"])
def test_the_next_use_continues(first_use: FirstUse, name: str, exception: type[BaseException]) -> None:
    def fail() -> None:
        del first_use.actions[name]
        raise exception

    first_use.actions[name] = fail
    with pytest.raises(exception):
        layer.loaded()
    assert layer.loaded() is not None
    assert first_use.done == ["captures", "caching", "a", "b", "c"]


def test_every_interruption(first_use: FirstUse, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in every_interruption(layer.loaded):
        assert layer.loaded() is not None
        assert list(dict.fromkeys(first_use.done)) == ["captures", "caching", "a", "b", "c"]
        first_use.begin(monkeypatch)


def test_a_step_may_use_torch(first_use: FirstUse) -> None:
    found: list[Any] = []
    first_use.actions["b"] = lambda: found.extend((layer.loaded(), layer.in_use()))
    assert found == [] and layer.loaded() is not None
    assert found == [layer.loaded()] * 2
    assert first_use.done == ["captures", "caching", "a", "b", "c"]


def test_another_thread_waits(first_use: FirstUse) -> None:
    inside, may_end = threading.Event(), threading.Event()

    def use_and_wait() -> None:
        assert layer.loaded() is not None
        inside.set()
        assert may_end.wait(TIMEOUT_S)

    first_use.actions["b"] = use_and_wait
    seen: list[tuple[Any, int]] = []
    first = threading.Thread(target=layer.loaded)
    second = threading.Thread(target=lambda: seen.append((layer.in_use(), len(first_use.done))))
    first.start()
    assert inside.wait(TIMEOUT_S)
    second.start()
    second.join(SHORT_S)
    waited = second.is_alive()
    may_end.set()
    first.join(TIMEOUT_S)
    second.join(TIMEOUT_S)
    assert waited and seen == [(layer.loaded(), 5)]


def test_a_step_that_adds_one(first_use: FirstUse) -> None:
    first_use.actions["c"] = lambda: layer.at_first_use(first_use.step("d"))
    layer.loaded()
    assert first_use.done[-2:] == ["c", "d"]
