"""What `release_cached` returns."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DeviceRelease", "ReleaseReport"]

_MIB = 1 << 20
_REASONS = {
    "capture": "a stream capture is visible",
    "cool-down": "the last release was less than the cool-down ago",
    "inside": "this thread is inside a pause, a resume or another release",
    "unused": "this process does not use CUDA through PyTorch",
}


@dataclass(frozen=True)
class DeviceRelease:
    """One device, before and after a release. All in bytes, of this process only.

    Attributes:
        device: CUDA ordinal.
        reserved_before: PyTorch's ``memory_reserved``: its segments, paused ones included.
        reserved_after: The same afterwards.
        allocated_before: PyTorch's ``memory_allocated``: its tensors. A garbage collection lowers it.
        allocated_after: The same afterwards.
        freed_bytes: How much less physical memory PyTorch holds: of what it reserves, paused segments hold none; what has
            become slack (``stats().slack_bytes``) is still held. 0 if other threads allocated more meanwhile.
    """

    device: int
    reserved_before: int
    reserved_after: int
    allocated_before: int
    allocated_after: int
    freed_bytes: int

    def __str__(self) -> str:
        return (
            f"device {self.device}: reserved {_mib(self.reserved_before)} -> {_mib(self.reserved_after)} MiB, "
            f"allocated {_mib(self.allocated_before)} -> {_mib(self.allocated_after)} MiB"
        )


@dataclass(frozen=True)
class ReleaseReport:
    """What one `release_cached` did, in this process only: it cannot reach the caches of other processes.

    Attributes:
        pid: Of this process.
        devices: The devices on which this process has a context. Empty if nothing was done.
        rounds: How often everything was collected and emptied. 0 if nothing was done.
        seconds: Wall-clock time of the call.
        skipped: Why nothing was done: "capture" (a capture is visible), "cool-down", "inside" (a finaliser, callback or
            hook called it on a thread that is inside a pause, resume or release) or "unused" (PyTorch does not use CUDA
            here). None if it was done.
    """

    pid: int
    devices: tuple[DeviceRelease, ...] = ()
    rounds: int = 0
    seconds: float = 0.0
    skipped: str | None = None

    @property
    def freed_bytes(self) -> int:
        """Physical memory that went back to the driver, on all devices."""
        return sum(device.freed_bytes for device in self.devices)

    def __str__(self) -> str:
        if self.skipped is not None:
            return f"process {self.pid} released nothing: {_REASONS[self.skipped]}"
        parts = [
            f"process {self.pid} released {_mib(self.freed_bytes)} MiB of cached device memory "
            f"({self.rounds} round{'s' if self.rounds > 1 else ''}, {self.seconds:.3f} s)",
            *map(str, self.devices),
            "other processes keep their caches: call it in each",
        ]
        return "; ".join(parts)


def _mib(size: int) -> str:
    return f"{size / _MIB:.1f}"
