"""Guards errors and the tensors of get_cpu_backup with PyTorch installed; a build for the CPU is enough."""

from __future__ import annotations

import ctypes
import gc
import weakref
from typing import Any

import pytest

from torch_memory_saver import _core, errors
from torch_memory_saver._engine.tensors import lookup
from torch_memory_saver._torch.binding import layer

torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")

DTYPES = ["uint8", "bool", "int16", "float16", "bfloat16", "float32", "int64", "float64", "complex64", "float8_e4m3fn"]


class FakeBuffer:
    """A HostBuffer over memory of this test's."""

    def __init__(self, data: bytes) -> None:
        self.memory = ctypes.create_string_buffer(data, len(data))
        self.address = ctypes.addressof(self.memory)


@pytest.fixture
def backups(monkeypatch: pytest.MonkeyPatch) -> dict[int, FakeBuffer | None]:
    """Tensors of the CPU count as tensors of a GPU; their host copies are the buffers that the test puts in here."""
    found: dict[int, FakeBuffer | None] = {}

    def host_backup(address: int, size: int) -> FakeBuffer | None:
        buffer = found[address]
        assert buffer is None or size == len(buffer.memory)
        return buffer

    for name in ("host_backup", "read_only_backup"):
        monkeypatch.setattr(_core, name, host_backup)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    return found


def get_cpu_backup(x: Any, zero_copy: bool) -> Any:
    return lookup.get_cpu_backup(x, zero_copy, lambda row: True)


def test_importing_both_in_either_order() -> None:
    assert layer.loaded() is None or torch.cuda.is_available()


def test_out_of_memory_is_torchs() -> None:
    error = errors.make_error("OUT_OF_DEVICE_MEMORY", "x", "resume", "cuMemCreate", "", 2, 0, 0, 1, 0, "a")
    assert isinstance(error, torch.OutOfMemoryError)
    assert isinstance(error, errors.OutOfMemoryError)
    with pytest.raises(torch.OutOfMemoryError):
        raise error


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("zero_copy", [False, True])
def test_dtype_shape_and_values(backups: dict[int, FakeBuffer | None], name: str, zero_copy: bool) -> None:
    dtype = getattr(torch, name)
    values = (torch.arange(24) % 2).to(dtype).reshape(2, 3, 4)
    backups[values.data_ptr()] = FakeBuffer(bytes(values.view(torch.uint8).flatten().tolist()))
    backup = get_cpu_backup(values, zero_copy)
    assert backup.dtype == dtype
    assert backup.shape == values.shape
    assert backup.device.type == "cpu"
    assert torch.equal(backup.view(torch.uint8), values.view(torch.uint8))


def test_a_copy_is_a_copy_and_zero_copy_is_the_memory(backups: dict[int, FakeBuffer | None]) -> None:
    x = torch.zeros(4, dtype=torch.uint8)
    buffer = FakeBuffer(b"\1\2\3\4")
    backups[x.data_ptr()] = buffer
    view, copy = get_cpu_backup(x, True), get_cpu_backup(x, False)
    assert view.data_ptr() == buffer.address
    buffer.memory[0] = b"\x09"
    assert view.tolist() == [9, 2, 3, 4]
    assert copy.tolist() == [1, 2, 3, 4]


def test_zero_copy_keeps_the_memory_for_as_long_as_a_tensor_uses_it(backups: dict[int, FakeBuffer | None]) -> None:
    x = torch.zeros(4, dtype=torch.int16)
    buffer = FakeBuffer(bytes(8))
    backups[x.data_ptr()] = buffer
    alive = weakref.ref(buffer)
    part = get_cpu_backup(x, True)[1:]
    backups.clear()
    del buffer
    gc.collect()
    assert alive() is not None
    assert part.tolist() == [0, 0, 0]
    del part
    gc.collect()
    assert alive() is None


def test_scalars_and_empty_tensors(backups: dict[int, FakeBuffer | None]) -> None:
    x = torch.tensor(0.0)
    backups[x.data_ptr()] = FakeBuffer(bytes(4))
    assert get_cpu_backup(x, True).shape == ()
    empty = get_cpu_backup(torch.empty(0, 3, dtype=torch.int64), False)
    assert (empty.shape, empty.dtype) == ((0, 3), torch.int64)


def test_part_of_an_allocation(backups: dict[int, FakeBuffer | None]) -> None:
    x = torch.zeros(8, dtype=torch.uint8)[4:]
    backups[x.data_ptr()] = FakeBuffer(b"abcd")
    assert get_cpu_backup(x, False).tolist() == list(b"abcd")


def test_none_without_a_backup(backups: dict[int, FakeBuffer | None]) -> None:
    x = torch.zeros(4)
    backups[x.data_ptr()] = None
    assert get_cpu_backup(x, False) is None


def test_bad_tensors(backups: dict[int, FakeBuffer | None]) -> None:
    for bad in (torch.zeros(4, 4).t(), torch.zeros(4)[::2], torch.zeros(2, 2).to_sparse(), [1, 2], None):
        with pytest.raises(errors.InvalidArgumentError):
            get_cpu_backup(bad, False)
    with pytest.raises(errors.InvalidArgumentError, match="conjugate"):
        get_cpu_backup(torch.zeros(2, dtype=torch.complex64).conj(), False)


def test_a_cpu_tensor_is_not_managed() -> None:
    with pytest.raises(errors.NotManagedError, match="cpu"):
        get_cpu_backup(torch.zeros(4), False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_torch_mode_without_cuda_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "_torch_cuda", None)
    with pytest.raises(errors.TorchUnavailableError, match="no usable CUDA device"):
        layer.require()
    assert layer.loaded() is None
