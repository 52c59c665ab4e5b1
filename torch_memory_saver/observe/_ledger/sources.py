"""Take the ledger: combine what each source says about a device, so that the lines add up.

The sources are the driver, the native core, PyTorch's allocator and NVML. Taking a ledger allocates nothing on a device,
waits for none, makes no context and starts no process, so that a report of a lack of memory may do it, during a capture as
well. Only `measure_context` starts a child process, which does nothing but make a context: what it takes is the size of one.
It takes memory for a moment, and other processes that allocate then falsify it. Any thread may call, also while another
one pauses or resumes.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch_memory_saver import _core
from torch_memory_saver._services import (
    OrdinaryMemory,
    devices_in_use,
    driver_library,
    layer,
    nccl_communicators,
    ordinary_memory,
)
from torch_memory_saver.errors import DriverError, InvalidStateError, TorchMemorySaverError
from torch_memory_saver.observe._nvml import DeviceProcess, Nvml, NvmlHiddenError, share_of_this_process
from torch_memory_saver.reports.ledger import DeviceLedger, Ledger, LedgerLine, LedgerPart

__all__ = ["known_name", "measure_context_bytes", "take_ledger"]

#: By the beginning of the file's name, up to its first dot or hyphen.
_NAMES = {
    "libnccl": "NCCL",
    "libcublas": "cuBLAS",
    "libcublasLt": "cuBLAS",
    "libcudnn": "cuDNN",
    "libcufft": "cuFFT",
    "libcusolver": "cuSOLVER",
    "libcusparse": "cuSPARSE",
    "libcusparseLt": "cuSPARSELt",
    "libcudart": "CUDA runtime",
    "libnvshmem_host": "NVSHMEM",
}
#: A library of many files: libcudnn_ops, libcudnn_graph and so on.
_PREFIX, _WHOLE = "libcudnn_", "libcudnn"


def known_name(path: str) -> str:
    """Return the name of the library in that file, or "" where it has none but the file's. Several files may have one
    name."""
    stem = os.path.basename(path).partition(".")[0].partition("-")[0]
    return _NAMES.get(_WHOLE if stem.startswith(_PREFIX) else stem, "")


#: Makes the primary context of the device with the ordinal argv[2], by the driver argv[1], and keeps it until stdin ends.
_CHILD = """
import ctypes, sys
driver, device, context = ctypes.CDLL(sys.argv[1]), ctypes.c_int(), ctypes.c_void_p()
for call, *arguments in (
    (driver.cuInit, 0),
    (driver.cuDeviceGet, ctypes.byref(device), int(sys.argv[2])),
    (driver.cuDevicePrimaryCtxRetain, ctypes.byref(context), device),
):
    result = call(*arguments)
    if result:
        sys.exit(f"{call.__name__} failed with {result}")
