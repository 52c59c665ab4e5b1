"""Record PyTorch's allocations with their call stacks, so that a snapshot says what allocated each block.

PyTorch's function ``torch.cuda.memory._record_memory_history`` is private and differs between releases. What a release
accepts is read from the function itself, so a release that this package does not know is called with the arguments that it
still has. Later releases than 2.8 add ``clear_history`` (in 2.11) and ``record_pinned_host_memory`` (in 2.14).
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch_memory_saver._torch.base.steps import InterruptSafeLock
from torch_memory_saver._torch.binding import layer
from torch_memory_saver.errors import InvalidArgumentError, InvalidStateError, TorchUnavailableError

__all__ = [
    "DEFAULT_MAX_ENTRIES",
    "Call",
    "History",
    "Request",
    "call_for",
    "call_to_stop",
    "current_history",
    "is_recording",
    "may_have_native_frames",
    "record_history",
    "stop_history",
]

#: The fewest entries that torch 2.0 keeps. It has no mode without a history.
_MIN_ENTRIES_OF_2_0 = 1


@dataclass(frozen=True)
class Request:
    """The settings of a recording: the arguments of :func:`torch_memory_saver.observe.memory.record_history`."""

    mode: str
    context: str
    stacks: str
    max_entries: int
    record_host: bool
    clear_history: bool


@dataclass(frozen=True)
class Call:
    """A call of ``_record_memory_history``.

    Attributes:
        arguments: Arguments of the call, by name.
        unsupported: Arguments of the request that this release cannot fulfil.
        each_device: Whether the call acts only on the device in its argument ``device``, so that each device needs a call of
            its own.
    """

    arguments: Mapping[str, Any]
    unsupported: tuple[str, ...]
    each_device: bool


def call_for(accepted: Collection[str], request: Request) -> Call:
    """Return the call that starts the recording with a function that accepts these arguments.

    Raises:
        InvalidStateError: The function accepts no limit of entries: without one the history grows for ever.
    """
    if "max_entries" in accepted:
        wanted: dict[str, Any] = {
            "enabled": request.mode,
            "context": request.context,
            "stacks": request.stacks,
            "max_entries": request.max_entries,
        }
    elif "trace_alloc_max_entries" in accepted:
        whole_history = request.mode == "all"
        wanted = {
            "enabled": True,
            "record_context": True,
            "trace_alloc_max_entries": request.max_entries if whole_history else _MIN_ENTRIES_OF_2_0,
            "trace_alloc_record_context": whole_history and request.context != "state",
        }
        if request.stacks == "all":
            wanted["_enable_expensive_cpp"] = True
    else:
        raise InvalidStateError(
            "record_history: this release of PyTorch accepts no limit of entries, only "
            f"{', '.join(accepted)}: use one from 2.0 to 2.15, or call its _record_memory_history yourself",
            operation="record_history",
        )
    if request.record_host:
        wanted["record_pinned_host_memory"] = True
    if request.clear_history:
        wanted["clear_history"] = True
    return Call(
        arguments={name: value for name, value in wanted.items() if name in accepted},
        unsupported=tuple(_REQUESTED_AS.get(name, name) for name in wanted if name not in accepted),
        each_device=_acts_on_one_device(accepted),
    )


#: Names in :func:`record_history` of arguments to which PyTorch gives another name.
_REQUESTED_AS = {"record_pinned_host_memory": "record_host", "_enable_expensive_cpp": "stacks"}


def call_to_stop(accepted: Collection[str]) -> Call:
    """Return the call that ends the recording. It also ends that of pinned host memory (pytorch pull request 182407)."""
    one_device = _acts_on_one_device(accepted)
    return Call({"enabled": False if one_device else None}, (), one_device)


def _acts_on_one_device(accepted: Collection[str]) -> bool:
    return "max_entries" not in accepted


#: Events that the history holds by default, for each device. PyTorch's own default has no bound, and its documentation
#: counts several KB for an event. A training step of a large model makes some thousand of them.
DEFAULT_MAX_ENTRIES = 100_000

_MODES = ("all", "state")
_CONTEXTS = ("all", "alloc", "state")
_STACKS = ("python", "all")


@dataclass(frozen=True)
class History:
    """The recording that :func:`record_history` has enabled.

    Attributes:
        mode: "all" (every allocation and free) or "state" (live blocks only).
        context: For which events a call stack is kept: see :func:`record_history`.
        stacks: "python" or "all" (C++ frames as well).
        max_entries: Events that are kept for each device. The oldest is dropped first.
        host: Whether pinned host memory is recorded.
        devices: The CUDA ordinals that are recorded.
        unsupported: Arguments of :func:`record_history` that this release of PyTorch cannot fulfil, by name.
        arguments: Arguments that were passed to ``torch.cuda.memory._record_memory_history``.
        torch_version: The release of PyTorch.
    """

    mode: str
    context: str
    stacks: str
    max_entries: int
    host: bool
    devices: tuple[int, ...]
    unsupported: tuple[str, ...]
    arguments: Mapping[str, Any] = field(hash=False)
    torch_version: str


class _Recorder:
    """The recording of this process, which has one."""

    def __init__(self) -> None:
        self._lock = InterruptSafeLock()
        self.current: History | None = None
        self.native_frames = False  # whether blocks may have C++ frames that it recorded, also after its end

    def start(self, torch: Any, request: Request) -> History:
        function, accepted = _function_of(torch)
        call = call_for(accepted, request)
        history = History(
            mode=request.mode,
            context=request.context,
            stacks="python" if "stacks" in call.unsupported else request.stacks,
            max_entries=request.max_entries,
            host=request.record_host and "record_host" not in call.unsupported,
            devices=tuple(range(torch.cuda.device_count())),
            unsupported=call.unsupported,
            arguments=dict(call.arguments),
            torch_version=str(torch.__version__),
        )
        self._lock.call(self._make, function, call, history.devices, history)
        return history

    def stop(self, torch: Any) -> None:
        function, accepted = _function_of(torch)
        self._lock.call(self._make, function, call_to_stop(accepted), tuple(range(torch.cuda.device_count())), None)

    def _make(self, function: Any, call: Call, devices: tuple[int, ...], history: History | None) -> None:
        """Make a call of PyTorch, and record what it has enabled."""
        _make(function, call, devices)
        self.current = history
        self.native_frames |= history is not None and history.stacks != "python"

    def after_fork_in_child(self) -> None:
        # A child cannot use its parent's CUDA, so nothing of the parent's is recorded in it.
        self._lock = InterruptSafeLock()
        self.current = None
        self.native_frames = False


_recorder = _Recorder()
os.register_at_fork(after_in_child=_recorder.after_fork_in_child)


def record_history(
    max_entries: int = DEFAULT_MAX_ENTRIES,
    *,
    mode: str = "all",
    context: str = "alloc",
    stacks: str = "python",
    record_host: bool = True,
    clear_history: bool = False,
) -> History:
    """Make PyTorch record what allocates memory on every visible device, from now on and in this process only.

    Blocks that were allocated before have no call stack in a snapshot. Initialises CUDA if necessary. A second call changes
    what is recorded. ``TMS_DEBUG=history`` calls this at the first use of the package.

    Args:
        max_entries: Events that are kept for each device. The oldest is dropped first.
        mode: "all" keeps every allocation and free, up to `max_entries`. "state" keeps live blocks only.
        context: "alloc" keeps the call stacks of allocations, "all" those of frees as well, "state" those of live blocks
            only.
        stacks: "python", or "all" for C++ frames as well. The first snapshot then takes seconds or minutes, in which PyTorch
            finds the names of the C++ functions.
        record_host: Whether to record pinned host memory as well, where this release of PyTorch can (2.14 can, 2.11 cannot).
        clear_history: Whether to drop the events that were recorded before.

    Returns:
        The recording that was enabled. `unsupported` names what this release of PyTorch cannot do; the rest is recorded.

    Raises:
        InvalidArgumentError: An argument has an unknown value.
        TorchUnavailableError: PyTorch cannot be imported, finds no CUDA device, or cannot record.
        ForkedProcessError: This process was forked from one that used CUDA.
        InvalidStateError: PyTorch's allocator in use cannot record, or its release accepts no limit of entries.
    """
    if not isinstance(max_entries, int) or isinstance(max_entries, bool) or max_entries < 1:
        raise InvalidArgumentError(f"max_entries must be a whole number of at least 1, not {max_entries!r}")
    for name, value, allowed in (("mode", mode, _MODES), ("context", context, _CONTEXTS), ("stacks", stacks, _STACKS)):
        if value not in allowed:
            raise InvalidArgumentError(f"{name} must be one of {', '.join(allowed)}, not {value!r}")
    request = Request(mode, context, stacks, max_entries, bool(record_host), bool(clear_history))
    return _recorder.start(layer.require_module(), request)


def stop_history() -> None:
    """End the recording. Do nothing where this process does not use CUDA.

    Raises:
        TorchUnavailableError: This PyTorch cannot record.
        InvalidStateError: PyTorch failed.
    """
    torch = layer.imported()
    if torch is not None and torch.cuda.is_initialized():
        _recorder.stop(torch)


def current_history() -> History | None:
    """Return the recording that :func:`record_history` enabled last; None before any, and after :func:`stop_history`."""
    return _recorder.current


def is_recording(torch: Any) -> bool:
    """Return whether PyTorch, whose CUDA is initialised, records now, for this package or for another caller."""
    enabled = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    return current_history() is not None if enabled is None else bool(enabled())


def may_have_native_frames(torch: Any) -> bool:
    """Return whether a snapshot may make PyTorch look up the names of C++ functions. That takes seconds, and most releases
    start the program addr2line for it. True during each recording of another caller, because PyTorch does not report whether
    it records C++ frames. The frames that such a recording has left in blocks are not known after its end."""
    return _recorder.native_frames or (is_recording(torch) and current_history() is None)


def _function_of(torch: Any) -> tuple[Any, tuple[str, ...]]:
    """Return torch's function, and the names of the arguments that it accepts."""
    function = getattr(torch.cuda.memory, "_record_memory_history", None)
    if function is None:
        raise TorchUnavailableError(
            f"PyTorch {torch.__version__} cannot record its memory history: use 2.0 or newer", operation="record_history"
        )
    return function, tuple(inspect.signature(function).parameters)


def _make(function: Any, call: Call, devices: tuple[int, ...]) -> None:
    try:
        if call.each_device:
            for device in devices:
                function(**call.arguments, device=device)
        else:
            function(**call.arguments)
    except (RuntimeError, TypeError, ValueError) as error:
        raise InvalidStateError(
            f"record_history: PyTorch's _record_memory_history({', '.join(call.arguments)}) failed: {error}",
            operation="record_history",
        ) from error
