"""Guards regions against failures: an entry, an exit or a suspension that fails leaves nothing in force. What
PyTorch's pools do is in tests/torch/test_pools.py."""

from __future__ import annotations

from typing import Any

import pytest
from fake_torch import FakeTorch

from torch_memory_saver import _core, errors
from torch_memory_saver._torch.memory.store import PoolStore
from torch_memory_saver.saver import TorchMemorySaver

MIB = 1 << 20


def test_an_exception_of_the_body_is_kept_if_leaving_fails(
    saver: TorchMemorySaver,
    fake_torch: FakeTorch,
    store: PoolStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse() -> None:
        raise errors.DriverError("injected failure")

    fake_torch.devices = 2
    with monkeypatch.context() as inside, pytest.raises(ZeroDivisionError), saver.region("a"):
        inside.setattr(_core, "refresh_peers", refuse)
        raise ZeroDivisionError
    assert "injected failure" in caplog.text
    with monkeypatch.context() as inside, pytest.raises(errors.DriverError, match="injected failure"), saver.region("a"):
        inside.setattr(_core, "refresh_peers", refuse)
    assert fake_torch.routings == []
    assert store.regions.stack() == []
    assert _core.region_current().depth == 0


def test_a_failed_entry_restores_everything(saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore) -> None:
    with saver.region("outer"):
        routed = list(fake_torch.routings)
        fake_torch.fail_begin_of_new_pools_on = 0
        with pytest.raises(RuntimeError, match="injected failure"):
            saver.region("a").__enter__()
        assert fake_torch.routings == routed
        assert _core.region_current().tag == "outer"
        assert len(store.regions.stack()) == 1
    assert saver.pause("a").allocations == 0, "no thread is inside it"


def test_free_memory_of_unused_devices_is_not_queried(
    saver: TorchMemorySaver, fake_torch: FakeTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_torch.devices = 2
    queried: list[int] = []
    device_memory = _core.device_memory
    monkeypatch.setattr(_core, "device_memory", lambda device: (queried.append(device), device_memory(device))[1])
    with saver.region("a"):
        pass
    assert queried == [0], "asking makes a context"


def test_a_failed_entry_on_the_second_device_restores_everything(
    saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore
) -> None:
    fake_torch.devices = 2
    with saver.region("outer"):
        routed = list(fake_torch.routings)
        region = saver.region("a")
        fake_torch.fail_begin_of_new_pools_on = 1
        with pytest.raises(RuntimeError, match="injected failure"):
            region.__enter__()
        fake_torch.fail_begin_of_new_pools_on = -1
        assert fake_torch.routings == routed
        assert _core.region_current().tag == "outer"
    assert store.regions.stack() == []
    with saver.region("a"):
        assert [routing[0] for routing in fake_torch.routings] == [0, 1]


def test_backward_runs_as_before_after_a_failed_entry(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    fake_torch.fail_begin_of_new_pools_on = 0
    with pytest.raises(RuntimeError, match="injected failure"):
        saver.region("a").__enter__()
    assert fake_torch.autograd_threads()


def test_disable_outside_is_an_error(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    with pytest.raises(errors.InvalidStateError, match=r"disable\(\)"):
        saver.disable()


def test_an_interrupted_suspension_routes_again(
    saver: TorchMemorySaver, fake_torch: FakeTorch, store: PoolStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_routing = store.regions.router.end

    def interrupt(*arguments: Any) -> None:
        end_routing(*arguments)
        raise KeyboardInterrupt

    with saver.region("a"):
        routed = list(fake_torch.routings)
        with monkeypatch.context() as patch:
            patch.setattr(store.regions.router, "end", interrupt)
            with pytest.raises(KeyboardInterrupt):
                store.empty_torch_cache(fake_torch)  # type: ignore[arg-type]
        assert fake_torch.routings == routed
