"""Guards routing with PyTorch 2.6 and 2.7, where the thread's active pool determines which allocator frees a pool's memory.

Later releases are in the tests of pools, over the fake torch.
"""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from torch_memory_saver import _core
from torch_memory_saver._torch.routing import ProcessRouting, ThreadRouting, leak_reference, make_routing
from torch_memory_saver.errors import TorchUnavailableError

POOL = (0, 7)


class OldTorch:
    """torch._C of 2.6: records its calls, and the active pool of each."""

    def __init__(self) -> None:
        self.active: list[Any] = []
        self.calls: list[tuple[str, Any]] = []
        self.segments: list[dict[str, Any]] = []
        self.busy = False
        old = self

        class Context:
            def __init__(self, pool: Any) -> None:
                old.active.append(pool.id)

            def __del__(self) -> None:
                old.active.pop()

        self._MemPoolContext = Context

    def _cuda_beginAllocateToPool(self, device: int, pool: Any) -> None:
        self.calls.append(("begin", pool))

    def _cuda_endAllocateCurrentStreamToPool(self, device: int, pool: Any) -> None:
        self.calls.append(("end", pool))

    def _cuda_releasePool(self, device: int, pool: Any) -> None:
        self.calls.append(("release", pool))

    def _cuda_emptyCache(self) -> None:
        if self.busy:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")
        self.calls.append(("empty", tuple(self.active)))


@pytest.fixture
def old() -> OldTorch:
    return OldTorch()


@pytest.fixture
def routing(old: OldTorch, monkeypatch: pytest.MonkeyPatch) -> ProcessRouting:
    monkeypatch.setattr(_core, "find", lambda address: None if address < 0 else object())
    routing = ProcessRouting(old, lambda pool: old.segments)
    routing.made(SimpleNamespace(id=POOL), managed=True)
    return routing


def segment(state: str, address: int = 1) -> dict[str, Any]:
    return {"address": address, "blocks": [{"state": state}]}


def pool() -> Any:
    return SimpleNamespace(id=POOL, device=0, memory_pool=object())


def test_a_routed_pool_is_the_active_one(routing: ProcessRouting, old: OldTorch) -> None:
    routing.begin(0, POOL)
    assert old.active == [POOL]
    routing.end(0, POOL)
    assert old.active == []
    assert old.calls == [("begin", POOL), ("end", POOL)]
    with routing.capturing(SimpleNamespace(id=POOL)):
        assert old.active == [POOL]
    assert old.active == []


def test_torch_learns_of_a_pool_only_when_it_can_all_be_freed_at_once(routing: ProcessRouting, old: OldTorch) -> None:
    old.segments = [segment("inactive"), segment("active_allocated")]
    assert not routing.gives_back(old.segments)
    routing.give_up(pool())
    routing.empty_cache()
    assert old.calls == [("empty", ())]
    old.segments = [segment("inactive"), segment("inactive")]
    assert routing.gives_back(old.segments)
    routing.empty_cache()
    assert old.calls[1:] == [("empty", ()), ("release", POOL), ("empty", (POOL,))]
    routing.empty_cache()
    assert old.calls[4:] == [("empty", ())], "it is gone"


def test_memory_of_another_thread_stays(routing: ProcessRouting, old: OldTorch, caplog: pytest.LogCaptureFixture) -> None:
    old.segments = [segment("inactive"), segment("inactive", address=-1)]
    assert not routing.gives_back(old.segments)
    routing.give_up(pool())
    routing.empty_cache()
    routing.empty_cache()
    assert old.calls == [("empty", ()), ("empty", ())]
    assert caplog.text.count("another thread allocated memory during a region") == 1


def test_nothing_is_emptied_while_a_thread_routes(routing: ProcessRouting, old: OldTorch) -> None:
    old.segments = [segment("inactive")]
    routing.give_up(pool())
    old.busy = True
    routing.empty_cache()
    assert old.calls == []
    old.busy = False
    routing.empty_cache()
    assert old.calls == [("empty", ()), ("release", POOL), ("empty", (POOL,))]


class MemPool:
    """A MemPool, of which only the end matters."""


@pytest.mark.parametrize("quietly", [True, False])
def test_the_end_of_a_pool_that_is_given_up(quietly: bool) -> None:
    """Up to 2.9 the end of an object whose pool has another use ends the process: there the object stays."""
    calls: list[str] = []
    extension = SimpleNamespace(
        _cuda_beginAllocateCurrentThreadToPool=lambda device, pool: calls.append("begin"),
        _cuda_endAllocateToPool=lambda device, pool: calls.append("end"),
        _cuda_releasePool=lambda device, pool: calls.append("release"),
        _cuda_emptyCache=None,
    )
    given_up = SimpleNamespace(id=POOL, device=0, memory_pool=MemPool(), retirement=None)
    leak_reference(given_up.memory_pool)
    alive = weakref.ref(given_up.memory_pool)
    ThreadRouting(extension, objects_end_quietly=quietly).give_up(given_up)
    assert (alive() is None) == quietly
    assert calls == (["begin", "end", "release"] if quietly else ["release"])


def test_which_routing_a_torch_has(old: OldTorch) -> None:
    cuda = SimpleNamespace(MemPool=object)
    assert isinstance(make_routing(SimpleNamespace(_C=old, cuda=cuda), (2, 6), lambda pool: []), ProcessRouting)
    names = ("beginAllocateCurrentThreadToPool", "endAllocateToPool", "releasePool", "emptyCache")
    new = SimpleNamespace(**{f"_cuda_{name}": print for name in names})
    assert isinstance(make_routing(SimpleNamespace(_C=new, cuda=cuda), (2, 8), lambda pool: []), ThreadRouting)
    none = SimpleNamespace(_C=new, cuda=SimpleNamespace(), __version__="2.4.0")
    with pytest.raises(TorchUnavailableError, match=r"2\.4\.0.* has no memory pools"):
        make_routing(none, (2, 4), lambda pool: [])
