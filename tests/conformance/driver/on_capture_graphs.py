"""Captured graphs: their arguments, and replays after memory was unmapped or remapped."""

from __future__ import annotations

import ctypes

from gpu import GLOBAL, GRANULE, Gpu
from table import Observations, behaviour


@behaviour
def replay_after_remap(gpu: Gpu) -> Observations:
    source, target = gpu.block(), gpu.block()
    gpu.put(source.address, 0x61, 4096)
    stream, executable = gpu.capture(
        lambda stream: gpu.must("cuMemcpyDtoDAsync", target.address, source.address, 4096, stream)
    )
    gpu.drop(source, keep_address=True)
    gpu.drop(target, keep_address=True)
    gpu.block(address=source.address)
    gpu.block(address=target.address)
    gpu.put(source.address, 0x62, 4096)
    gpu.put(target.address, 0, 4096)
    return {
        "launch": gpu.cuGraphLaunch(executable, stream),
        "synchronize": gpu.cuStreamSynchronize(stream),
        "contents": gpu.read(target.address),
    }


@behaviour(own_process=True)
def replay_copy_on_unmapped(gpu: Gpu) -> Observations:
    gpu.start()
    source, target = gpu.block(), gpu.block()
    stream, executable = gpu.capture(
        lambda stream: gpu.must("cuMemcpyDtoDAsync", target.address, source.address, 4096, stream)
    )
    gpu.must("cuMemUnmap", source.address, GRANULE)
    return {
        "launch": gpu.cuGraphLaunch(executable, stream),
        "synchronize": gpu.cuStreamSynchronize(stream),
        "again": gpu.cuStreamSynchronize(stream),
        "launch again": gpu.cuGraphLaunch(executable, stream),
        "cudaGetLastError": gpu.cudaGetLastError(),
    }


@behaviour(own_process=True)
def capture_of_unmapped(gpu: Gpu) -> Observations:
    """Addresses that are not mapped while captured, and are at the replay; and instantiated while unmapped."""
    gpu.start()
    block = gpu.block()
    gpu.must("cuMemUnmap", block.address, GRANULE)
    stream, graph, executable = gpu.stream(), ctypes.c_uint64(), ctypes.c_uint64()
    gpu.must("cuStreamBeginCapture", stream, GLOBAL)
    seen: Observations = {
        "memset": gpu.cuMemsetD8Async(block.address, 3, 4096, stream),
        "status": gpu.capture_status(stream),
        "end": gpu.cuStreamEndCapture(stream, graph),
    }
    if graph.value:
        seen["instantiate"] = gpu.cuGraphInstantiateWithFlags(executable, graph.value, 0)
    gpu.must("cuMemMap", block.address, GRANULE, 0, block.handle, 0)
    gpu.allow(block.address)
    if executable.value:
        seen["launch"] = gpu.cuGraphLaunch(executable.value, stream)
        seen["synchronize"] = gpu.cuStreamSynchronize(stream)
    seen["contents"] = gpu.read(block.address, 64)[:5]
    return seen


@behaviour
def graph_arguments(gpu: Gpu) -> Observations:
    graph, executable = ctypes.c_uint64(), ctypes.c_uint64()
    gpu.must("cuGraphCreate", graph, 0)
    return {
        "create flags 1": gpu.cuGraphCreate(ctypes.c_uint64(), 1),
        "instantiate an empty graph": gpu.cuGraphInstantiateWithFlags(executable, graph.value, 0),
        "launch it": gpu.cuGraphLaunch(executable.value, gpu.stream()),
        "instantiate none": gpu.cuGraphInstantiateWithFlags(executable, 0, 0),
        "launch none": gpu.cuGraphLaunch(0, 0),
        "destroy": gpu.cuGraphDestroy(graph.value),
        "destroy none": gpu.cuGraphDestroy(0),
        "instance outlives the graph": gpu.cuGraphExecDestroy(executable.value),
    }


@behaviour(own_process=True)
def capture_copy_of_unmapped(gpu: Gpu) -> Observations:
    gpu.start()
    block, other = gpu.block(), gpu.block()
    stream, graph, executable = gpu.stream(), ctypes.c_uint64(), ctypes.c_uint64()
    gpu.must("cuMemUnmap", block.address, GRANULE)
    gpu.must("cuStreamBeginCapture", stream, GLOBAL)
    seen: Observations = {
        "copy": gpu.cuMemcpyDtoDAsync(other.address, block.address, 4096, stream),
        "status": gpu.capture_status(stream),
        "end": gpu.cuStreamEndCapture(stream, graph),
    }
    if graph.value:
        seen["instantiate"] = gpu.cuGraphInstantiateWithFlags(executable, graph.value, 0)
    return seen


@behaviour(own_process=True)
def instantiate_while_unmapped(gpu: Gpu) -> Observations:
    """Captured while the memory was mapped; instantiated while it is not, and while it is not accessible."""
    gpu.start()
    seen: Observations = {}
    for label, work in (
        ("memset", lambda block, other, stream: gpu.cuMemsetD8Async(block.address, 1, 4096, stream)),
        ("copy", lambda block, other, stream: gpu.cuMemcpyDtoDAsync(other.address, block.address, 4096, stream)),
    ):
        block, other, stream, graph = gpu.block(), gpu.block(), gpu.stream(), ctypes.c_uint64()
        executable = ctypes.c_uint64()
        gpu.must("cuStreamBeginCapture", stream, GLOBAL)
        captured = work(block, other, stream)
        gpu.must("cuStreamEndCapture", stream, graph)
        gpu.must("cuMemUnmap", block.address, GRANULE)
        unmapped = gpu.cuGraphInstantiateWithFlags(executable, graph.value, 0)
        gpu.must("cuMemMap", block.address, GRANULE, 0, block.handle, 0)
        bare = gpu.cuGraphInstantiateWithFlags(executable, graph.value, 0)
        gpu.allow(block.address)
        mapped = gpu.cuGraphInstantiateWithFlags(executable, graph.value, 0)
        seen[label] = {"captured": captured, "unmapped": unmapped, "no access": bare, "mapped": mapped}
    return seen
