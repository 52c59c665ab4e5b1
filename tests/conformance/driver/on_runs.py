"""Virtual memory management: neighbouring allocations that share one handle, as the driver describes them to libraries that
register memory (RDMA, NCCL), and the same addresses when the memory behind them is laid out again."""

from __future__ import annotations

import ctypes
import os

from gpu import GRANULE, Block, Gpu
from table import Observations, behaviour

#: A handle over several allocations, and one behind it in the same address range.
RUN, NEXT = 4 * GRANULE, 2 * GRANULE
#: Offsets of allocations in the address range, and of a byte inside one.
PLACES = {"start": 0, "inside": GRANULE + 4096, "last of the run": 3 * GRANULE, "next handle": RUN, "not mapped": RUN + NEXT}
#: Attributes of pointers that are numbers.
NUMBERS = {"legacy IPC": 10, "mapped": 13, "handle types": 14, "RDMA": 15, "mapping size": 18}
#: Those that are addresses, and those that are process-wide unique numbers.
ADDRESSES = {"range start": 11, "mapping start": 19}
IDENTITIES = {"buffer": 7, "memory block": 20}
DMABUF = 1


def attribute(gpu: Gpu, number: int, address: int) -> tuple[str, int]:
    value = ctypes.c_uint64()
    return gpu.cuPointerGetAttribute(value, number, address), value.value


def described(gpu: Gpu, base: int, address: int) -> Observations:
    """What the driver says of an address, with addresses as offsets in the range."""
    start, size = ctypes.c_uint64(), ctypes.c_uint64()
    result = gpu.cuMemGetAddressRange(start, size, address)
    seen: Observations = {"address range": [result, start.value - base, size.value] if result == "SUCCESS" else result}
    for label, number in NUMBERS.items():
        seen[label] = [*attribute(gpu, number, address)]
    for label, number in ADDRESSES.items():
        result, value = attribute(gpu, number, address)
        seen[label] = [result, value - base] if value else result
    return seen


def a_run(gpu: Gpu) -> tuple[int, Block, Block]:
    base = gpu.reserve(RUN + NEXT + GRANULE)
    return base, gpu.block(RUN, address=base), gpu.block(NEXT, address=base + RUN)


def drop_all(gpu: Gpu, base: int, *blocks: Block) -> None:
    for block in blocks:
        gpu.drop(block, keep_address=True)
    gpu.must("cuMemAddressFree", base, RUN + NEXT + GRANULE)


@behaviour
def described_inside(gpu: Gpu) -> Observations:
    base, run, behind = a_run(gpu)
    seen = {label: described(gpu, base, base + offset) for label, offset in PLACES.items()}
    drop_all(gpu, base, run, behind)
    return seen


@behaviour
def identities_inside(gpu: Gpu) -> Observations:
    """Which of the numbers that registration caches compare are the same at two addresses."""
    base, run, behind = a_run(gpu)
    seen: Observations = {}
    for label, number in IDENTITIES.items():
        values = {place: attribute(gpu, number, base + offset) for place, offset in PLACES.items() if place != "not mapped"}
        seen[label] = {
            "results": [result for result, _ in values.values()],
            "same in the run": len({values[place] for place in ("start", "inside", "last of the run")}) == 1,
            "same in the next handle": values["start"] == values["next handle"],
        }
    drop_all(gpu, base, run, behind)
    return seen


@behaviour
def identities_of_one_handle_mapped_twice(gpu: Gpu) -> Observations:
    """Whether the numbers are those of the physical memory or of the mapping."""
    block, elsewhere = gpu.block(), gpu.reserve()
    gpu.must("cuMemMap", elsewhere, GRANULE, 0, block.handle, 0)
    seen: Observations = {"access": gpu.allow(elsewhere)}
    for label, number in IDENTITIES.items():
        seen[f"{label} is the same"] = attribute(gpu, number, block.address) == attribute(gpu, number, elsewhere)
    gpu.must("cuMemUnmap", elsewhere, GRANULE)
    gpu.must("cuMemAddressFree", elsewhere, GRANULE)
    gpu.drop(block)
    return seen


@behaviour
def an_exportable_handle_for_rdma(gpu: Gpu) -> Observations:
    """As this library creates handles."""
    properties, handle = gpu.properties(handle_types=1), ctypes.c_uint64()
    properties.rdma = 1
    gpu.must("cuMemCreate", handle, GRANULE, properties, 0)
    block = Block(gpu.reserve(), handle.value, GRANULE)
    gpu.must("cuMemMap", block.address, GRANULE, 0, block.handle, 0)
    seen: Observations = {"access": gpu.allow(block.address)}
    for label in ("handle types", "RDMA"):
        seen[label] = [*attribute(gpu, NUMBERS[label], block.address)]
    gpu.drop(block)
    return seen


