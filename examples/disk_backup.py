"""Contents that are kept in files while the device memory is released, if they do not fit into host memory.

The files lie in the directory given to `set_disk_backup_dir()` (or TMS_DISK_BACKUP_DIR) and keep their size over the
cycles. A file is removed when its tensor is freed or the process ends. The next process that uses the directory removes
the files of a process that was killed.

    python examples/disk_backup.py --directory /path/on/a/fast/disk
"""

import gc
import tempfile
from pathlib import Path

import torch
from _common import GIB, MIB, allocate, check, check_bytes, checksum, fill_random, free_bytes, options, total

from torch_memory_saver import torch_memory_saver


def size_of_files(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> None:
    parser = options(__doc__, gib=1)
    parser.add_argument("--directory", default=None, help="where the files go (default: the system's temporary directory)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        folder = Path(name)
        torch_memory_saver.set_disk_backup_dir(folder)
        with torch_memory_saver.region(tag="optimizer", backup="disk"):
            state = allocate(arguments.gib * GIB)
        fill_random(state)
        expected, size = checksum(state), total(state)
        sizes = []
        for _ in range(2):
            before = free_bytes()
            report = torch_memory_saver.pause("optimizer")
            print(f"paused in {report.seconds:.2f} s, {report.copied_bytes / 1e9 / report.seconds:.1f} GB/s")
            check_bytes(free_bytes() - before, size, "given back")
            sizes.append(size_of_files(folder))
            report = torch_memory_saver.resume("optimizer")
            print(f"resumed in {report.seconds:.2f} s, {report.copied_bytes / 1e9 / report.seconds:.1f} GB/s")
            check(checksum(state) == expected, "the contents are what they were")
        check(sizes[0] >= size, f"the files hold {sizes[0] / MIB:.0f} MiB")
        check(sizes[0] == sizes[1], "their size does not change from cycle to cycle")
        del state
        gc.collect()
        torch.cuda.synchronize()
        torch_memory_saver.empty_cache()
        check(size_of_files(folder) == 0, "the files have gone with the tensors")


if __name__ == "__main__":
    main()
