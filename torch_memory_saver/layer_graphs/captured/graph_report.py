"""The memory of a plain graph that `cuda_graph()` captured, and the launches that its replay saves.

This module owns the measurements of captures, by graph. Programs call both functions; nothing else in the package does. The
size and the use of a pool can be read at any time. The peak of its use, and the nodes, are known only during the capture. So
PyTorch's history of allocations is on while the capture lasts. The nodes are counted before the capture ends, because
PyTorch destroys the graph itself afterwards. They are counted by calls of the CUDA driver that are allowed in a capture.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from torch_memory_saver import _core
from torch_memory_saver._services import driver_library, layer
from torch_memory_saver._text import table
from torch_memory_saver.errors import CaptureInProgressError, DriverError, InvalidArgumentError, InvalidStateError

from .accounting import Ranges, count, part, peak_bytes, size

__all__ = ["GraphReport", "NodeCounts", "captured_nodes", "graph_report", "measure_capture"]

#: PyTorch's names of an allocation, and of the moment from which its memory can be handed out again.
_SIGNS = {"alloc": 1, "free_completed": -1}
_INACTIVE, _HELD = "inactive", "active_allocated"
#: The status of an active capture, a value of CUstreamCaptureStatus.
_ACTIVE = 1
#: The kinds of nodes that are counted, values of CUgraphNodeType.
_KERNEL, _MEMCPY, _MEMSET = 0, 1, 2


@dataclass(frozen=True)
class GraphReport:
    """The memory that a graph takes, and its nodes.

    All sizes are in bytes. If graphs share a pool, the figures of the pool cover all of them.

    Attributes:
        segments: The number of the pool's segments. A segment is memory that PyTorch got from the driver at once: 2 or 20
            MiB, or a large tensor.
        pool_bytes: The size of the segments.
        managed_bytes: The part of the pool that a pause can release.
        held_bytes: The bytes that are in use now: results that tensors hold, and workspaces. Sizes are as requested, without
            PyTorch's rounding.
        peak_bytes: The most bytes that were in use at once during the capture, as requested: results, intermediates,
            workspaces, and memory that the pool's earlier graphs hold. None without `measure_capture`.
        workspace_bytes: The size of cuBLAS workspaces that lay in the pool. None unless `graph_report` was asked to clear
            them, because PyTorch does not report where they are.
        kernels: The kernels that a replay launches. None without `measure_capture`.
        copies: The copies and fills of memory in a replay. None without `measure_capture`.
        other_nodes: All other nodes of the graph, such as functions on the host and events. None without `measure_capture`.
    """

    segments: int
    pool_bytes: int
    managed_bytes: int
    held_bytes: int
    peak_bytes: int | None = None
    workspace_bytes: int | None = None
    kernels: int | None = None
    copies: int | None = None
    other_nodes: int | None = None

    @property
    def free_bytes(self) -> int:
        """The bytes that nothing holds now.

        Replays use them for intermediates, or they are never used.
        """
        return self.pool_bytes - self.held_bytes

    @property
    def fragmentation(self) -> float | None:
        """The unused share of the pool at its peak.

        It is None without `measure_capture`.
        """
        if self.peak_bytes is None:
            return None
        return 1 - self.peak_bytes / self.pool_bytes if self.pool_bytes else 0.0

    @property
    def launches(self) -> int | None:
        """The launches, copies and fills that one replay replaces.

        It is None without `measure_capture`.
        """
        return None if self.kernels is None or self.copies is None else self.kernels + self.copies

    def __str__(self) -> str:
        rows = [
            ("pool", size(self.pool_bytes)),
            ("  segments", count(self.segments)),
            ("  that a pause releases", size(self.managed_bytes)),
            ("  in use now", size(self.held_bytes)),
            ("  free", size(self.free_bytes)),
            ("in use at once at most", size(self.peak_bytes)),
            ("  fragmentation", part(self.fragmentation)),
            ("workspaces of cuBLAS", size(self.workspace_bytes)),
            ("launches replaced by one", count(self.launches)),
            ("  kernels", count(self.kernels)),
            ("  copies and fills", count(self.copies)),
            ("other nodes", count(self.other_nodes)),
        ]
        return "\n".join(table(rows))


@contextlib.contextmanager
def measure_capture(graph: Any) -> Iterator[None]:
    """Measure a capture for `graph_report`.

    The context stands inside of the capture, around all that is captured::

        with torch_memory_saver.cuda_graph(graph, tag="decode"), measure_capture(graph):
            output = step(static_input)
        print(graph_report(graph))

    PyTorch records its allocations during the capture. A later capture of the same object has to be measured again.

    Args:
        graph: The graph that is being captured.

    Raises:
        InvalidStateError: No capture is under way on the current stream, or PyTorch already records its allocations.
    """
    if not torch.cuda.is_current_stream_capturing():
        raise InvalidStateError(
            "measure_capture() must be used inside of a capture: with torch_memory_saver.cuda_graph(graph), "
            "measure_capture(graph): ...",
            operation="layer_graphs",
        )
    if torch._C._cuda_isHistoryEnabled():
        raise InvalidStateError(
            "PyTorch already records its allocations, and measure_capture() would end that: call "
            "torch.cuda.memory._record_memory_history(None) before the capture",
            operation="layer_graphs",
        )
    torch.cuda.memory._record_memory_history("all", context=None)
    try:
        before = len(_history(torch.cuda.memory._snapshot()))
        yield
        nodes = captured_nodes(torch.cuda.current_stream().cuda_stream)
        snapshot = torch.cuda.memory._snapshot()
        _measured[graph] = _Measured(nodes, _changes(_history(snapshot)[before:]), _in_use(snapshot["segments"]))
    finally:
        torch.cuda.memory._record_memory_history(None)


def graph_report(graph: Any, *, clear_workspaces: bool = False) -> GraphReport:
    """Return the memory that a captured graph takes, and the launches that its replay saves.

    Args:
        graph: A ``torch.cuda.CUDAGraph`` that was captured with ``cuda_graph()``. Use `measure_capture` in the capture if
            the report is to cover more than the pool.
        clear_workspaces: Whether to free all workspaces of cuBLAS that PyTorch keeps, and to report how much of the pool
            they were. The graph can be replayed as before. A later capture in the same pool may use their memory, as it may
            use the memory of intermediates.

    Raises:
        InvalidArgumentError: The graph was not captured.
        CaptureInProgressError: Workspaces cannot be cleared during a capture.
    """
    try:
        pool = graph.pool()
    except RuntimeError as error:
        raise InvalidArgumentError("graph_report() needs a graph that was captured") from error
    segments = layer.require().segments(pool)
    held = _held_bytes(segments)
    workspaces = None
    if clear_workspaces:
        _clear_workspaces()
        segments = layer.require().segments(pool)
        workspaces = held - _held_bytes(segments)
        held -= workspaces
    measured = _measured.get(graph)
    nodes = (None, None, None) if measured is None else measured.nodes
    return GraphReport(
        segments=len(segments),
        pool_bytes=sum(int(segment["total_size"]) for segment in segments),
        managed_bytes=sum(int(segment["total_size"]) for segment in segments if _core.find(segment["address"]) is not None),
        held_bytes=held,
        peak_bytes=None if measured is None else measured.peak_in(segments),
        workspace_bytes=workspaces,
        kernels=nodes[0],
        copies=nodes[1],
        other_nodes=nodes[2],
    )


class NodeCounts(NamedTuple):
    """The numbers of nodes in a graph.

    Attributes:
        kernels: Launches of kernels.
        copies: Copies and fills of memory.
        others: All other nodes, such as functions on the host, events, and graphs in the graph, whose own nodes do not
            count.
    """

    kernels: int
    copies: int
    others: int


def captured_nodes(stream: int) -> NodeCounts:
    """Return the numbers of nodes that the capture under way on a stream has recorded.

    Args:
        stream: The handle of a stream that is being captured.

    Raises:
        InvalidStateError: The stream does not capture, or its capture was invalidated.
        DriverError: A call failed.
    """
    driver = _driver()
    status, graph, number = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_size_t()
    references = ctypes.byref(status), None, ctypes.byref(graph), None, None
    _check("cuStreamGetCaptureInfo", driver.cuStreamGetCaptureInfo_v2(ctypes.c_void_p(stream), *references))
    if status.value != _ACTIVE:
        raise InvalidStateError("no capture is active on this stream, so it has no nodes to count", operation="layer_graphs")
    _check("cuGraphGetNodes", driver.cuGraphGetNodes(graph, None, ctypes.byref(number)))
    if not number.value:
        return NodeCounts(0, 0, 0)
    nodes = (ctypes.c_void_p * number.value)()
    _check("cuGraphGetNodes", driver.cuGraphGetNodes(graph, nodes, ctypes.byref(number)))
    kinds = Counter(_kind(driver, node) for node in nodes)
    copies = kinds[_MEMCPY] + kinds[_MEMSET]
    return NodeCounts(kinds[_KERNEL], copies, len(nodes) - kinds[_KERNEL] - copies)


class _Allocation(NamedTuple):
    """An allocation, with its size, or a free, with the negative size."""

    address: int
    bytes: int


class _Measured(NamedTuple):
    """The measurements of a capture.

    Which allocations lay in the pool is known after the capture, together with the pool.

    Attributes:
        nodes: The nodes of the graph.
        changes: Allocations and frees of the device, in their order.
        at_end: The allocations of the device that were in use after these changes.
    """

    nodes: NodeCounts
    changes: tuple[_Allocation, ...]
    at_end: tuple[_Allocation, ...]

    def peak_in(self, segments: Sequence[dict[str, Any]]) -> int:
        """Return the most bytes that were in use at once in these segments."""
        pool = Ranges((segment["address"], segment["total_size"]) for segment in segments)
        at_end = sum(each.bytes for each in self.at_end if each.address in pool)
        return peak_bytes((each.bytes for each in self.changes if each.address in pool), at_end)


_measured: weakref.WeakKeyDictionary[Any, _Measured] = weakref.WeakKeyDictionary()


def _clear_workspaces() -> None:
    if torch.cuda.is_current_stream_capturing():
        raise CaptureInProgressError("workspaces cannot be cleared during a capture", operation="layer_graphs")
    torch._C._cuda_clearCublasWorkspaces()


def _history(snapshot: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the allocations and frees of the current device that PyTorch has recorded."""
    history: list[dict[str, Any]] = snapshot["device_traces"][torch.cuda.current_device()]
    return history


def _changes(history: Sequence[dict[str, Any]]) -> tuple[_Allocation, ...]:
    signed = ((_SIGNS.get(entry["action"]), entry) for entry in history)
    return tuple(_Allocation(entry["addr"], sign * entry["size"]) for sign, entry in signed if sign is not None)


def _in_use(segments: Sequence[dict[str, Any]]) -> tuple[_Allocation, ...]:
    """Return the blocks that PyTorch cannot hand out, including blocks whose free waits for a stream."""
    found = []
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] != _INACTIVE:
                found.append(_Allocation(address, block["requested_size"]))
            address += block["size"]
    return tuple(found)


def _held_bytes(segments: Sequence[dict[str, Any]]) -> int:
    blocks = (block for segment in segments for block in segment["blocks"])
    return sum(int(block["requested_size"]) for block in blocks if block["state"] == _HELD)


def _kind(driver: Any, node: int | None) -> int:
    kind = ctypes.c_int()
    _check("cuGraphNodeGetType", driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)))
    return kind.value


def _check(call: str, result: int) -> None:
    if result:
        raise DriverError(
            f"{call} failed with CUresult {result}: the nodes of the capture are unknown", operation="layer_graphs"
        )


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL(driver_library())
