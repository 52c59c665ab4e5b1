"""Contents that are kept in host memory while the device memory is released.

`backup="host"` copies to pinned memory, which is fast. `backup="mmap"` copies to ordinary memory, which the resume releases.
While memory is paused, `get_cpu_backup()` returns the host copy of a tensor, for instance to save a checkpoint. With
`host_memory="retain"` the host memory is kept from one cycle to the next, which saves allocating it again.

    python examples/cpu_backup.py
"""

import torch
from _common import GIB, allocate, check, check_bytes, checksum, fill_random, free_bytes, options, total

from torch_memory_saver import torch_memory_saver


def cycle(backup: str, size: float) -> None:
    print(f'backup="{backup}"')
    with torch_memory_saver.region(tag=backup, backup=backup):
        weights = allocate(size)
    fill_random(weights)
    expected, before = checksum(weights), free_bytes()

    report = torch_memory_saver.pause(backup)
    print(f"  paused in {report.seconds:.2f} s, {report.copied_bytes / 1e9 / report.seconds:.1f} GB/s")
    check_bytes(free_bytes() - before, total(weights), "given back")
    host = torch_memory_saver.get_cpu_backup(weights[0])
    check(host is not None and host.device.type == "cpu", "get_cpu_backup() gives the copy of a paused tensor")

    report = torch_memory_saver.resume(backup)
    print(f"  resumed in {report.seconds:.2f} s, {report.copied_bytes / 1e9 / report.seconds:.1f} GB/s")
    check(checksum(weights) == expected, "the contents are what they were")
    check(host is not None and torch.equal(host, weights[0].cpu()), "and the same as the host copy")
    check(torch_memory_saver.get_cpu_backup(weights[0]) is None, "the backup has gone with the resume")


def retained(size: float) -> None:
    print('host_memory="retain"')
    with torch_memory_saver.region(tag="retained", backup="host", host_memory="retain"):
        weights = allocate(size)
    for number in range(3):
        fill_random(weights)
        expected = checksum(weights)
        report = torch_memory_saver.pause("retained")
        print(f"  cycle {number}: paused in {report.seconds:.3f} s")
        torch_memory_saver.resume("retained")
        check(checksum(weights) == expected, "the contents are what they were")
    host = torch_memory_saver.get_cpu_backup(weights[0], zero_copy=True)
    check(host is not None and torch.equal(host, weights[0].cpu()), "the last backup is still there to be read")


def main() -> None:
    size = options(__doc__, gib=2).parse_args().gib * GIB
    fill_random(allocate(0))  # makes torch load what it loads lazily, before anything is measured
    for backup in ("host", "mmap"):
        cycle(backup, size)
    retained(size)


if __name__ == "__main__":
    main()
