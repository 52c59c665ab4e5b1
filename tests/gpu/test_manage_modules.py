"""Guards what a pause says of modules that manage() has moved and whose parameters have left managed memory since then."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpu_programs import Program, run_programs
from gpu_support import MIB, saver, torch

from torch_memory_saver._engine.tensors import managed_modules

pytest.importorskip("torch", reason="PyTorch is not installed")

TAG = "weights"
WIDTH = 64
BYTES = WIDTH * WIDTH * 4


class Net(torch.nn.Module):  # type: ignore[misc, name-defined, unused-ignore]
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.second = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("table", torch.ones(WIDTH, WIDTH))


class Quantised(torch.nn.Module):  # type: ignore[misc, name-defined, unused-ignore]
    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.register_buffer("packed", weight.detach().to(torch.int8))


def managed_net() -> Any:
    net = Net().cuda()
    saver.manage(net, tag=TAG, backup="host")
    return net


def cycle(tag: str = TAG) -> int:
    left = saver.pause(tag).no_longer_managed_bytes
    saver.resume(tag)
    return int(left)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if "no longer in managed memory" in record.getMessage()]
    caplog.clear()
    return found


def assign(net: Any) -> None:
    net.first.weight.data = net.first.weight.data.clone()


def replace(net: Any) -> None:
    net.second.weight = torch.nn.Parameter(torch.ones(2 * WIDTH, WIDTH, device="cuda"))


def quantise(net: Any) -> None:
    net.first = Quantised(net.first.weight)


def take_from_a_bucket(net: Any) -> None:
    bucket = torch.ones(4, WIDTH, WIDTH, device="cuda")
    net.first.weight.data, net.second.weight.data = bucket[0], bucket[3]


def merge(net: Any) -> None:
    """As an adapter that is merged into a copy of the weights, which replaces them."""
    merged = net.first.weight.data.clone()
    merged += 1
    net.first.weight.data = merged


#: A change, the bytes outside after it, and the first name of the warning.
CHANGES: dict[str, tuple[Callable[[Any], Any], int, str]] = {
    "dtype": (lambda net: net.to(torch.bfloat16), 3 * BYTES // 2, "Net.first.weight, Net.second.weight, Net.table"),
    "cpu and back": (lambda net: net.to("cpu").to("cuda"), 3 * BYTES, "Net.first.weight, Net.second.weight, Net.table"),
    "data": (assign, BYTES, "Net.first.weight"),
    "parameter": (replace, 2 * BYTES, "Net.second.weight"),
    "quantised": (quantise, BYTES // 4, "Net.first.packed"),
    "bucket": (take_from_a_bucket, 4 * BYTES, "Net.first.weight, Net.second.weight"),
    "merged": (merge, BYTES, "Net.first.weight"),
    "buffer": (lambda net: setattr(net, "table", net.table + 1), BYTES, "Net.table"),
}


@pytest.mark.parametrize(("change", "size", "names"), CHANGES.values(), ids=CHANGES)
def test_one_warning_after_parameters_have_left(
    caplog: pytest.LogCaptureFixture, change: Callable[[Any], Any], size: int, names: str
) -> None:
    net = managed_net()
    assert cycle() == 0
    change(net)
    addresses = [tensor.data_ptr() for tensor in (*net.parameters(), *net.buffers())]
    assert [cycle(), cycle(), cycle("other")] == [size, size, 0]
    assert [tensor.data_ptr() for tensor in (*net.parameters(), *net.buffers())] == addresses, "a pause moves nothing"
    (message,) = warnings(caplog)
    assert f"do not release them: {names}. " in message
    assert f"pause: {size // 1024} KiB" in message
    assert "Call manage(module, tag='weights', backup='host') again" in message

    assert saver.manage(net, tag=TAG, backup="host").moved_bytes == size
    assert cycle() == 0
    assert warnings(caplog) == []
    net.to(torch.float64)
    assert cycle() > 0
    assert len(warnings(caplog)) == 1, "a later call of manage() has a warning of its own"


def test_later_changes_are_counted_without_another_warning(caplog: pytest.LogCaptureFixture) -> None:
    net = managed_net()
    assign(net)
    assert (cycle(), len(warnings(caplog))) == (BYTES, 1)
    replace(net)
    assert (cycle(), warnings(caplog)) == (3 * BYTES, [])


def test_many_names_are_shortened(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4))).cuda()
    saver.manage(model, tag=TAG)
    model.half()
    cycle()
    (message,) = warnings(caplog)
    assert "Sequential.0.weight, Sequential.0.bias, Sequential.1.weight and 5 more" in message
    assert "manage(module, tag='weights') again" in message


def test_a_module_that_is_away_and_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    net = managed_net()
    net.to("cpu")
    assert cycle() == 0
    assert warnings(caplog) == [], "there is nothing on the device that a pause could release"
    net.to("cuda")
    assert cycle() == 3 * BYTES
    assert len(warnings(caplog)) == 1


def test_what_a_region_has_replaced_is_managed(caplog: pytest.LogCaptureFixture) -> None:
    net = managed_net()
    with saver.region(TAG, backup="host"):
        net.to(torch.bfloat16)
    assert (cycle(), warnings(caplog)) == (0, [])


def test_what_was_added_has_not_left(caplog: pytest.LogCaptureFixture) -> None:
    net = managed_net()
    net.adapter = torch.nn.Linear(WIDTH, WIDTH, device="cuda")
    assert (cycle(), warnings(caplog)) == (0, [])


def test_a_tensor_without_a_storage_ends_no_pause(caplog: pytest.LogCaptureFixture) -> None:
    net = managed_net()
    net.lazy = torch.nn.LazyLinear(3, device="cuda")
    assert (cycle(), warnings(caplog)) == (0, [])
    assign(net)
    assert (cycle(), len(warnings(caplog))) == (BYTES, 1)


def test_no_tensor_is_looked_up_if_no_address_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    net = managed_net()

    def look(*_: Any) -> Any:
        raise AssertionError("no address has changed")

    assign(net)
    net.adapter = torch.nn.Linear(WIDTH, WIDTH, device="cuda")
    cycle()
    monkeypatch.setattr(managed_modules._ManagedModule, "_find_left", look)
    assert cycle() == BYTES + WIDTH * WIDTH * 4 + WIDTH * 4


def test_neither_module_nor_memory_is_kept_alive() -> None:
    net = managed_net()
    reference = weakref.ref(net.second)
    net.second = None
    gc.collect()
    assert reference() is None
    saver.empty_cache()
    assert saver.stats(TAG).total.resident_bytes <= 2 * MIB
    assert cycle() == 0


def test_a_module_that_is_gone_is_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    net = Net().cuda()
    saver.manage(net, tag=TAG)
    weight = net.first.weight
    del net
    gc.collect()
    weight.data = weight.data.clone()
    assert (cycle(), warnings(caplog)) == (0, [])


# -- parameters that alternate by design -------------------------------------------------------------------------------


def test_storages_that_are_resized_to_nothing_and_back(caplog: pytest.LogCaptureFixture) -> None:
    net = managed_net()
    for size in (0, BYTES, 0):
        net.first.weight.untyped_storage().resize_(size)
        assert cycle() == 0
    assert warnings(caplog) == []


def test_views_of_memory_that_is_gathered_while_the_managed_shard_lives(caplog: pytest.LogCaptureFixture) -> None:
    net = managed_net()
    shards = [parameter.data for parameter in net.parameters()]
    for _ in range(2):
        flat = torch.ones(2, WIDTH, WIDTH, device="cuda")
        for part, parameter in zip(flat, net.parameters(), strict=True):
            parameter.data = part
        assert cycle() == 0
        for shard, parameter in zip(shards, net.parameters(), strict=True):
            parameter.data = shard
        assert cycle() == 0
    assert warnings(caplog) == []


def test_parameters_that_are_empty_while_nobody_uses_them(caplog: pytest.LogCaptureFixture) -> None:
    net = managed_net()
    for _ in range(2):
        for parameter in net.parameters():
            parameter.data = torch.empty(0, device="cuda")
        assert cycle() == 0
        for parameter in net.parameters():
            parameter.data = torch.ones(WIDTH, WIDTH, device="cuda")
        assert cycle() == 0
    assert warnings(caplog) == []


def test_memory_that_was_kept_and_is_dropped_later(caplog: pytest.LogCaptureFixture) -> None:
    net = managed_net()
    kept = net.first.weight.data
    assign(net)
    assert (cycle(), warnings(caplog)) == (0, [])
    del kept
    assert (cycle(), len(warnings(caplog))) == (BYTES, 1), "although no address has changed since the last look"


@pytest.mark.outer
@pytest.mark.multigpu
@pytest.mark.parametrize(
    "preload", [pytest.param(False, id="torch"), pytest.param(True, id="preload", marks=pytest.mark.slow)]
)
def test_fsdp_on_two_gpus(tmp_path: Path, preload: bool) -> None:
    (done,) = run_programs([Program("sharded_module.py", (str(tmp_path / "meeting"),), preload=preload)])
    done.check()
    assert done.output.splitlines() == ["ok"]
