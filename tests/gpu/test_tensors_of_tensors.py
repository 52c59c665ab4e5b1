"""Guards tensors that contain tensors: each function works on the inner ones, and a host copy is of the same class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gpu_support import MIB, errors, saver, segment_of, torch


def quantised_class() -> Any:
    """A class of tensors of data and scales, as libraries for quantisation make them."""

    class Quantised(torch.Tensor):
        @staticmethod
        def __new__(cls: Any, data: Any, scales: Any, offsets: Any) -> Any:
            return torch.Tensor._make_wrapper_subclass(
                cls, data.shape, strides=data.stride(), dtype=torch.float32, device=data.device
            )

        def __init__(self, data: Any, scales: Any, offsets: Any) -> None:
            self.data_of, self.scales, self.offsets = data, scales, offsets

        def __tensor_flatten__(self) -> tuple[list[str], str]:
            return ["data_of", "scales", "offsets"], "context"

        @staticmethod
        def __tensor_unflatten__(inner: Any, context: str, size: Any, stride: Any) -> Any:
            assert context == "context"
            copy = Quantised(inner["data_of"], inner["scales"], inner["offsets"])
            assert (copy.size(), copy.stride()) == (size, stride)
            return copy

        @classmethod
        def __torch_dispatch__(cls, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
            raise NotImplementedError(f"{function} is not for tensors that are paused")

    return Quantised


@pytest.fixture(params=["host", "mmap", "disk"])
def backup(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    saver.set_disk_backup_dir(str(tmp_path))
    return str(request.param)


def quantised_with(backup: str) -> Any:
    numbers = (torch.arange(4 * MIB) % 251).to(torch.uint8).view(2048, 2048)
    with saver.region(tag="weights", backup=backup):
        data = numbers.cuda()
    with saver.region(tag="scales", backup=backup):
        scales = torch.rand(2048, generator=torch.Generator().manual_seed(3)).cuda()
    return quantised_class()(data, scales, torch.arange(8))


def expected_parts(x: Any) -> list[torch.Tensor]:
    return [x.data_of.cpu(), x.scales.cpu(), x.offsets.clone()]


def test_a_host_copy_has_the_class_and_the_parts(backup: str) -> None:
    quantised = quantised_with(backup)
    wanted = expected_parts(quantised)
    with pytest.raises(NotImplementedError):
        quantised + 1
    saver.pause()
    for zero_copy in (False, True):
        copy = saver.get_cpu_backup(quantised, zero_copy=zero_copy)
        assert type(copy) is type(quantised)
        assert copy.device.type == "cpu"
        for part, expected in zip((copy.data_of, copy.scales, copy.offsets), wanted, strict=True):
            assert torch.equal(part, expected)
        assert copy.offsets.data_ptr() != quantised.offsets.data_ptr()
        del copy, part
    saver.resume()
    assert saver.get_cpu_backup(quantised) is None


def test_there_is_no_copy_if_a_part_has_none(backup: str) -> None:
    quantised = quantised_with(backup)
    saver.pause("weights")
    assert saver.get_cpu_backup(quantised) is None
    assert [saver.is_paused(quantised), saver.tag_of(quantised)] == [True, "weights"]
    saver.resume()
    saver.pause("scales", backup="discard")
    assert saver.is_paused(quantised)
    saver.pause("weights")
    assert saver.get_cpu_backup(quantised) is None
    saver.resume()


def test_a_part_that_is_not_managed_is_an_error(backup: str) -> None:
    quantised = quantised_with(backup)
    ordinary = quantised_class()(quantised.data_of, torch.ones(2048, device="cuda"), torch.arange(8))
    saver.pause()
    with pytest.raises(errors.NotManagedError, match="was not allocated in a region"):
        saver.get_cpu_backup(ordinary)
    saver.resume()


def test_preserve_keeps_each_part_until_the_handle_is_removed() -> None:
    with saver.region(tag="dropped"):
        data, scales = torch.ones(2 * MIB, device="cuda"), torch.full((MIB,), 2.0, device="cuda")
    x = quantised_class()(data, scales, torch.arange(8))
    handle = saver.preserve([x], tag="dropped")
    assert sum(block.bytes for block in handle.blocks) == data.nbytes + scales.nbytes
    saver.pause("dropped")
    saver.resume("dropped")
    assert (float(data.sum()), float(scales.sum())) == (2.0 * MIB, 2.0 * MIB)
    handle.remove()
    assert saver.preserved("dropped") == ()


def test_check_fresh_ignores_each_part() -> None:
    before, saver.guard = saver.guard, True
    try:
        with saver.region(tag="dropped"):
            data, scales = torch.ones(2 * MIB, device="cuda"), torch.full((MIB,), 2.0, device="cuda")
        x = quantised_class()(data, scales, torch.arange(8))
        saver.pause("dropped")
        saver.resume("dropped")
        assert saver.check_fresh("dropped").unwritten_bytes == data.nbytes + scales.nbytes
        report = saver.check_fresh("dropped", ignore=[x])
        assert (report.unwritten_bytes, report.ignored_bytes) == (0, data.nbytes + scales.nbytes)
        data.zero_()
        scales.zero_()
    finally:
        saver.guard = before


def test_manage_moves_each_part() -> None:
    data, scales = torch.ones(2 * MIB, device="cuda"), torch.full((MIB,), 2.0, device="cuda")
    x = quantised_class()(data, scales, torch.arange(8))
    saver.manage([x], tag="moved", backup="host")
    assert [segment_of(part).tag for part in (data, scales)] == ["moved", "moved"]
    saver.pause("moved")
    copy = saver.get_cpu_backup(x)
    assert float(copy.data_of.sum()) == float(copy.scales.sum()) == 2.0 * MIB
    saver.resume("moved")


@pytest.mark.parametrize("layout", ["strided", "jagged"])
def test_a_nested_tensor_is_refused_by_name(layout: str) -> None:
    with saver.region(tag="nested", backup="host"):
        parts = [torch.ones(MIB, device="cuda"), torch.ones(2 * MIB, device="cuda")]
        x = torch.nested.nested_tensor(parts, layout=getattr(torch, layout))
    saver.pause("nested")
    with pytest.raises(errors.InvalidArgumentError, match="nested tensor"):
        saver.get_cpu_backup(x)
    if layout == "jagged":
        values = saver.get_cpu_backup(x.values())
        assert values is not None and float(values.sum()) == 3.0 * MIB
    saver.resume("nested")


def test_a_class_that_does_not_name_its_parts_is_refused_by_name() -> None:
    class Opaque(torch.Tensor):
        @staticmethod
        def __new__(cls: Any, data: Any) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype, device=data.device)

        @classmethod
        def __torch_dispatch__(cls, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
            raise NotImplementedError

    with saver.region(tag="opaque", backup="host"):
        data = torch.ones(MIB, device="cuda")
    with pytest.raises(errors.InvalidArgumentError, match="Opaque does neither"):
        saver.get_cpu_backup(Opaque(data))


def test_a_part_at_the_place_of_a_deleted_one_has_no_copy() -> None:
    def retained(tag: str, value: int) -> torch.Tensor:
        with saver.region(tag=tag, backup="host", host_memory="retain"):
            return torch.full((32 * MIB,), value, dtype=torch.uint8, device="cuda")

    data, scales, offsets = retained("weights", 1), retained("scales", 2), torch.arange(8)
    saver.pause()
    saver.resume()
    copy = saver.get_cpu_backup(quantised_class()(data, scales, offsets))
    assert [int(copy.data_of[0]), int(copy.scales[0])] == [1, 2]
    place = data.data_ptr()
    del data
    data = retained("weights", 9)
    assert data.data_ptr() == place
    assert saver.get_cpu_backup(quantised_class()(data, scales, offsets)) is None
    assert saver.get_cpu_backup(scales) is not None


def test_a_plain_copy_leaves_the_next_pause_its_shortcut() -> None:
    with saver.region(tag="retained", backup="host", host_memory="retain"):
        x = torch.arange(MIB, dtype=torch.int32, device="cuda")
    saver.pause("retained")
    saver.resume("retained")
    for _ in range(2):
        assert saver.pause("retained").unchanged_bytes == x.nbytes
        copy = saver.get_cpu_backup(x)
        assert copy is not None and torch.equal(copy, torch.arange(MIB, dtype=torch.int32))
        copy.fill_(7)
        saver.resume("retained")
        assert saver.get_cpu_backup(x) is not None
    view = saver.get_cpu_backup(x, zero_copy=True)
    assert view is not None
    report = saver.pause("retained")
    assert (report.copied_bytes, report.unchanged_bytes) == (x.nbytes, 0)
    del view
    saver.resume("retained")
    assert torch.equal(x.cpu(), torch.arange(MIB, dtype=torch.int32))