print("made", flush=True)
sys.stdin.read()
"""
#: Options of Python: no sitecustomize, which may import this package and write files.
_NOTHING_ELSE = ("-I", "-S")


def measure_context_bytes(device: int, uuid: str) -> int:
    """Return the bytes that a context takes on a device.

    Args:
        device: CUDA ordinal, of a device in use.
        uuid: The device's, such as "GPU-5d5ba0d6-..."; "" if it is not known.

    Raises:
        DriverError: The child cannot make a context.
    """
    environment, ordinal = dict(os.environ), device
    if uuid:  # the program may have changed the variable since it began to use CUDA
        environment["CUDA_VISIBLE_DEVICES"], ordinal = uuid, 0
    library = driver_library()
    before = _core.device_memory(device).free
    with subprocess.Popen(
        [sys.executable, *_NOTHING_ELSE, "-c", _CHILD, library, str(ordinal)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:  # whose input ends with the block, and so the child
        assert child.stdout is not None
        made = child.stdout.readline()
        after = _core.device_memory(device).free
        _, errors = child.communicate()
    if not made:
        reason = errors.strip().rpartition("\n")[2] or f"it ended with status {child.returncode}"
        raise DriverError(
            f"the context of device {device} could not be measured, because the child process made none: {reason}",
            operation="ledger",
        )
    return max(0, before - after)


_ATTEMPTS = 3
_IN_TRANSITION = (_core.STATE_PAUSING, _core.STATE_RESUMING, _core.STATE_REPAIRING)
_CHANGING = "a pause or resume is under way: its memory may be counted as resident and be released already, or the reverse"
_RETURNS_SLACK = (
    "memory of freed allocations that stays with their tags, for the next ones: a pause gives it back, and "
    'pause(tag, backup="host") with a resume(tag) keeps the contents'
)
_DEFERRED = "memory of freed allocations that is released when the capture ends, or once the device can be waited for"
_OTHER_LIBRARIES = "other libraries"
#: The library of PyTorch that has its CUDA allocator.
_TORCHS_ALLOCATOR = "libc10_cuda."
_NOT_COUNTED = "Not counted without the preload library. This memory is included in 'context and modules'."
_NOT_SEEN = (
    "libraries that look up the driver's functions themselves, as NCCL and cuBLAS do, are not counted: their memory is "
    "included in 'context and modules'"
)
_OF_CONTEXT = (
    "NVML's figure for this process minus the lines above. It includes memory that libraries allocated without being "
    "counted."
)
_DISAGREE = "the sources disagree: they were read one after the other, or count a piece of memory twice"
_NOT_KNOWN = "the driver's own memory, rounding, and what no source names"


def take_ledger(device: int | None, measure_context: bool = False) -> Ledger:
    """Return the ledger of one device, or of all on which this process has a context (None).

    Raises:
        InvalidStateError: This process has no context on the device.
        TorchMemorySaverError: The driver fails.
    """
    listed = devices_in_use()
    if device is not None:
        if device not in listed:
            raise InvalidStateError(
                f"this process does not use device {device}, and asking the driver for its memory would create a context "
                "there: use the device first, or run `python -m torch_memory_saver doctor --ledger`",
                operation="ledger",
            )
        listed = [device]
    ledgers = tuple(_device_ledger(number, measure_context) for number in listed)
    return Ledger(ledgers, tuple(_remarks()), os.getpid(), time.time())


def _remarks() -> Iterator[str]:
    for sentence in (nccl_communicators.describe_held(), nccl_communicators.describe_unreleased()):
        if sentence is not None:
            yield sentence
    for row in _core.libraries():
        if row.device < 0:
            held = f"{row.bytes} bytes in {row.allocations} allocations"
            yield f"{_name_of(row.path)} holds {held} on a device that is not known."
    uncounted = _core.counters()["uncounted_allocations_total"]
    if uncounted:
        yield f"{uncounted} allocations of libraries could not be counted, because host memory was short."


@dataclass(frozen=True)
class _Sources:
    """The reports of the sources about one device, at about one moment."""

    device: int
    total: int
    used: int
    tags: list[LedgerPart]
    slack: list[LedgerPart]
    deferred: list[LedgerPart]
    changing: bool  # allocations are in transition, or changed while the sources were read
    damaged: int
    torch: OrdinaryMemory | None
    torch_note: str
    libraries: list[_core.Library]
    uuid: str  # "" if it is not known

    @property
    def managed(self) -> int:
        return sum(part.bytes or 0 for part in self.tags)


def _device_ledger(device: int, measure_context: bool) -> DeviceLedger:
    sources = _read(device)
    for _ in range(_ATTEMPTS - 1):
        if not sources.changing:
            break
        sources = _read(device)
    lines = [_managed_line(sources), *_lines_of_freed(sources), _torch_line(sources), *_library_lines(sources)]
    known = sum(line.bytes or 0 for line in lines)
    lines += _process_lines(sources, known, measure_context)
    lines.append(_unattributed_line(sources, sources.used - sum(line.bytes or 0 for line in lines)))
    return DeviceLedger(device, sources.total, sources.used, tuple(lines))


def _read(device: int) -> _Sources:
    rows = _core.segments()
    torch, torch_note = _read_torch(device, rows)
    memory = _core.device_memory(device)
    usage = [row for row in _core.usage(None, device) if row.tag is not None]
    after = _core.segments()
    return _Sources(
        device=device,
        total=memory.total,
        used=memory.total - memory.free,
        tags=[
            LedgerPart(str(row.tag), row.resident_bytes, _resident_count(after, row.tag, device))
            for row in usage
            if row.resident_bytes
        ],
        slack=[LedgerPart(str(row.tag), row.slack_bytes) for row in usage if row.slack_bytes],
        deferred=[LedgerPart(str(row.tag), row.deferred_bytes) for row in usage if row.deferred_bytes],
        changing=_states(rows, device) != _states(after, device) or any(row.state in _IN_TRANSITION for row in after),
        damaged=sum(row.damaged_bytes for row in usage),
        torch=torch,
        torch_note=torch_note,
        libraries=[row for row in _core.libraries() if row.device == device],
        uuid=_uuid(device),
    )


def _states(rows: Sequence[_core.Segment], device: int) -> list[tuple[int, int]]:
    return [(row.address, row.state) for row in rows if row.device == device]


def _resident_count(rows: Sequence[_core.Segment], tag: str | None, device: int) -> int:
    resident = (_core.STATE_ACTIVE, _core.STATE_PAUSING, _core.STATE_REPAIRING)
    return sum(row.device == device and row.tag == tag and row.state in resident for row in rows)


def _uuid(device: int) -> str:
    try:
        return _core.device_info(device).uuid
    except TorchMemorySaverError:  # of an old driver
        return ""


def _read_torch(device: int, rows: Sequence[_core.Segment]) -> tuple[OrdinaryMemory | None, str]:
    """Return PyTorch's memory that is not managed, and a note if it is not known."""
    try:
        torch = layer.in_use()
    except TorchMemorySaverError as error:
        return None, f"PyTorch's allocator does not tell: {error}"
    if torch is None:
        return None, "PyTorch is not in use"
    return ordinary_memory(torch, {row.address for row in rows}).get(device, OrdinaryMemory()), ""


