"""What a capture has recorded so far: the kinds of the graph's nodes, for `graph_report`.

PyTorch destroys the graph itself after the capture, and before 2.8 cannot be asked to keep it. So the nodes are counted
before the capture ends, with calls of the CUDA driver that are allowed in it.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections import Counter
from typing import Any, NamedTuple

from torch_memory_saver.errors import DriverError, InvalidStateError

__all__ = ["NodeCounts", "captured_nodes"]

#: Of CUstreamCaptureStatus.
_ACTIVE = 1
#: Of CUgraphNodeType.
_KERNEL, _MEMCPY, _MEMSET = 0, 1, 2


class NodeCounts(NamedTuple):
    """The nodes of a graph.

    Attributes:
        kernels: Launches of kernels.
        copies: Copies and fills of memory.
        others: Everything else, such as functions on the host, events, and graphs in the graph, whose nodes do not count.
    """

    kernels: int
    copies: int
    others: int


def captured_nodes(stream: int) -> NodeCounts:
    """The nodes that the capture under way on a stream has recorded.

    Args:
        stream: The handle of a stream in the capture.

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
    return ctypes.CDLL(os.environ.get("TMS_CUDA_DRIVER") or "libcuda.so.1")
