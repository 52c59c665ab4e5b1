"""Guards contents across a pause: on the host, pinned or mapped, and on disk; retention and get_cpu_backup."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_support import (
    GIB,
    LARGE,
    MIB,
    assert_close_to,
    checksum,
    core,
    empty,
    errors,
    fill_normal,
    fill_random,
    free_bytes,
    release_everything,
    resident_bytes,
    saver,
    segment_of,
    torch,
    write_and_check,
)

BACKUPS = {
    "pinned": {"enable_cpu_backup": True, "cpu_backup_backend": "pinned"},
    "mmap": {"enable_cpu_backup": True, "cpu_backup_backend": "mmap"},
    "cpu": {"enable_cpu_backup": True},
    "disk": {"enable_disk_backup": True},
}


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    saver.set_disk_backup_dir(str(tmp_path))
    return tmp_path


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("kind", BACKUPS)
def test_the_backup_of_paused_memory_is_given_up(kind: str, disk: Path) -> None:
    """Also where its files were deleted, which a resume does not get over."""
    with saver.region(tag="given up", **BACKUPS[kind]):
        tensor, small = empty(40 * MIB), empty(512)
    with saver.region(tag="kept", **BACKUPS[kind]):
        kept = empty(8 * MIB)
    for each in (tensor, small, kept):
        fill_random(each, 1)
    expected = checksum(kept)
    saver.pause("given up")
    for path in disk.rglob("*.backup"):
        path.unlink()
    saver.pause("kept")
    if kind == "disk":
        with pytest.raises(errors.BackupIOError, match='backup="discard"'):
            saver.resume("given up")
    report = saver.pause("given up", backup="discard")
    assert (report.allocations, report.bytes, report.copied_bytes) == (0, 0, 0)
    assert saver.stats("given up").total.backup_bytes == 0
    assert saver.get_cpu_backup(tensor) is None
    saver.resume("given up", zero=True)
    saver.resume("kept")
    assert not tensor.any() and not small.any()
    assert checksum(kept) == expected
    fill_random(tensor, 2)
    expected = checksum(tensor)
    saver.pause("given up")
    saver.resume("given up")
    assert checksum(tensor) == expected


@pytest.mark.parametrize("kind", BACKUPS)
def test_contents_are_the_same_after_pause_and_resume(kind: str, disk: Path) -> None:
    sizes = [LARGE // 2, 16 * MIB, 300 * MIB + 512, 40, 2 * MIB]
    with saver.region(tag="weights", **BACKUPS[kind]):
        tensors = [empty(size) for size in sizes]
    with saver.region(tag="weights"):
        scratch = empty(64 * MIB)
    for seed, tensor in enumerate(tensors):
        fill_random(tensor, seed)
    sums = [checksum(tensor) for tensor in tensors]
    addresses = [tensor.data_ptr() for tensor in tensors]
    for _ in range(2):
        before = free_bytes()
        report = saver.pause("weights")
        assert report.copied_bytes >= sum(sizes)
        assert report.bytes >= report.copied_bytes
        assert_close_to(free_bytes() - before, report.bytes, "free memory gained")
        counters = core.counters()
        held = counters["disk_backup_bytes"] if kind == "disk" else counters["host_backup_bytes"]
        assert held >= sum(sizes)
        # The interim user of the memory overwrites it.
        other = empty(LARGE)
        other.fill_(0xA5)
        del other
        torch.cuda.empty_cache()
        report = saver.resume("weights")
        assert report.copied_bytes >= sum(sizes)
        assert [tensor.data_ptr() for tensor in tensors] == addresses
        assert [checksum(tensor) for tensor in tensors] == sums
        assert core.counters()["host_backup_bytes"] == 0
    write_and_check(scratch, 1)
    if kind == "disk":
        assert files(disk)
    del tensors, scratch, tensor


@pytest.mark.real_gpu("takes 8 GiB of the host's memory here: the C tests show that offsets beyond 4 GiB are right")
@pytest.mark.parametrize("kind", ["pinned", "disk"])
def test_one_tensor_of_more_than_4_gib(kind: str, disk: Path) -> None:
    size = 4 * GIB + 6 * MIB
    with saver.region(tag="weights", **BACKUPS[kind]):
        tensor = empty(size)
    assert segment_of(tensor).bytes >= size
    for seed, part in enumerate(tensor.split(GIB)):
        fill_random(part, seed)
    sums = [checksum(part) for part in tensor.split(GIB)]
    assert len(set(sums)) == len(sums)
    assert saver.pause("weights").copied_bytes >= size
    saver.resume("weights")
    assert [checksum(part) for part in tensor.split(GIB)] == sums
    del tensor, part


def test_disk_files_have_the_size_of_their_contents_and_are_removed_with_the_allocation(disk: Path) -> None:
    with saver.region(tag="weights", enable_disk_backup=True):
        tensor = empty(256 * MIB)
    fill_random(tensor, 1)
    expected = checksum(tensor)
    sizes = []
    for _ in range(3):
        saver.pause("weights")
        sizes.append(sum(path.stat().st_size for path in files(disk)))
        saver.resume("weights")
        assert checksum(tensor) == expected
    assert sizes[0] >= 256 * MIB
    assert len(set(sizes)) == 1
    assert core.host_backup(tensor.data_ptr(), tensor.numel()) is None
    del tensor
    release_everything()
    assert files(disk) == []


def test_mmap_backup_is_resident_while_paused_and_released_after_resume() -> None:
    size = 512 * MIB
    with saver.region(tag="weights", enable_cpu_backup=True, cpu_backup_backend="mmap"):
        tensor = empty(size)
    fill_random(tensor, 2)
    saver.pause("weights")
    saver.resume("weights")  # whatever the first copy loads is there now
    before = resident_bytes()
    saver.pause("weights")
    paused = resident_bytes()
    saver.resume("weights")
    after = resident_bytes()
    assert_close_to(paused - before, size, "host memory gained by the pause", slack=32 * MIB)
    assert_close_to(paused - after, size, "host memory given back by the resume", slack=32 * MIB)


def test_retention_keeps_one_host_address_and_renews_the_bytes() -> None:
    with saver.region(tag="weights", enable_cpu_backup=True):
        tensor = empty(64 * MIB)
    saver.retain_cpu_backup = True
    addresses = set()
    for seed in range(4):
        fill_random(tensor, seed)
        expected = checksum(tensor)
        saver.pause("weights")
        host = saver.get_cpu_backup(tensor, zero_copy=True)
        assert host is not None
        addresses.add(host.data_ptr())
        saver.resume("weights")
        assert checksum(tensor) == expected
        retained = saver.get_cpu_backup(tensor)
        assert retained is not None
        assert torch.equal(retained, tensor.cpu())
        del host, retained
    assert len(addresses) == 1
    saver.retain_cpu_backup = False
    saver.pause("weights")
    saver.resume("weights")
    assert saver.get_cpu_backup(tensor) is None
    assert core.counters()["host_backup_bytes"] == 0


@pytest.mark.parametrize("backend", ["pinned", "mmap"])
def test_get_cpu_backup_of_views_by_copy_and_without(backend: str) -> None:
    with saver.region(tag="weights", enable_cpu_backup=True, cpu_backup_backend=backend):
        matrix = torch.empty((1024, 4096), dtype=torch.bfloat16, device="cuda")
        vector = torch.empty(1000, dtype=torch.float32, device="cuda")
    fill_normal(matrix, 1)
    vector.copy_(torch.arange(1000, dtype=torch.float32))
    expected = matrix.cpu()
    assert saver.get_cpu_backup(matrix) is None
    saver.pause("weights")
    copy = saver.get_cpu_backup(matrix)
    view = saver.get_cpu_backup(matrix, zero_copy=True)
    rows = saver.get_cpu_backup(matrix[10:20])
    numbers = saver.get_cpu_backup(vector)
    assert copy is not None and view is not None and rows is not None and numbers is not None
    for host in (copy, view):
        assert (host.device.type, host.dtype, host.shape) == ("cpu", matrix.dtype, matrix.shape)
        assert torch.equal(host, expected)
    assert copy.data_ptr() != view.data_ptr()
    assert torch.equal(rows, expected[10:20])
    assert torch.equal(numbers, torch.arange(1000, dtype=torch.float32))
    saver.resume("weights")
    assert torch.equal(copy, expected)
    assert torch.equal(view, expected), "a zero-copy view stays valid while it is held"
    assert torch.equal(matrix.cpu(), expected)
    del view, copy, rows, numbers, host


@pytest.mark.parametrize("zero_copy", [False, True])
def test_get_cpu_backup_from_disk(zero_copy: bool) -> None:
    with saver.region(tag="weights", enable_disk_backup=True):
        matrix = torch.empty((1024, 4099), dtype=torch.bfloat16, device="cuda")
        vector = torch.empty(1000, dtype=torch.float32, device="cuda")
    fill_normal(matrix, 1)
    vector.copy_(torch.arange(1000, dtype=torch.float32))
    expected = matrix.cpu()
    for _ in range(2):
        assert saver.get_cpu_backup(matrix, zero_copy=zero_copy) is None
        saver.pause("weights")
        whole = saver.get_cpu_backup(matrix, zero_copy=zero_copy)
        assert (whole.device.type, whole.dtype, whole.shape) == ("cpu", matrix.dtype, matrix.shape)
        assert torch.equal(whole, expected)
        assert torch.equal(saver.get_cpu_backup(matrix[10:20], zero_copy=zero_copy), expected[10:20])
        assert torch.equal(saver.get_cpu_backup(vector), torch.arange(1000, dtype=torch.float32))
        assert saver.is_paused(matrix)
        saver.resume("weights")
        assert torch.equal(matrix.cpu(), expected)


@pytest.mark.parametrize("backup", ["host", "disk"])
def test_a_paused_model_is_saved_from_its_backups(backup: str, tmp_path: Path) -> None:
    with saver.region(tag="weights"):
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64)).cuda()
    expected = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    saver.pause("weights", backup=backup)
    torch.save({name: saver.get_cpu_backup(tensor) for name, tensor in model.state_dict().items()}, tmp_path / "model.pt")
    saver.resume("weights")
    found = torch.load(tmp_path / "model.pt")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_paused_tensor_is_neither_printed_nor_saved(tmp_path: Path) -> None:
    """Both copy it to the host, which is an error of the call and changes nothing."""
    with saver.region(tag="weights", enable_cpu_backup=True):
        tensor = torch.ones(1 << 20, device="cuda")
    saver.pause("weights")
    with pytest.raises(RuntimeError, match="invalid argument"):
        torch.save(tensor, tmp_path / "tensor.pt")
    with pytest.raises(RuntimeError, match="invalid argument"):
        tensor.tolist()
    saver.resume("weights")
    assert bool((tensor == 1).all())


DTYPES = ["uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "bool"]
DTYPES += ["complex64", "complex128", "float8_e4m3fn", "float8_e5m2"]
SHAPES = [(), (1,), (3, 5, 7), (1, 1, 1, 1), (131, 257), (0,), (4, 0, 3), (2 * MIB + 1,)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_get_cpu_backup_of_every_dtype_and_odd_shapes(dtype: str) -> None:
    kind = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(1)
    expected = []
    for shape in SHAPES:
        width = torch.empty((), dtype=kind).element_size()
        high = 2 if kind == torch.bool else 256
        raw = torch.randint(high, (int(torch.Size(shape).numel()) * width,), dtype=torch.uint8, generator=generator)
        expected.append(raw.view(kind).view(shape))
    with saver.region(tag="weights", enable_cpu_backup=True):
        tensors = [torch.empty(shape, dtype=kind, device="cuda") for shape in SHAPES]
    for tensor, host in zip(tensors, expected, strict=True):
        tensor.copy_(host)
    saver.pause("weights")
    for zero_copy in (False, True):
        for tensor, host in zip(tensors, expected, strict=True):
            if tensor.numel() == 0:
                continue  # has no memory that could have been backed up
            kept = saver.get_cpu_backup(tensor, zero_copy=zero_copy)
            assert kept is not None
            assert (kept.dtype, kept.shape, kept.stride()) == (host.dtype, host.shape, host.stride())
            assert same_bytes(kept, host), tuple(host.shape)
            del kept
    saver.resume("weights")
    assert all(same_bytes(tensor.cpu(), host) for tensor, host in zip(tensors, expected, strict=True))
    del tensors, tensor


def same_bytes(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Compares memory, not numbers: NaN is equal to NaN."""
    return torch.equal(first.reshape(-1).view(torch.uint8), second.reshape(-1).view(torch.uint8))


