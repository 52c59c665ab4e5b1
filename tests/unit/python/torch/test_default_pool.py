"""Guards the order in which a cache is emptied while other pools take the place of PyTorch's default pool, signals meanwhile
and releases of PyTorch that do without. tests/gpu/test_paused_default_pool.py has what a program allocates meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fake_torch import DEFAULT, FakeTorch

from torch_memory_saver._torch.memory.store import PoolStore
from torch_memory_saver.options import DEFAULT_TAG
from torch_memory_saver.saver import TorchMemorySaver

MIB = 1 << 20

recent = pytest.mark.parametrize("release", [(2, 14), (2, 11)], ids=["torch-2.14", "torch-2.11"])


@pytest.fixture
def managing(saver: TorchMemorySaver, fake_torch: FakeTorch) -> TorchMemorySaver:
    """The saver of a process whose default pool is managed."""
    fake_torch.managed[DEFAULT] = True
    saver._use()._graph_pools.default_pool_managed = True
    saver._use()._manages_everything = True
    make_pool: Callable[[int, bool], Any] = fake_torch.make_pool

    def make_pool_that_is_managed(device: int, managed: bool) -> Any:
        pool = make_pool(device, managed)
        fake_torch.managed[pool.id] = True  # as cudaMalloc is
        return pool

    fake_torch.make_pool = make_pool_that_is_managed
    return saver


@pytest.mark.parametrize("release", [(2, 8)], ids=["torch-2.8"])
def test_an_older_torch_reports_the_bytes(managing: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    fake_torch.split(fake_torch.allocate(4 * MIB), (MIB, "active_allocated"), (3 * MIB, "inactive"))
    assert managing.pause().reusable_bytes == 3 * MIB
    assert fake_torch.routings == []
    managing.resume()


@recent
def test_a_pause_leaves_calls_in_regions_of_other_tags_alone(
    saver: TorchMemorySaver, fake_torch: FakeTorch, load: Any, store: PoolStore, no_warning: None
) -> None:
    """The memory of the default pool may also be managed in a process whose regions are not disable() alone."""
    fake_torch.managed[DEFAULT] = True
    saver._use()._graph_pools.default_pool_managed = True
    fake_torch.allocate(2 * MIB)
    running, go_on = threading.Event(), threading.Event()

    def call() -> tuple[Any, Any]:
        before = load()
        running.set()
        assert go_on.wait(60)
        return before, load()

    with ThreadPoolExecutor(1) as pool:
        with saver.region("other"):
            future = pool.submit(call)
            assert running.wait(60)
        try:
            saver.pause(DEFAULT_TAG)
        finally:
            go_on.set()
        assert future.result(60) == ("other", "other")
    saver.resume()


@recent
def test_a_cache_is_emptied_while_caching_is_off(managing: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    fake_torch.allocate(2 * MIB)
    managing.pause()
    fake_torch.calls.clear()
    managing.empty_cache()
    assert fake_torch.calls == ["caching off", "empty_cache", "caching on"]
    managing.resume()


@recent
@pytest.mark.parametrize("step", ["begin_routing_of_all_threads", "set_caching", "empty_cache", "end_routing"])
def test_a_signal_while_a_cache_is_emptied(
    managing: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_torch.allocate(2 * MIB)
    managing.pause()
    call = getattr(fake_torch, step)

    def call_and_raise(*arguments: Any) -> None:
        call(*arguments)
        if arguments != (False,):
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(fake_torch, step, call_and_raise)
        with pytest.raises(KeyboardInterrupt):
            managing.empty_cache()
    managing.pause("another")
    assert fake_torch.caching
    assert [routing[1:] for routing in fake_torch.routings] == [(store.substitutes.target(0), None)]
    managing.resume()
    assert (fake_torch.routings, fake_torch.caching) == ([], True)
