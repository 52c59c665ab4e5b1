"""Reports the captures of torch.cuda.graph and similar functions to the native core.

In preload mode the interposed runtime calls do that. In torch mode nothing stands between PyTorch and the runtime, so the
two functions of PyTorch through which its Python code begins and ends a capture are wrapped, once, when the package is first
used: ``torch.cuda.graph``, ``make_graphed_callables``, ``torch.compile``'s CUDA graphs and ``CUDAGraph.capture_begin`` all
call them. They belong to the native base class of ``torch.cuda.CUDAGraph``, so that signatures and documentation of the
classes that users see stay as they are, and subclasses are seen as well. What PyTorch does is not changed, except that the
begin of a capture waits for a pause or resume of another thread, and is an error inside one of its own thread.

A capture is known from before its begin until its end has succeeded, or its stream says that it captures no more: a graph
that is deleted or reset meanwhile does not end its capture.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

from torch_memory_saver import _core
from torch_memory_saver.errors import ForkedProcessError

__all__ = ["watch_captures"]

#: What the wrappers are known by.
_WRAPPER = "_torch_memory_saver_wrapper"


def watch_captures(torch: Any) -> None:
    """Makes captures that PyTorch begins known to the native core from now on. Does nothing the second time, where the
    preload library sees them, or where PyTorch has no CUDA graphs."""
    graph_class: Any = getattr(torch._C, "_CUDAGraph", None)
    begin = getattr(graph_class, "capture_begin", None)
    end = getattr(graph_class, "capture_end", None)
    if _core.preloaded or begin is None or end is None or hasattr(begin, _WRAPPER):
        return
    device_of, stream_of = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream
    under_way: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    @functools.wraps(begin)
    def capture_begin(graph: Any, *arguments: Any, **keywords: Any) -> Any:
        try:
            identity = _core.capture_begin_on(stream_of(device_of()))
        except ForkedProcessError:
            return begin(graph, *arguments, **keywords)  # PyTorch raises the error.
        try:
            result = begin(graph, *arguments, **keywords)
            _core.capture_begun(identity)
        except BaseException:
            _core.capture_end(identity, unless_it_goes_on=True)
            raise
        under_way[graph] = identity
        return result

    @functools.wraps(end)
    def capture_end(graph: Any, *arguments: Any, **keywords: Any) -> Any:
        goes_on = True
        try:
            result = end(graph, *arguments, **keywords)
            goes_on = False
            return result
        finally:
            identity = under_way.get(graph, 0)
            if identity and (_core.capture_end(identity, unless_it_goes_on=goes_on) or not goes_on):
                under_way.pop(graph, None)

    setattr(capture_begin, _WRAPPER, True)
    graph_class.capture_begin = capture_begin
    graph_class.capture_end = capture_end
