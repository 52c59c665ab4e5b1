"""Stream capture: its states, what it forbids in each mode, and how it ends."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

from gpu import DEVICE_TO_HOST, GLOBAL, GRANULE, READ_WRITE, RELAXED, THREAD_LOCAL, Gpu
from table import Observations, behaviour

MODES = {"global": GLOBAL, "thread local": THREAD_LOCAL, "relaxed": RELAXED}


def during(gpu: Gpu, call: Callable[[int], str]) -> Observations:
    """The effect of a call while a stream of the thread is captured, and its effect on the capture, in each mode."""
    seen: Observations = {}
    for label, mode in MODES.items():
        stream, graph = gpu.stream(), ctypes.c_uint64(7)
        gpu.must("cuStreamBeginCapture", stream, mode)
        result = call(stream)
        status = gpu.capture_status(stream)
        end = gpu.cuStreamEndCapture(stream, graph)
        kind = {0: "no graph", 7: "untouched"}.get(graph.value, "graph")
        seen[label] = [result, status, end, kind, gpu.cudaGetLastError()]
    return seen


@behaviour
def nothing(gpu: Gpu) -> Observations:
    return during(gpu, lambda stream: "SUCCESS")


@behaviour
def synchronizing(gpu: Gpu) -> Observations:
    event = gpu.event()
    gpu.must("cuEventRecord", event, 0)
    return {
        "cuCtxSynchronize": during(gpu, lambda stream: gpu.cuCtxSynchronize()),
        "cudaDeviceSynchronize": during(gpu, lambda stream: gpu.cudaDeviceSynchronize()),
        "cuStreamSynchronize of it": during(gpu, lambda stream: gpu.cuStreamSynchronize(stream)),
        "cuStreamQuery of it": during(gpu, lambda stream: gpu.cuStreamQuery(stream)),
        "cuStreamSynchronize legacy": during(gpu, lambda stream: gpu.cuStreamSynchronize(0)),
        "cuEventQuery": during(gpu, lambda stream: gpu.cuEventQuery(event)),
        "cuEventSynchronize": during(gpu, lambda stream: gpu.cuEventSynchronize(event)),
    }


@behaviour
def other_stream(gpu: Gpu) -> Observations:
    other, block = gpu.stream(), gpu.block()
    return {
        "cuStreamSynchronize": during(gpu, lambda stream: gpu.cuStreamSynchronize(other)),
        "cuStreamQuery": during(gpu, lambda stream: gpu.cuStreamQuery(other)),
        "memset": during(gpu, lambda stream: gpu.cuMemsetD8Async(block.address, 1, 4096, other)),
    }


@behaviour
def allocating(gpu: Gpu) -> Observations:
    pointer, other, pages = ctypes.c_uint64(), ctypes.c_uint64(), gpu.pages()
    allocated = [gpu.malloc() for _ in MODES]
    pinned = [gpu.pinned() for _ in MODES]
    return {
        "cudaMalloc": during(gpu, lambda stream: gpu.cudaMalloc(pointer, GRANULE)),
        "cuMemAlloc": during(gpu, lambda stream: gpu.cuMemAlloc(pointer, GRANULE)),
        "cudaFree": during(gpu, lambda stream: gpu.cudaFree(allocated.pop())),
        "cudaFree NULL": during(gpu, lambda stream: gpu.cudaFree(None)),
        "cuMemHostAlloc": during(gpu, lambda stream: gpu.cuMemHostAlloc(pointer, 4096, 0)),
        "cuMemFreeHost": during(gpu, lambda stream: gpu.cuMemFreeHost(pinned.pop())),
        "cuMemHostRegister": during(gpu, lambda stream: gpu.cuMemHostRegister(ctypes.addressof(pages), 4096, 0)),
        "cudaMemGetInfo": during(gpu, lambda stream: gpu.cudaMemGetInfo(pointer, other)),
        "cuMemGetInfo": during(gpu, lambda stream: gpu.cuMemGetInfo(pointer, other)),
        "cuStreamCreate": during(gpu, lambda stream: gpu.cuStreamCreate(pointer, 1)),
        "cuEventCreate": during(gpu, lambda stream: gpu.cuEventCreate(pointer, 2)),
        "cudaSetDevice": during(gpu, lambda stream: gpu.cudaSetDevice(0)),
    }


@behaviour
def virtual_memory(gpu: Gpu) -> Observations:
    def cycle(stream: int) -> str:
        address, handle = ctypes.c_uint64(), ctypes.c_uint64()
        return " ".join(
            [
                gpu.cuMemAddressReserve(address, GRANULE, 0, 0, 0),
                gpu.cuMemCreate(handle, GRANULE, gpu.properties(), 0),
                gpu.cuMemMap(address.value, GRANULE, 0, handle.value, 0),
                gpu.cuMemSetAccess(address.value, GRANULE, gpu.access(flags=READ_WRITE), 1),
                gpu.cuMemUnmap(address.value, GRANULE),
                gpu.cuMemRelease(handle.value),
                gpu.cuMemAddressFree(address.value, GRANULE),
            ]
        )

    return {"cycle": during(gpu, cycle)}


@behaviour
def copying(gpu: Gpu) -> Observations:
    block, host, pinned = gpu.block(), (ctypes.c_ubyte * 4096)(), gpu.pinned()
    at = block.address
    return {
        "cuMemcpyDtoH": during(gpu, lambda stream: gpu.cuMemcpyDtoH(host, at, 4096)),
        "cudaMemcpy": during(gpu, lambda stream: gpu.cudaMemcpy(host, at, 4096, DEVICE_TO_HOST)),
        "cuMemcpyDtoD": during(gpu, lambda stream: gpu.cuMemcpyDtoD(at, at + 8192, 4096)),
        "cuMemsetD8": during(gpu, lambda stream: gpu.cuMemsetD8(at, 1, 4096)),
        "async pinned": during(gpu, lambda stream: gpu.cuMemcpyDtoHAsync(pinned, at, 4096, stream)),
        "async pageable to host": during(gpu, lambda stream: gpu.cuMemcpyDtoHAsync(host, at, 4096, stream)),
        "async pageable to device": during(gpu, lambda stream: gpu.cuMemcpyHtoDAsync(at, host, 4096, stream)),
        "async on the legacy stream": during(gpu, lambda stream: gpu.cuMemcpyDtoHAsync(pinned, at, 4096, 0)),
    }


@behaviour
def copying_in_batches(gpu: Gpu) -> Observations:
    """On the stream that is captured, and on another one meanwhile."""
    block, pinned, other = gpu.block(), gpu.pinned(), gpu.stream()
    copies = [(pinned, block.address, 1024), (pinned + 1024, block.address + 2048, 1024)]
    seen: Observations = {
        "captured": during(gpu, lambda stream: gpu.batch(copies, stream)),
        "beside": during(gpu, lambda stream: gpu.batch(copies, other)),
    }
    seen["synchronize"] = gpu.cuStreamSynchronize(other)
    return seen


@behaviour
def legacy_stream(gpu: Gpu) -> Observations:
    """The status of the legacy stream, and begin on it."""
    seen: Observations = {"idle": gpu.capture_status(0), "begin": gpu.cuStreamBeginCapture(0, RELAXED)}
    for flags, kind in ((0, "blocking"), (1, "non-blocking")):
        for label, mode in MODES.items():
            stream, graph = gpu.stream(flags), ctypes.c_uint64()
            gpu.must("cuStreamBeginCapture", stream, mode)
            asked = gpu.capture_status(0)
            own = gpu.capture_status(stream)
            seen[f"{kind}, {label}"] = [asked, own, gpu.cuStreamEndCapture(stream, graph)]
    return seen


@behaviour
def legacy_stream_from_a_thread(gpu: Gpu) -> Observations:
    context = gpu.context()
    seen: Observations = {}
    for label, mode in MODES.items():
        stream, graph = gpu.stream(0), ctypes.c_uint64()
        gpu.must("cuStreamBeginCapture", stream, mode)

        def ask(label: str = label, stream: int = stream) -> None:
            gpu.must("cuCtxSetCurrent", context)
            pointer = ctypes.c_uint64()
            seen[label] = [
                gpu.capture_status(0), gpu.capture_status(stream), gpu.cudaMalloc(pointer, 4096), gpu.capture_status(stream),
            ]  # fmt: skip

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        seen[label].append(gpu.cuStreamEndCapture(stream, graph))
    return seen


@behaviour
def begin_and_end(gpu: Gpu) -> Observations:
    stream, other, graph = gpu.stream(), gpu.stream(), ctypes.c_uint64(7)
    seen: Observations = {
        "end before begin": [gpu.cuStreamEndCapture(stream, graph), graph.value],
        "status without result": gpu.cuStreamIsCapturing(stream, None),
        "mode 7": gpu.cuStreamBeginCapture(stream, 7),
        "begin": gpu.cuStreamBeginCapture(stream, GLOBAL),
        "begin again": gpu.cuStreamBeginCapture(stream, GLOBAL),
        "status": gpu.capture_status(stream),
        "end another": gpu.cuStreamEndCapture(other, graph),
        "end": gpu.cuStreamEndCapture(stream, graph),
        "end again": gpu.cuStreamEndCapture(stream, graph),
        "end without result": [gpu.cuStreamBeginCapture(stream, RELAXED), gpu.cuStreamEndCapture(stream, None)],
        "status after that": gpu.capture_status(stream),
    }
    seen["ended then"] = gpu.cuStreamEndCapture(stream, graph)
    return seen


@behaviour
def end_on_another_thread(gpu: Gpu) -> Observations:
    context = gpu.context()
    seen: Observations = {}
    for label, mode in MODES.items():
        stream, graph = gpu.stream(), ctypes.c_uint64()
        gpu.must("cuStreamBeginCapture", stream, mode)
        results: list[str] = []

        def end(stream: int = stream, graph: ctypes.c_uint64 = graph, results: list[str] = results) -> None:
            gpu.must("cuCtxSetCurrent", context)
            results.append(gpu.cuStreamEndCapture(stream, graph))

        thread = threading.Thread(target=end)
        thread.start()
        thread.join()
        seen[label] = [*results, gpu.capture_status(stream), gpu.cuStreamEndCapture(stream, graph)]
    return seen


@behaviour
def exchange_mode(gpu: Gpu) -> Observations:
    mode, pointer = ctypes.c_int(RELAXED), ctypes.c_uint64()
    seen: Observations = {"first": [gpu.cuThreadExchangeStreamCaptureMode(mode), mode.value]}
    seen["malloc while relaxed"] = during(gpu, lambda stream: gpu.cudaMalloc(pointer, GRANULE))
    mode.value = THREAD_LOCAL
    seen["second"] = [gpu.cuThreadExchangeStreamCaptureMode(mode), mode.value]
    seen["malloc while thread local"] = during(gpu, lambda stream: gpu.cudaMalloc(pointer, GRANULE))
    mode.value = GLOBAL
    seen["third"] = [gpu.cuThreadExchangeStreamCaptureMode(mode), mode.value]
    mode.value = 9
    seen["mode 9"] = gpu.cuThreadExchangeStreamCaptureMode(mode)
    return seen


@behaviour
def exchanged_inside(gpu: Gpu) -> Observations:
    """What torch does around its allocations."""

    def allocate(stream: int) -> str:
        mode, pointer = ctypes.c_int(RELAXED), ctypes.c_uint64()
        gpu.must("cuThreadExchangeStreamCaptureMode", mode)
        result = gpu.cudaMalloc(pointer, GRANULE)
        gpu.must("cuThreadExchangeStreamCaptureMode", mode)
        return result

    return during(gpu, allocate)


@behaviour
def fork_and_join(gpu: Gpu) -> Observations:
    stream, side, event, back = gpu.stream(), gpu.stream(), gpu.event(), gpu.event()
    graph = ctypes.c_uint64()
    gpu.must("cuStreamBeginCapture", stream, GLOBAL)
    seen: Observations = {
        "record": gpu.cuEventRecord(event, stream),
        "side waits": gpu.cuStreamWaitEvent(side, event, 0),
        "side is captured": gpu.capture_status(side),
        "query the captured event": gpu.cuEventQuery(event),
        "status after that": gpu.capture_status(stream),
    }
    seen["end"] = gpu.cuStreamEndCapture(stream, graph)
    gpu.must("cuStreamBeginCapture", stream, GLOBAL)
    gpu.must("cuEventRecord", event, stream)
    gpu.must("cuStreamWaitEvent", side, event, 0)
    seen["end without join"] = [gpu.cuStreamEndCapture(stream, graph), gpu.capture_status(side)]
    gpu.must("cuStreamBeginCapture", stream, GLOBAL)
    gpu.must("cuEventRecord", event, stream)
    gpu.must("cuStreamWaitEvent", side, event, 0)
    seen["end on the side"] = gpu.cuStreamEndCapture(side, graph)
    gpu.call("cuEventRecord", back, side)
    gpu.call("cuStreamWaitEvent", stream, back, 0)
    seen["joined"] = [gpu.cuStreamEndCapture(stream, graph), gpu.capture_status(side)]
    return seen


@behaviour
def wait_for_uncaptured_event(gpu: Gpu) -> Observations:
    other, event = gpu.stream(), gpu.event()
    gpu.must("cuEventRecord", event, other)
    return during(gpu, lambda stream: gpu.cuStreamWaitEvent(stream, event, 0))


@behaviour
def work_is_not_done_yet(gpu: Gpu) -> Observations:
    block = gpu.block()
    gpu.put(block.address, 1, 4096)
    stream, executable = gpu.capture(lambda stream: gpu.must("cuMemsetD8Async", block.address, 2, 4096, stream))
    return {
        "after capture": gpu.read(block.address),
        "launch": gpu.cuGraphLaunch(executable, stream),
        "synchronize": gpu.cuStreamSynchronize(stream),
        "after launch": gpu.read(block.address),
        "launch on the legacy stream": gpu.cuGraphLaunch(executable, 0),
        "destroy": gpu.cuGraphExecDestroy(executable),
    }


@behaviour(own_process=True)
def destroying_captured_stream(gpu: Gpu) -> Observations:
    gpu.start()
    stream = gpu.stream()
    gpu.must("cuStreamBeginCapture", stream, GLOBAL)
    return {"destroy": gpu.cuStreamDestroy(stream), "next": gpu.cuCtxSynchronize(), "malloc": gpu.cudaFree(gpu.malloc())}


@behaviour
def asking_for_a_captured_event(gpu: Gpu) -> Observations:
    """An event of the capture itself, in each mode."""
    event = gpu.event()

    def asking(name: str) -> Observations:
        return during(gpu, lambda stream: f"{gpu.cuEventRecord(event, stream)} {gpu.call(name, event)}")

    seen: Observations = {name: asking(name) for name in ("cuEventQuery", "cuEventSynchronize", "cudaEventQuery")}
    seen["after the capture"] = [gpu.cuEventQuery(event), gpu.cuEventSynchronize(event)]
    seen["no event"] = during(gpu, lambda stream: gpu.cuEventQuery(0))
    return seen