def test_get_cpu_backup_without_a_backup() -> None:
    unmanaged = empty(MIB)
    with saver.region(tag="kv_cache"):
        discarded = empty(64 * MIB)
    with saver.region(tag="weights", enable_cpu_backup=True):
        matrix = torch.zeros((2048, 4096), dtype=torch.float32, device="cuda")
    saver.pause()
    assert saver.get_cpu_backup(discarded) is None
    with pytest.raises(errors.TorchMemorySaverError):
        saver.get_cpu_backup(unmanaged)
    with pytest.raises(errors.TorchMemorySaverError):
        saver.get_cpu_backup(matrix.t())
    assert saver.get_cpu_backup(matrix) is not None
    saver.resume()
    assert matrix.sum().item() == 0


def test_a_mixture_of_backups_in_one_tag(disk: Path) -> None:
    tensors = {}
    for kind, settings in BACKUPS.items():
        with saver.region(tag="mixed", **settings):
            tensors[kind] = empty(64 * MIB)
    with saver.region(tag="mixed"):
        tensors["none"] = empty(64 * MIB)
    for seed, tensor in enumerate(tensors.values()):
        fill_random(tensor, seed)
    assert len({segment_of(tensor).address for tensor in tensors.values()}) == len(tensors), (
        "backup choices share no segment"
    )
    sums = {kind: checksum(tensor) for kind, tensor in tensors.items()}
    report = saver.pause("mixed")
    assert report.bytes == 5 * 64 * MIB
    assert report.copied_bytes == 4 * 64 * MIB
    report = saver.resume("mixed")
    assert report.copied_bytes == 4 * 64 * MIB
    for kind in BACKUPS:
        assert checksum(tensors[kind]) == sums[kind], kind
    write_and_check(tensors["none"], 9)
    del tensors, tensor
