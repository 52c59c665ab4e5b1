"""What a ledger is taken of: an NVML that says what a test wants, and allocations of the saver and of PyTorch."""

from __future__ import annotations

from fake_torch import FakeTorch

from torch_memory_saver import TorchMemorySaver
from torch_memory_saver.observe._nvml import DeviceProcess, NvmlHiddenError
from torch_memory_saver.reports.ledger import DeviceLedger

__all__ = ["HOLDERS", "MIB", "FakeNvml", "allocate", "sizes"]

MIB = 1 << 20
#: In the order of a ledger's lines.
HOLDERS = ["managed", "torch", "library", "context", "processes", "unattributed"]


class FakeNvml:
    """What NVML says of each device; a text hides it."""

    def __init__(self) -> None:
        self.says: list[DeviceProcess] | str = "NVML: Driver Not Loaded"
        self.queried: list[str] = []

    def processes(self, uuid: str) -> list[DeviceProcess]:
        self.queried.append(uuid)
        if isinstance(self.says, str):
            raise NvmlHiddenError(self.says)
        return self.says


def sizes(ledger: DeviceLedger) -> dict[str, int | None]:
    """The bytes by holder, of a ledger that adds up and has one line for each."""
    assert sum(line.bytes or 0 for line in ledger.lines) == ledger.used_bytes
    assert [line.holder for line in ledger.lines] == HOLDERS
    return {line.holder: line.bytes for line in ledger.lines}


def allocate(saver: TorchMemorySaver, fake_torch: FakeTorch) -> None:
    """12 MiB that are managed, of two tags, and 40 MiB of PyTorch's, of which 30 are cached."""
    for tag, size in (("a", 4 * MIB), ("b", 8 * MIB)):
        with saver.region(tag):
            fake_torch.allocate(size)
    fake_torch.allocate(10 * MIB)
    fake_torch.free(fake_torch.allocate(30 * MIB))
