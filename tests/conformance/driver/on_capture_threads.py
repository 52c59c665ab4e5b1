"""A capture in flight in one thread: the results of another thread's calls in the same context, and their effect on it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

from gpu import GLOBAL, RELAXED, THREAD_LOCAL, Gpu
from table import Observations, behaviour

MODES = {"global": GLOBAL, "thread local": THREAD_LOCAL, "relaxed": RELAXED}


def beside(gpu: Gpu, call: Callable[[], str]) -> Observations:
    """The result of a call in another thread, in the thread's default mode and in the relaxed one, and its effect on a
    capture of each mode."""
    context = gpu.context()
    seen: Observations = {}
    for label, mode in MODES.items():
        for own in ("default", "relaxed"):
            stream, graph = gpu.stream(), ctypes.c_uint64()
            gpu.must("cuStreamBeginCapture", stream, mode)
            results: list[str] = []

            def run(own: str = own, results: list[str] = results) -> None:
                gpu.must("cuCtxSetCurrent", context)
                if own == "relaxed":
                    gpu.must("cuThreadExchangeStreamCaptureMode", ctypes.c_int(RELAXED))
                results.append(call())

            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
            seen[f"{label}, {own}"] = [*results, gpu.capture_status(stream), gpu.cuStreamEndCapture(stream, graph)]
    return seen


@behaviour
def waiting(gpu: Gpu) -> Observations:
    other, event = gpu.stream(), gpu.event()
    gpu.must("cuEventRecord", event, other)
    return {
        "nothing": beside(gpu, lambda: "SUCCESS"),
        "cuStreamSynchronize": beside(gpu, lambda: gpu.cuStreamSynchronize(other)),
        "cuStreamQuery": beside(gpu, lambda: gpu.cuStreamQuery(other)),
        "cuEventSynchronize": beside(gpu, lambda: gpu.cuEventSynchronize(event)),
        "cuEventQuery": beside(gpu, lambda: gpu.cuEventQuery(event)),
        "cuCtxSynchronize": beside(gpu, lambda: gpu.cuCtxSynchronize()),
    }


@behaviour
def copying(gpu: Gpu) -> Observations:
    other, block, pinned, pages = gpu.stream(), gpu.block(), gpu.pinned(), gpu.pages()
    at, host = block.address, ctypes.addressof(pages)
    seen: Observations = {
        "cuMemcpyDtoHAsync pinned": beside(gpu, lambda: gpu.cuMemcpyDtoHAsync(pinned, at, 4096, other)),
        "cuMemcpyHtoDAsync pinned": beside(gpu, lambda: gpu.cuMemcpyHtoDAsync(at, pinned, 4096, other)),
        "cuMemcpyDtoHAsync pageable": beside(gpu, lambda: gpu.cuMemcpyDtoHAsync(host, at, 4096, other)),
        "cuMemcpyHtoDAsync pageable": beside(gpu, lambda: gpu.cuMemcpyHtoDAsync(at, host, 4096, other)),
        "cuMemcpyBatchAsync pinned": beside(gpu, lambda: gpu.batch([(pinned, at, 1024), (pinned + 2048, at, 1024)], other)),
        "cuMemsetD8Async": beside(gpu, lambda: gpu.cuMemsetD8Async(at, 1, 4096, other)),
        "cuMemcpyDtoH": beside(gpu, lambda: gpu.cuMemcpyDtoH(host, at, 4096)),
    }
    seen["synchronize"] = gpu.cuStreamSynchronize(other)
    return seen


@behaviour
def pinning(gpu: Gpu) -> Observations:
    pages = gpu.pages()
    host = ctypes.addressof(pages)

    def unregister() -> str:
        result = gpu.cuMemHostUnregister(host)
        gpu.call("cuMemHostRegister", host, 4096, 0)  # for the next one, if it was released
        return result

    def register() -> str:
        result = gpu.cuMemHostRegister(host, 4096, 0)
        if result == "SUCCESS":
            gpu.must("cuMemHostUnregister", host)
        return result

    seen: Observations = {"cuMemHostRegister": beside(gpu, register)}
    gpu.must("cuMemHostRegister", host, 4096, 0)
    seen["cuMemHostUnregister"] = beside(gpu, unregister)
    gpu.call("cuMemHostUnregister", host)
    return seen


@behaviour
def streams_of_their_own(gpu: Gpu) -> Observations:
    """What a copying thread does: it creates, records and destroys a stream and events."""

    def cycle() -> str:
        stream, event = ctypes.c_uint64(), ctypes.c_uint64()
        return " ".join(
            [
                gpu.cuStreamCreate(stream, 1),
                gpu.cuEventCreate(event, 2),
                gpu.cuEventRecord(event.value, stream.value),
                gpu.cuStreamWaitEvent(stream.value, event.value, 0),
                gpu.cuEventDestroy(event.value),
                gpu.cuStreamDestroy(stream.value),
            ]
        )

    return {"cycle": beside(gpu, cycle)}


@behaviour
def asking(gpu: Gpu) -> Observations:
    """Another thread queries the stream itself: the state of its capture, and its context."""
    context = gpu.context()
    seen: Observations = {}
    for label, mode in MODES.items():
        stream, graph, found = gpu.stream(), ctypes.c_uint64(), ctypes.c_uint64()
        gpu.must("cuStreamBeginCapture", stream, mode)
        results: list[object] = []

        def ask(stream: int = stream, found: ctypes.c_uint64 = found, results: list[object] = results) -> None:
            gpu.must("cuCtxSetCurrent", context)
            results += [gpu.capture_status(stream), gpu.cuStreamGetCtx(stream, found), found.value == context]

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        seen[label] = [*results, gpu.cuStreamEndCapture(stream, graph), gpu.capture_status(stream)]
    return seen


@behaviour(own_process=True)
def lives_of_a_context(gpu: Gpu) -> Observations:
    """Whether a primary context that was reset has another identifier."""
    gpu.start()
    first, again, second = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_uint64()
    seen: Observations = {"first": gpu.cuCtxGetId(None, first), "again": gpu.cuCtxGetId(gpu.context(), again)}
    handle = gpu.context()
    seen["the same"] = first.value == again.value
    seen["cudaDeviceReset"] = gpu.cudaDeviceReset()
    gpu.start()
    seen["second"] = gpu.cuCtxGetId(None, second)
    seen["handle"] = gpu.context() == handle
    seen["another identifier"] = first.value != second.value
    return seen
