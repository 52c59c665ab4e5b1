"""The table of everything that this package replaces in other packages, and the one function that replaces it.

:data:`PATCHES` has a row for everything that the saver can replace. Folders that are added to the saver have rows of their
own. :func:`replace` refuses a name without a row. The page docs/reference/patches.md shows all rows. The operators of the
simulated GPU have none, because only ``simulate`` installs them.

Any thread may call. There is no lock: the record of what is replaced changes by single operations of a dict.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["PATCHES", "Patch", "all_patches", "is_replaced", "note_operator", "patches_in_force", "replace", "restore"]


@dataclass(frozen=True)
class Patch:
    """A function, method or entry of a table of another package that this package has replaced in this process.

    Attributes:
        name: Dotted path of what is replaced. An operator of PyTorch has two colons in its name.
        when: Event at which it is replaced.
        reason: Effect of the replacement, and why it is needed.
        until: First release of the other package that is left unchanged, because it does not need the replacement. None if
            no such release is known: then every release gets the replacement, also releases that are newer than this
            package.
    """

    name: str
    when: str
    reason: str
    until: str | None = None


_FIRST_USE = "first use of the package with PyTorch's CUDA"
_SHARING = "first use of the package in a process that has imported PyTorch"
_BEGIN = (
    "A pause must not unmap memory while a stream is captured, because that would break the capture. The begin of a capture "
    "is reported to the native core. It waits for a pause or resume of another thread"
)
_END = "The end of a capture is reported to the native core, see `capture_begin`"
_EMPTY = (
    "It also releases managed memory without a tensor. PyTorch releases nothing of a pool whose object lives, and programs "
    "size what they allocate by the free memory"
)
_CACHING = (
    "The package has to know whether PyTorch's caching is on, because PyTorch uses no pool without it. PyTorch has no "
    "function that returns it"
)

#: Every replacement that the saver can make.
PATCHES = (
    Patch(
        "concurrent.futures.ThreadPoolExecutor.submit",
        "first region of the process",
        "A call that is submitted inside a region belongs to it until it returns, because libraries load on thread pools of "
        "their own",
    ),
    Patch("torch._C._CUDAGraph.capture_begin", _FIRST_USE, _BEGIN),
    Patch("torch._C._CUDAGraph.capture_end", f"{_FIRST_USE}, in hook mode torch", _END),
    Patch("torch._C._CUDAGraph.capture_end_pre", f"{_FIRST_USE}, in hook mode torch, where PyTorch has it", _END),
    Patch(
        "torch._C._cuda_beginAllocateCurrentThreadToPool",
        _FIRST_USE,
        "PyTorch hands out free blocks of a pool although its memory is paused, so a routing to such a pool is refused",
    ),
    Patch(
        "torch.cuda.memory._cuda_beginAllocateCurrentThreadToPool",
        _FIRST_USE,
        "As above, for `use_mem_pool`. In hook mode preload it also keeps the program's MemPool ordinary inside a region",
    ),
    Patch(
        "torch.cuda.memory._cuda_endAllocateToPool",
        f"{_FIRST_USE}, in hook mode preload",
        "The end of `use_mem_pool` puts the settings of the region back in force",
    ),
    Patch("torch.cuda.memory.caching_allocator_enable", _FIRST_USE, _CACHING),
    Patch("torch.cuda.caching_allocator_enable", _FIRST_USE, _CACHING),
    Patch("torch.cuda.memory.empty_cache", _FIRST_USE, _EMPTY),
    Patch("torch.cuda.empty_cache", _FIRST_USE, _EMPTY),
    Patch("torch.accelerator.memory.empty_cache", _FIRST_USE, _EMPTY),
    Patch("torch.accelerator.empty_cache", _FIRST_USE, _EMPTY),
    Patch(
        "torch.cuda.MemPool.__init__",
        f"{_FIRST_USE}, in hook mode torch, if a visible device is not in use",
        "PyTorch ends the process when a MemPool is destroyed while another pool is routed on its device. Devices that are "
        "not in use have such a routing, which the program's first MemPool ends",
        "2.13",
    ),
    Patch(
        "torch.cuda.MemPool.__del__",
        "first pause of memory of PyTorch's default pool (`TMS_INIT_ENABLE`)",
        "PyTorch ends the process when a MemPool is destroyed while another pool is routed on its device. While memory of "
        "the default pool is paused, another pool is routed in its place, and MemPools that the program drops are kept",
        "2.13",
    ),
    Patch(
        "torch._C._distributed_c10d._SymmetricMemory.empty_strided_p2p",
        f"{_FIRST_USE}, if PyTorch has `torch.distributed`",
        "PyTorch allocates symmetric memory from the driver, so no region manages it. A call inside a region is warned of",
    ),
    Patch(
        "torch.UntypedStorage._share_cuda_",
        _SHARING,
        "CUDA has no IPC handles for managed memory, so managed tensors are described to other processes in another way",
    ),
    Patch(
        "torch.cuda.ipc_collect",
        _SHARING,
        "It also releases the managed storages that were sent to other processes and that these have dropped",
    ),
    Patch(
        "multiprocessing.reduction.ForkingPickler._extra_reducers",
        _SHARING,
        "A `multiprocessing.Queue` only prints the error of a tensor that cannot be sent, and its receiver would wait for "
        "ever. The receiver gets the error in place of the message. Only the entries of PyTorch's tensors are replaced",
    ),
    Patch(
        "aten::_cudnn_init_dropout_state",
        _FIRST_USE,
        "PyTorch keeps the state of cuDNN's dropout for all networks. It is allocated outside regions, because a pause of "
        "the region in which a network was used first would unmap it for all",
    ),
    Patch(
        "torch.cuda._lazy_init",
        "import of torch in a program that `run` or `simulate` has started, until PyTorch initialises CUDA",
        "What `TMS_DEBUG` and similar variables request is started when CUDA is initialised, also in a program that never "
        "imports the package",
    ),
)
_ROWS = {patch.name: patch for patch in PATCHES}


def all_patches() -> tuple[Patch, ...]:
    """Return every replacement that this package can make."""
    from torch_memory_saver._additions import added  # not above, because a process may have this file alone

    return (*PATCHES, *(patch for patches in added("patches").values() for patch in patches()))


def _row(name: str) -> Patch:
    return _ROWS.get(name) or {patch.name: patch for patch in all_patches()}[name]


#: The value of an attribute that an object does not have itself.
_ABSENT = object()


@dataclass(frozen=True)
class _Replaced:
    """One place that was replaced. Its owner is kept, so that its identity is not used again."""

    patch: Patch
    owner: Any
    key: Any
    original: Any
    value: Any


_places: dict[tuple[int, Any], _Replaced] = {}
_operators: dict[str, Any] = {}


def replace(name: str, owner: Any, key: Any, value: Any) -> None:
    """Replace an attribute of a module or class, or an entry of a dict, and record it.

    Args:
        name: Name of the row.
        owner: The module, class or dict.
        key: Name of the attribute, or key of the entry.
        value: The object that replaces it.
    """
    outer = _places[id(owner), key] if is_replaced(owner, key) else None
    original = _value(owner, key) if outer is None else outer.original
    place = _Replaced(_row(name), owner, key, original, value)
    _places[id(owner), key] = place  # before the change, which a signal handler may keep from being recorded
    _set(owner, key, value)


def restore(owner: Any, key: Any) -> None:
    """Undo :func:`replace`, unless something else has been put in its place."""
    place = _places.get((id(owner), key))
    if place is not None and _value(owner, key) is place.value:
        _set(owner, key, place.original)
        _places.pop((id(owner), key), None)


def is_replaced(owner: Any, key: Any) -> bool:
    """Return whether :func:`replace` has replaced this, and its original has not been put back."""
    place = _places.get((id(owner), key))
    return place is not None and _value(owner, key) is not place.original


def note_operator(name: str, library: Any) -> None:
    """Record that the implementation of an operator of PyTorch is replaced as long as `library` lives, and keep it alive."""
    _operators[_ROWS[name].name] = library


def patches_in_force() -> tuple[Patch, ...]:
    """Return the rows that are in force in this process, in their order."""
    names = {place.patch.name for place in list(_places.values()) if is_replaced(place.owner, place.key)}
    names.update(_operators)
    return tuple(patch for patch in all_patches() if patch.name in names)


def _value(owner: Any, key: Any) -> Any:
    return (owner if isinstance(owner, dict) else vars(owner)).get(key, _ABSENT)


def _set(owner: Any, key: Any, value: Any) -> None:
    if isinstance(owner, dict):
        owner[key] = value
    elif value is _ABSENT:
        delattr(owner, key)
    else:
        setattr(owner, key, value)