def _managed_line(sources: _Sources) -> LedgerLine:
    return LedgerLine(
        "managed",
        "managed, resident",
        sources.managed,
        sum(part.allocations or 0 for part in sources.tags),
        tuple(sources.tags),
        _CHANGING if sources.changing else "",
    )


def _lines_of_freed(sources: _Sources) -> Iterator[LedgerLine]:
    """Return a line for slack and one for deferred frees, each if there is any."""
    for holder, name, parts, note in (
        ("slack", "managed, slack", sources.slack, _RETURNS_SLACK),
        ("deferred", "managed, free deferred", sources.deferred, _DEFERRED),
    ):
        size = sum(part.bytes or 0 for part in parts)
        if size:
            yield LedgerLine(holder, name, size, parts=tuple(parts), note=note)


def _torch_line(sources: _Sources) -> LedgerLine:
    name = "PyTorch, not managed"
    memory = sources.torch
    if memory is None:
        return LedgerLine("torch", name, None, note=sources.torch_note)
    parts = (LedgerPart("in use", memory.bytes - memory.cached), LedgerPart("cached", memory.cached))
    return LedgerLine("torch", name, memory.bytes, memory.segments, parts)


def _library_lines(sources: _Sources) -> list[LedgerLine]:
    """Return a line for each library that is counted, the largest first."""
    if not _core.preloaded:
        return [LedgerLine("library", _OTHER_LIBRARIES, None, note=_NOT_COUNTED)]
    # PyTorch's allocator tells itself what it has allocated.
    rows = [row for row in sources.libraries if sources.torch is None or not _is_torchs_allocator(row.path)]
    if not rows:
        return [LedgerLine("library", _OTHER_LIBRARIES, 0, 0, note=_NOT_SEEN)]
    sums: dict[str, tuple[int, int]] = {}
    files = [os.path.basename(path) for path in {row.path for row in rows}]
    for row in rows:
        # The path distinguishes two files with the same name.
        name = row.path if not known_name(row.path) and files.count(os.path.basename(row.path)) > 1 else _name_of(row.path)
        size, count = sums.get(name, (0, 0))
        sums[name] = size + row.bytes, count + row.allocations
    lines = [LedgerLine("library", name, size, count) for name, (size, count) in sums.items()]
    lines.sort(key=lambda line: line.bytes or 0, reverse=True)
    return [*lines[:-1], replace(lines[-1], note=_NOT_SEEN)]


def _name_of(path: str) -> str:
    return known_name(path) or os.path.basename(path) or "code made at run time"


def _is_torchs_allocator(path: str) -> bool:
    return os.path.basename(path).startswith(_TORCHS_ALLOCATOR)


def _process_lines(sources: _Sources, known: int, measure_context: bool) -> list[LedgerLine]:
    """Return the context's line and that of other processes. `known` is what this process certainly holds."""
    context, others = "context and modules", "other processes"
    try:
        processes = _processes(sources)
        share = share_of_this_process(processes, known)
    except NvmlHiddenError as error:
        return _hidden_lines(sources, known, str(error), measure_context)
    rest = [process for process in processes if process.pid != os.getpid()]
    parts = tuple(LedgerPart(f"pid {process.pid}", process.bytes) for process in rest)
    note = "NVML hides the memory of some" if any(process.bytes is None for process in rest) else ""
    return [
        LedgerLine("context", context, share - known, note=_OF_CONTEXT),
        LedgerLine("processes", others, sum(process.bytes or 0 for process in rest), parts=parts, note=note),
    ]


def _processes(sources: _Sources) -> list[DeviceProcess]:
    """Return the processes on the device, by NVML.

    Raises:
        NvmlHiddenError: NVML does not say it.
    """
    if not sources.uuid:
        raise NvmlHiddenError(f"the UUID of device {sources.device} is not known")
    return _nvml().processes(sources.uuid)


def _hidden_lines(sources: _Sources, known: int, reason: str, measure_context: bool) -> list[LedgerLine]:
    """Return one line for other processes, the context and all unknown memory, because NVML does not tell them apart."""
    rest = max(0, sources.used - known)
    why = f"NVML does not tell them apart: {reason}"
    if not measure_context:
        return [
            LedgerLine("context", "context and modules", None, note="part of the next line"),
            LedgerLine("processes", "other processes, context and modules", rest, note=why),
        ]
    measured = min(rest, measure_context_bytes(sources.device, sources.uuid))
    return [
        LedgerLine("context", "context", measured, note="as measured in a child process, without modules"),
        LedgerLine("processes", "other processes, and modules", rest - measured, note=why),
    ]


def _unattributed_line(sources: _Sources, rest: int) -> LedgerLine:
    note = _DISAGREE if rest < 0 else _NOT_KNOWN if rest > 0 else ""
    if sources.damaged:
        note += f"{'; ' if note else ''}{sources.damaged} bytes of damaged allocations may be here"
    return LedgerLine("unattributed", "not attributed", rest, note=note)


@functools.cache
def _nvml() -> Nvml:
    return Nvml()
