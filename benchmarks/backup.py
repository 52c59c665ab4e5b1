"""Pause and resume with contents kept, beside one copy of the same bytes to and from pinned memory. Reported only.

`first` is the first pause, which has to find the host memory; `retained` keeps it from one cycle to the next.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial

import torch
from common import GIB, MIB, Table, arguments, samples

from torch_memory_saver import torch_memory_saver

CHUNK = 512 * MIB


def timed(work: Callable[[], object]) -> float:
    """Seconds, until the device has finished."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def plain_copies(size: int, repetitions: int) -> tuple[list[float], list[float]]:
    """Seconds of copies from the device to pinned memory, and back."""
    device = torch.full((size,), 1, dtype=torch.uint8, device="cuda")
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    host.copy_(device)
    out = [timed(partial(host.copy_, device, non_blocking=True)) for _ in range(repetitions)]
    back = [timed(partial(device.copy_, host, non_blocking=True)) for _ in range(repetitions)]
    del device, host
    torch.cuda.empty_cache()
    torch._C._host_emptyCache()
    return out, back


def main() -> None:
    parser = arguments(__doc__, repetitions=3)
    parser.add_argument("--gib", type=float, default=4, help="bytes kept, GiB (default %(default)s)")
    parser.add_argument("--disk-gib", type=float, default=2, help="bytes kept on disk, GiB (default %(default)s)")
    parser.add_argument("--directory", default=None, help="of the disk backups (default: the system's temporary one)")
    options = parser.parse_args()
    table = Table("backups", ("what", "GiB", "pause s", "GB/s", "resume s", "GB/s"))

    def row(what: str, size: int, pauses: list[float], resumes: list[float]) -> None:
        out, back = samples(pauses), samples(resumes)
        cells = [what, f"{size / GIB:.2f}"]
        for measured in (out, back):
            cells += [f"{measured.median:.3f}", f"{size / 1e9 / measured.median:.1f}"]
        table.add(cells, what=what, bytes=size, pause_seconds=out, resume_seconds=back)

    def tensors(size: int) -> list[torch.Tensor]:
        return [torch.full((CHUNK,), 1, dtype=torch.uint8, device="cuda") for _ in range(max(1, size // CHUNK))]

    size = max(1, int(options.gib * GIB) // CHUNK) * CHUNK
    row("one copy to and from pinned memory", size, *plain_copies(size, options.repetitions))

    def cycles(what: str, size: int, **settings: object) -> None:
        with torch_memory_saver.region(tag=what, **settings):  # type: ignore[arg-type]
            kept = tensors(size)
        pauses, resumes = [], []
        for _ in range(options.repetitions + 1):
            pauses.append(timed(lambda: torch_memory_saver.pause(what)))
            resumes.append(timed(lambda: torch_memory_saver.resume(what)))
        if not all(bool((tensor == 1).all()) for tensor in kept):
            raise SystemExit(f"{what}: the contents are not what they were")
        row(f"{what}, first", size, pauses[:1], resumes[:1])
        row(f"{what}, later", size, pauses[1:], resumes[1:])
        del kept
        torch_memory_saver.empty_cache()

    for backend in ("pinned", "mmap"):
        cycles(f"CPU backup, {backend}", size, enable_cpu_backup=True, cpu_backup_backend=backend)
    torch_memory_saver.retain_cpu_backup = True
    cycles("CPU backup, pinned, retained", size, enable_cpu_backup=True)
    torch_memory_saver.retain_cpu_backup = False
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        torch_memory_saver.set_disk_backup_dir(folder)
        disk_size = max(1, int(options.disk_gib * GIB) // CHUNK) * CHUNK
        cycles("disk backup", disk_size, enable_disk_backup=True)
    table.show(options.json)


if __name__ == "__main__":
    main()
