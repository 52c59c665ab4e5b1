"""Contents that are kept in host memory or in files while the device memory is released.

`backup="host"` copies to pinned memory, which is fast, `"mmap"` to ordinary memory, and `"disk"` to files in a directory
(`set_disk_backup_dir()`). The resume releases the copy. A host copy can be read while its tensor is paused, for instance to
save a checkpoint. With `host_memory="retain"` the host memory is kept from one cycle to the next, which saves allocating it.

    python examples/backups.py --directory /path/on/a/fast/disk
"""

import gc
import tempfile
from pathlib import Path

import torch
from _common import GIB, MIB, allocate, check, check_bytes, checksum, fill_random, free_bytes, options, show, total

from torch_memory_saver import torch_memory_saver


def size_of_files(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def cycles(backup: str, size: float, folder: Path, host_memory: str | None = None, number: int = 1) -> None:
    """Pause and resume memory with a backup `number` times."""
    print(f"{backup=}, {host_memory=}")
    with torch_memory_saver.region(tag=backup, backup=backup, host_memory=host_memory):
        weights = allocate(size)
    for _ in range(number):
        fill_random(weights)
        expected, before = checksum(weights), free_bytes()
        show("awake")
        report = torch_memory_saver.pause(backup)
        show(f"paused in {report.seconds:.2f} s, {report.copied_bytes / 1e9 / report.seconds:.1f} GB/s")
        check_bytes(free_bytes() - before, total(weights), "given back")
        host = None
        if backup == "disk":
            check(size_of_files(folder) >= total(weights), f"the files hold {size_of_files(folder) / MIB:.0f} MiB")
        else:
            host = torch_memory_saver.get_cpu_backup(weights[0])
            check(host is not None and host.device.type == "cpu", "get_cpu_backup() gives the copy of a paused tensor")
        report = torch_memory_saver.resume(backup)
        show(f"resumed in {report.seconds:.2f} s, {report.copied_bytes / 1e9 / report.seconds:.1f} GB/s")
        check(checksum(weights) == expected, "the contents are what they were")
        if host is not None:
            check(torch.equal(host, weights[0].cpu()), "and the same as the host copy")
        is_kept = torch_memory_saver.get_cpu_backup(weights[0]) is not None
        if host_memory == "retain":
            check(is_kept, "the host copy is still there after the resume")
        else:
            check(not is_kept, "the copy has gone with the resume")
    del weights
    gc.collect()
    torch.cuda.synchronize()
    torch_memory_saver.empty_cache()
    check(size_of_files(folder) == 0, "no files are left")


def main() -> None:
    parser = options(__doc__, gib=1)
    parser.add_argument("--directory", default=None, help="where the files go (default: the system's temporary directory)")
    arguments = parser.parse_args()
    fill_random(allocate(0))  # makes torch load what it loads lazily, before anything is measured
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        torch_memory_saver.set_disk_backup_dir(name)
        for backup in ("host", "mmap", "disk"):
            cycles(backup, arguments.gib * GIB, Path(name))
        cycles("host", arguments.gib * GIB, Path(name), host_memory="retain", number=3)


if __name__ == "__main__":
    main()
