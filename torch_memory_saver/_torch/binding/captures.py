"""Report the captures of torch.cuda.graph and similar functions to the native core.

In preload mode the interposed runtime calls report them. In torch mode PyTorch calls the runtime directly. So the functions
by which PyTorch's Python code begins and ends a capture are wrapped, once, at the first use of this package:
``torch.cuda.graph``, ``make_graphed_callables``, ``torch.compile``'s CUDA graphs and ``CUDAGraph.capture_begin`` all call
them. They belong to the native base class of ``torch.cuda.CUDAGraph``, so signatures and documentation of the public classes
stay unchanged, and subclasses are covered. PyTorch's behaviour changes only in one respect: the begin of a capture waits for
a pause or resume of another thread, and fails inside one of its own thread.

A capture is visible from before its begin until its end has succeeded, or its stream reports no active capture: deleting or
resetting a graph does not end its capture.

In both modes the begin also takes :data:`capture_gate`, until the capture is visible. A capture of ``cuda_graph()`` is
announced there as well (:class:`CaptureAnnouncement`), and not earlier: before it calls ``capture_begin``,
``torch.cuda.graph`` synchronizes, collects garbage and empties caches, which may take long and is no capture.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, MutableMapping
from typing import Any

from torch_memory_saver import _core
from torch_memory_saver._patches import is_replaced, replace
from torch_memory_saver._torch.base.region_settings import AnnouncedCapture, has_announced_capture
from torch_memory_saver._torch.base.steps import SingleUseScope
from torch_memory_saver.errors import ForkedProcessError

__all__ = [
    "CaptureAnnouncement",
    "CaptureGate",
    "announce_capture",
    "before_capture",
    "capture_gate",
    "pool_checks",
    "watch_captures",
]

#: Native functions that end a capture. Recent releases of PyTorch do it in two steps, of which the first ends the capture.
_ENDS = ("capture_end", "capture_end_pre")

#: Functions that are called with the device before each capture begins, while the capture's stream is the current one. They
#: must not raise. The capture begins inside the context managers that they return.
before_capture: list[Callable[[int], contextlib.AbstractContextManager[Any] | None]] = []
#: Functions that are called with the pool that a capture names, before the capture begins and once no pause can begin. A
#: capture that one of them refuses by an exception does not begin.
pool_checks: list[Callable[[Any], object]] = []


def _begin_inside(begin: Callable[[], object], device: int) -> Callable[[], object]:
    """Return `begin` inside the context managers of :data:`before_capture`, whose functions are called now."""
    for context in [prepare(device) for prepare in before_capture]:
        if context is not None:
            begin = functools.partial(_core.within, context, begin)
    return begin


class CaptureGate:
    """A gate that each capture begun by PyTorch's Python code holds until the capture is visible. A thread that holds the
    gate can ask once whether a capture is visible, and then make calls that would break one.

    The gate is taken before a pause or resume begins, never inside one, because the begin of a capture waits inside the gate
    for pauses and resumes.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def held(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager inside which no other thread begins a capture. It may be entered again on its thread."""
        return self._lock

    def after_fork_in_child(self) -> None:
        """Replace the lock, which another thread of the parent may have held."""
        self._lock = threading.RLock()


#: The gate of this process.
capture_gate = CaptureGate()


class _Thread(threading.local):
    #: Called when this thread begins its next capture.
    announce: Callable[[], object] | None = None


_thread = _Thread()


class CaptureAnnouncement(SingleUseScope):
    """A context manager inside which the first capture that this thread begins calls `announce` before it begins. If that
    raises, the capture does not begin."""

    def __init__(self, announce: Callable[[], object]) -> None:
        self._announce = announce
        self._outer = _thread.announce

    def _begin(self) -> None:
        _thread.announce = self._announce

    def _end(self) -> None:
        _thread.announce = self._outer


def announce_capture() -> None:
    """Announce the capture that this thread is about to begin, if :class:`CaptureAnnouncement` asks for it."""
    announce, _thread.announce = _thread.announce, None
    if announce is not None:
        announce()


class _Begin(SingleUseScope):
    """The begin of a capture that is reported to the native core. If it fails, or a signal handler raises, the report is
    withdrawn, unless the capture goes on. `note` is called with the core's number of a capture that goes on, or with 0 if
    the core has no room for it.

    Attributes:
        result: The result of `begin`.
    """

    def __init__(self, begin: Callable[[], object], find_stream: Callable[[], int], note: Callable[[int], object]) -> None:
        self._begin_capture = begin
        self._find_stream = find_stream
        self._note = note
        self._identities: list[int] = []
        self._is_complete = False
        self.result: object = None

    def _report(self) -> None:
        announce_capture()
        _core.record_each(self._identities, _core.capture_begin_on, [(self._find_stream(),)])

    def _begin(self) -> None:
        _core.within(capture_gate.held(), self._report)
        self.result = self._begin_capture()
        for identity in self._identities:
            _core.capture_begun(identity)
            self._note(identity)
        self._is_complete = True

    def _end(self) -> None:
        if not self._is_complete:
            for identity in filter(None, self._identities):  # 0 would end the last one that was announced
                if not _core.capture_end(identity, unless_it_goes_on=True):
                    self._note(identity)


class _End(SingleUseScope):
    """The end of a graph's capture. It is reported to the native core, unless it fails and the capture goes on.
    `under_way` maps each graph to the core's number of its capture."""

    def __init__(self, end: Callable[[], object], under_way: MutableMapping[Any, int], graph: Any) -> None:
        self._end_capture = end
        self._under_way = under_way
        self._graph = graph
        self._may_go_on = True

    def end(self) -> object:
        result = self._end_capture()
        self._may_go_on = False
        return result

    def _end(self) -> None:
        identity = self._under_way.get(self._graph, 0)
        if identity and (_core.capture_end(identity, unless_it_goes_on=self._may_go_on) or not self._may_go_on):
            self._under_way.pop(self._graph, None)


def watch_captures(torch: Any) -> None:
    """Report the captures that PyTorch begins to the native core from now on. Captures that the preload library intercepts
    only pass the gate. Does nothing when called again, or if PyTorch has no CUDA graphs."""
    graph_class: Any = getattr(torch._C, "_CUDAGraph", None)
    begin = getattr(graph_class, "capture_begin", None)
    if begin is None or not hasattr(graph_class, _ENDS[0]) or is_replaced(graph_class, "capture_begin"):
        return
    if _core.preloaded:
        _pass_gate(graph_class, torch._C._cuda_getDevice)
        return
    device_of, stream_of = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream
    under_way: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    @functools.wraps(begin)
    def capture_begin(graph: Any, *arguments: Any, **keywords: Any) -> Any:
        begin_this = _begin_inside(functools.partial(begin, graph, *arguments, **keywords), device_of())
        begin_this = _checking(begin_this, *arguments, **keywords)
        begun = _Begin(begin_this, lambda: stream_of(device_of()), lambda identity: under_way.__setitem__(graph, identity))
        try:
            begun.__enter__()
        except ForkedProcessError:
            return begin_this()  # PyTorch raises the error.
        return begun.result

    def ending(end: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(end)
        def capture_end(graph: Any, *arguments: Any, **keywords: Any) -> Any:
            ended = _End(functools.partial(end, graph, *arguments, **keywords), under_way, graph)
            return _core.within(ended, ended.end)

        return capture_end

    for name in _ENDS:
        if hasattr(graph_class, name):
            _replace(graph_class, name, ending(getattr(graph_class, name)))
    _replace(graph_class, "capture_begin", capture_begin)  # last, because a repetition stops if it has been replaced


def _checking(begin: Callable[[], object], pool: Any = None, *_: Any, **__: Any) -> Callable[[], object]:
    """Return `begin` after the checks of the pool, which is the first argument of ``CUDAGraph.capture_begin``."""
    if pool is None:
        return begin

    def check_and_begin() -> object:
        for check in pool_checks:
            check(pool)
        return begin()

    return check_and_begin


def _pass_gate(graph_class: Any, device_of: Callable[[], int]) -> None:
    """Wrap the begin of a capture in preload mode, where the interposed function of the runtime reports it. A capture that
    names a pool is visible earlier, from before the check of the pool. One of cuda_graph() is visible already."""
    begin = graph_class.capture_begin

    @functools.wraps(begin)
    def capture_begin(graph: Any, *arguments: Any, **keywords: Any) -> Any:
        begin_this = _begin_inside(functools.partial(begin, graph, *arguments, **keywords), device_of())
        check_and_begin = _checking(begin_this, *arguments, **keywords)

        def announce_and_begin() -> Any:
            announce_capture()
            if check_and_begin is begin_this or has_announced_capture():
                return check_and_begin()
            try:
                return _core.within(AnnouncedCapture(None), check_and_begin)
            except ForkedProcessError:
                return begin_this()  # PyTorch raises the error.

        return _core.within(capture_gate.held(), announce_and_begin)

    _replace(graph_class, "capture_begin", capture_begin)


def _replace(graph_class: Any, name: str, wrapper: Callable[..., Any]) -> None:
    replace(f"torch._C._CUDAGraph.{name}", graph_class, name, wrapper)