@behaviour
def retained_inside(gpu: Gpu) -> Observations:
    """The handle behind an address is that of the whole run: it maps elsewhere with all of the run's bytes only."""
    base, run, behind = a_run(gpu)
    elsewhere, handle = gpu.reserve(RUN), ctypes.c_uint64()
    gpu.put(base + 3 * GRANULE, 0x5A)
    seen: Observations = {"retain": gpu.cuMemRetainAllocationHandle(handle, base + GRANULE + 4096)}
    seen["the run's"] = handle.value == run.handle
    seen["map one allocation's size"] = gpu.cuMemMap(elsewhere, GRANULE, 0, handle.value, 0)
    seen["map one allocation's offset"] = gpu.cuMemMap(elsewhere, GRANULE, GRANULE, handle.value, 0)
    seen["map the run"] = gpu.cuMemMap(elsewhere, RUN, 0, handle.value, 0)
    gpu.allow(elsewhere, RUN)
    seen["bytes"] = gpu.read(elsewhere + 3 * GRANULE)
    gpu.must("cuMemUnmap", elsewhere, RUN)
    seen["release"] = gpu.cuMemRelease(handle.value)
    gpu.must("cuMemAddressFree", elsewhere, RUN)
    drop_all(gpu, base, run, behind)
    return seen


@behaviour
def laid_out_anew(gpu: Gpu) -> Observations:
    """First a handle an allocation, then one for all of them, then a handle each again, at the same addresses."""
    base = gpu.reserve(RUN + NEXT + GRANULE)
    inside, seen = base + GRANULE + 4096, {}
    identities: dict[str, list[tuple[str, int]]] = {label: [] for label in IDENTITIES}
    for label, count in (("apart", 4), ("together", 1), ("apart again", 4)):
        size = RUN // count
        blocks = [gpu.block(size, address=base + i * size) for i in range(count)]
        gpu.put(inside, 0x31)
        seen[label] = described(gpu, base, inside) | {"bytes": gpu.read(inside, 64)}
        for name, number in IDENTITIES.items():
            identities[name].append(attribute(gpu, number, inside))
        for block in blocks:
            gpu.drop(block, keep_address=True)
        seen[f"{label}, unmapped"] = described(gpu, base, inside)
    for name, values in identities.items():
        seen[f"{name} differs each time"] = len(set(values)) == len(values)
    gpu.must("cuMemAddressFree", base, RUN + NEXT + GRANULE)
    return seen


@behaviour
def access_and_unmapping_of_a_part(gpu: Gpu) -> Observations:
    """One allocation of a run cannot be taken away alone; several runs can with one call."""
    base, run, behind = a_run(gpu)
    seen: Observations = {
        "unmap the first": gpu.cuMemUnmap(base, GRANULE),
        "unmap the last": gpu.cuMemUnmap(base + 3 * GRANULE, GRANULE),
        "access of the last alone": gpu.allow(base + 3 * GRANULE, GRANULE),
        "access of both handles": gpu.allow(base, RUN + NEXT),
        "unmap from the run into the next": gpu.cuMemUnmap(base, RUN + GRANULE),
        "unmap both": gpu.cuMemUnmap(base, RUN + NEXT),
    }
    gpu.must("cuMemRelease", run.handle)
    gpu.must("cuMemRelease", behind.handle)
    gpu.must("cuMemAddressFree", base, RUN + NEXT + GRANULE)
    return seen


@behaviour
def dmabuf_of_a_part(gpu: Gpu) -> Observations:
    """The file descriptor with which a network card registers a range."""
    base, run, behind = a_run(gpu)
    seen: Observations = {}
    ranges = {
        "run": (0, RUN), "an allocation inside": (GRANULE, GRANULE), "a page": (GRANULE + 4096, 4096),
        "two handles": (0, RUN + NEXT), "over the end of the run": (3 * GRANULE, 2 * GRANULE),
    }  # fmt: skip
    for label, (offset, size) in ranges.items():
        descriptor = ctypes.c_int(-1)
        seen[label] = gpu.cuMemGetHandleForAddressRange(descriptor, base + offset, size, DMABUF, 0)
        if descriptor.value >= 0:
            os.close(descriptor.value)
    drop_all(gpu, base, run, behind)
    return seen
