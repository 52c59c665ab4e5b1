"""Information about the program's tensors: their storages, the managed memory that contains them, their names, and their
contents on the host while they are paused (:func:`get_cpu_backup`).

A tensor without a storage of its own, such as a sparse tensor or a subclass made of other tensors, has the storages of its
parts. :func:`find_tensors` finds the tensors of the process and their names in modules, so that memory can be shown by
name: Python's garbage collector lists all modules, and all tensors that have a Python object. Objects that ``gc.freeze()``
has put aside are not listed, so the caller may pass modules. A path begins with the class of the outermost module.

This module owns no state and keeps no tensor alive. Its functions may be called on any thread, and other threads may make
and drop tensors at the same time.
"""

from __future__ import annotations

import bisect
import ctypes
import gc
import importlib
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from itertools import islice, repeat
from typing import Any, NamedTuple

from torch_memory_saver import _core
from torch_memory_saver._engine.calls.pending import on_main_thread
from torch_memory_saver._torch.binding import layer
from torch_memory_saver.errors import InvalidArgumentError, NotManagedError, TorchUnavailableError

__all__ = [
    "FoundTensor",
    "FoundTensors",
    "add_extents",
    "extent_of",
    "find_tensors",
    "get_cpu_backup",
    "is_paused",
    "parts_of",
    "segments_in",
    "storages_of",
    "tag_of",
]

#: Whether the tensors in a resident allocation with a backup are those that the backup was made of.
_HoldsOld = Callable[[_core.Segment], bool]

#: Fewer than the 700 new objects that start a garbage collection.
_STORAGES_AT_ONCE = 256


def parts_of(torch: Any, x: Any) -> list[Any] | None:
    """Return the tensors that a tensor of a subclass is made of; None for an ordinary one. Since 2.14, a subclass may name
    parts that are not tensors, such as the mesh of a DTensor."""
    if type(x) is torch.Tensor or not hasattr(x, "__tensor_flatten__"):
        return None
    parts = [getattr(x, name) for name in x.__tensor_flatten__()[0]]
    return [part for part in parts if isinstance(part, torch.Tensor)]


def storages_of(torch: Any, tensors: Sequence[Any]) -> Iterator[Any]:
    """Return the storages that the tensors have: an ordinary tensor has one, others those of their parts.

    A pause calls this for thousands of tensors. So there is no loop in Python over ordinary ones.

    Raises:
        InvalidArgumentError: A tensor of a layout whose parts are not known.
    """
    ordinary = {torch.Tensor, torch.nn.Parameter}
    if not ordinary.issuperset(map(type, tensors)) or set(map(torch.Tensor.layout.__get__, tensors)) - {torch.strided}:
        tensors = list(_with_storages(torch, tensors, ordinary))
    return map(torch.Tensor.untyped_storage, tensors)


def add_extents(torch: Any, storages: Iterable[Any], sizes: dict[int, int]) -> None:
    """Add where storages lie: address -> bytes. Empty storages are skipped. Storages on the CPU may be among them: no
    device memory has their addresses.

    The iterable is consumed in small portions, so that few storages live at once: many new objects would start Python's
    garbage collector.
    """
    remaining = iter(storages)
    addresses: list[int] = []
    lengths: list[int] = []
    while portion := list(islice(remaining, _STORAGES_AT_ONCE)):
        addresses.extend(map(torch.UntypedStorage.data_ptr, portion))
        lengths.extend(map(torch.UntypedStorage.nbytes, portion))
    added = dict(zip(addresses, lengths, strict=True))
    if sizes or len(added) < len(addresses):  # the largest of those with the same address
        larger = map(max, lengths, map(sizes.get, addresses, repeat(0)))
        sizes.update(zip(addresses, larger, strict=True))
    else:
        sizes.update(added)
    if 0 in sizes.values():
        for address in [address for address, length in sizes.items() if not length]:
            del sizes[address]


def _with_storages(torch: Any, tensors: Iterable[Any], ordinary: Container[type]) -> Iterator[Any]:
    """Return the tensors with a storage of their own that these are, or are made of."""
    for x in tensors:
        parts = None if type(x) in ordinary else parts_of(torch, x)
        if parts is not None:
            yield from _with_storages(torch, parts, ordinary)
        elif x.layout is torch.strided:
            yield x
        elif x.is_cuda:
            yield from _sparse_parts(torch, x)


def _sparse_parts(torch: Any, x: Any) -> tuple[Any, ...]:
    if x.layout is torch.sparse_coo:
        return x._indices(), x._values()
    if x.layout in (torch.sparse_csr, torch.sparse_bsr):
        return x.crow_indices(), x.col_indices(), x.values()
    if x.layout in (torch.sparse_csc, torch.sparse_bsc):
        return x.ccol_indices(), x.row_indices(), x.values()
    raise InvalidArgumentError(f"a tensor of layout {x.layout} has no known storages: pass the tensors that it is made of")


def is_paused(x: Any) -> bool:
    """See :meth:`TorchMemorySaver.is_paused`. Neither imports torch nor loads a driver."""
    return any(row.state != _core.STATE_ACTIVE for row in _rows_of("is_paused", x))


def tag_of(x: Any) -> str | None:
    """See :meth:`TorchMemorySaver.tag_of`. Neither imports torch nor loads a driver."""
    return next((row.tag for row in _rows_of("tag_of", x)), None)


def _rows_of(function: str, x: Any) -> Iterator[_core.Segment]:
    """Yield the managed allocations that a tensor's storage lies in: one, or several in an expandable segment, of whose
    pieces each may have a tag and a state of its own. A tensor made of other tensors lies in those of its parts."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not isinstance(x, torch.Tensor):
        raise InvalidArgumentError(f"{function}() needs a torch.Tensor, not {type(x).__name__}")
    parts = parts_of(torch, x)
    if parts is not None:
        for part in parts:
            yield from _rows_of(function, part)
    elif x.is_cuda:
        try:
            storage = x.untyped_storage()
            address = int(storage.data_ptr())
        except (RuntimeError, NotImplementedError) as error:
            raise InvalidArgumentError(
                f"{function}() needs a tensor with a storage of its own; this one, of layout {x.layout}, has none: ask for "
                f"the tensors that it is made of ({str(error).splitlines()[0]})"
            ) from error
        yield from segments_in(address, max(storage.nbytes(), 1))


def segments_in(address: int, size: int) -> Iterator[_core.Segment]:
    """Yield the managed allocations that have any of the bytes, by address: several in an expandable segment."""
    end = address + size
    while address < end and (row := _core.find(address, end - address)) is not None:
        yield row
        address = row.address + row.reserved_bytes


class FoundTensor(NamedTuple):
    """A tensor: the address of its first byte, the number of bytes up to and including its last one, and its names in
    modules."""

    address: int
    bytes: int
    dtype: Any
    shape: tuple[int, ...]
    names: tuple[str, ...]
    is_dense: bool  # every byte from the first to the last is an element's


class FoundTensors:
    """Tensors by address."""

    def __init__(self, tensors: Iterable[FoundTensor] = (), hidden_objects: int = 0) -> None:
        self._tensors = sorted(tensors, key=lambda tensor: tensor.address)
        self._addresses = [tensor.address for tensor in self._tensors]
        #: The number of objects that were not searched.
        self.hidden_objects = hidden_objects

    def inside(self, address: int, size: int) -> list[FoundTensor]:
        """Return the tensors that begin in a range."""
        return self._tensors[
            bisect.bisect_left(self._addresses, address) : bisect.bisect_left(self._addresses, address + size)
        ]


def find_tensors(torch: Any, modules: Iterable[Any]) -> FoundTensors:
    """Return the tensors of the process. `modules` are searched as well."""
    if torch is None:
        return FoundTensors()
    kinds = (torch.Tensor, torch.nn.Module)
    objects = [each for each in gc.get_objects() if issubclass(type(each), kinds)]
    known = {id(each): each for each in objects if issubclass(type(each), torch.nn.Module)}
    known.update((id(module), module) for each in modules for module in each.modules())
    names: dict[int, list[str]] = {}
    tensors = {id(each): each for each in objects if issubclass(type(each), torch.Tensor)}
    for name, tensor in _named(known.values()):
        for part in _flat(torch, tensor):
            names.setdefault(id(part), []).append(name)
            tensors[id(part)] = part
    found = (_describe(torch, tensor, names.get(key, ())) for key, tensor in tensors.items())
    return FoundTensors((each for each in found if each is not None), gc.get_freeze_count())


def _named(modules: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Return the parameters and buffers that the modules hold themselves, with their paths."""
    modules = [*modules]
    parents: dict[int, tuple[Any, str]] = {}
    for module in modules:
        for name, child in _own(module, "_modules"):
            parents.setdefault(id(child), (module, name))
    for module in modules:
        path = _path(module, parents)
        for kind in ("_parameters", "_buffers"):
            for name, tensor in _own(module, kind):
                yield f"{path}.{name}", tensor


def _own(module: Any, kind: str) -> list[tuple[str, Any]]:
    """Return what a module holds; nothing for one that keeps it elsewhere, such as a scripted one."""
    held = vars(module).get(kind)
    return [(str(name), each) for name, each in list(held.items()) if each is not None] if isinstance(held, dict) else []


def _path(module: Any, parents: dict[int, tuple[Any, str]]) -> str:
    names: list[str] = []
    seen = set()
    while id(module) in parents and id(module) not in seen:  # modules may hold each other
        seen.add(id(module))
        module, name = parents[id(module)]
        names.append(name)
    return ".".join([type(module).__name__, *reversed(names)])


def _flat(torch: Any, tensor: Any) -> list[Any]:
    """Return the tensors that have the storages: itself, or what it is made of."""
    try:
        parts = parts_of(torch, tensor)
    except Exception:  # of a subclass whose methods expect a state that it is not in
        return []
    return [tensor] if parts is None else [part for each in parts for part in _flat(torch, each)]


def extent_of(tensor: Any) -> tuple[int, int] | None:
    """Return the address of its first byte and the bytes to its last one; None if it has no memory on a GPU."""
    try:
        storage = tensor.untyped_storage()
        if storage.device.type != "cuda" or not tensor.numel():
            return None
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return int(tensor.data_ptr()), (last + 1) * int(tensor.element_size())
    except Exception:  # one without a storage: sparse, of a subclass, or torch.compile's own
        return None


def _describe(torch: Any, tensor: Any, names: Iterable[str]) -> FoundTensor | None:
    extent = extent_of(tensor)
    if extent is None:
        return None
    shape = tuple(int(size) for size in tensor.shape)
    is_dense = extent[1] == int(tensor.numel()) * int(tensor.element_size())
    return FoundTensor(*extent, tensor.dtype, shape, tuple(sorted(names)), is_dense)


def get_cpu_backup(x: Any, zero_copy: bool, holds_old: _HoldsOld) -> Any:
    """See :meth:`TorchMemorySaver.get_cpu_backup`.

    While memory is paused, nothing is allocated there, so its backup is the tensor's. `holds_old` returns whether a backup
    that was kept after the resume is the tensor's too. It is called before the search for the backup, so a pause in between
    has saved the tensor.
    """
    # torch.compile does not trace this function: it breaks the graph at the import, and cannot resume in a try block.
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise TorchUnavailableError("get_cpu_backup() needs PyTorch, which could not be imported") from error
    if not isinstance(x, torch.Tensor):
        raise InvalidArgumentError(f"get_cpu_backup() needs a torch.Tensor, not {type(x).__name__}")
    if x.is_nested:
        raise InvalidArgumentError(
            "get_cpu_backup() cannot make a nested tensor on the host: ask for the tensors that it is made of, such as "
            "values() and offsets()"
        )
    if parts_of(torch, x) is not None:
        return _host_copy_of_parts(torch, x, zero_copy, holds_old)
    _check_plain(torch, x)
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=x.dtype)
    address, size = _address_of(x), x.numel() * x.element_size()
    row = _core.find(address)
    is_own = row is None or _has_own_backup(row, holds_old)
    # The search raises an error about the memory even if the backup is another tensor's.
    find = _core.host_backup if zero_copy and is_own else _core.read_only_backup
    owner = None if _has_several_pieces(row, address + size) else find(address, size)
    if not is_own:
        return None
    if owner is None:
        copy = torch.empty(x.shape, dtype=x.dtype)
        return copy if _copy_pieces(address, size, copy.data_ptr(), holds_old) else None
    view = _as_bytes(owner, size)
    tensor = torch.frombuffer(view, dtype=torch.uint8)
    return (tensor if zero_copy else tensor.clone()).view(x.dtype).view(x.shape)


def _check_plain(torch: Any, x: Any) -> None:
    """Raise if a tensor is not one contiguous range of values on a CUDA device."""
    if x.layout != torch.strided or not x.is_contiguous():
        raise InvalidArgumentError(
            f"get_cpu_backup() needs a contiguous tensor; this one has shape {tuple(x.shape)}"
            + (f" and strides {tuple(x.stride())}" if x.layout == torch.strided else f" and layout {x.layout}")
        )
    if x.is_conj() or x.is_neg():
        raise InvalidArgumentError("get_cpu_backup() needs a tensor whose memory holds its values: this is a lazy conjugate")
    if not x.is_cuda:
        raise NotManagedError(f"this tensor is on device {x.device}, not on a CUDA device", operation="get_cpu_backup")


def _host_copy_of_parts(torch: Any, x: Any, zero_copy: bool, holds_old: _HoldsOld) -> Any:
    """Return a tensor of the same class, made of the host copies of its parts; None if one of them has none. Parts on the
    CPU are copied."""
    names, context = x.__tensor_flatten__()
    parts: dict[str, Any] = {}
    for name in names:
        part = getattr(x, name)
        if isinstance(part, torch.Tensor):
            part = part.detach().clone() if part.device.type == "cpu" else get_cpu_backup(part, zero_copy, holds_old)
            if part is None:
                return None
        parts[name] = part
    copy = type(x).__tensor_unflatten__(parts, context, x.size(), x.stride())
    return copy.requires_grad_(False) if copy.requires_grad else copy


def _address_of(x: Any) -> int:
    try:
        address = int(x.data_ptr())
    except RuntimeError:
        address = 0
    if not address:
        raise InvalidArgumentError(
            "get_cpu_backup() needs a tensor with memory of its own, or one whose class names the tensors that it is made "
            f"of (__tensor_flatten__). {type(x).__name__} does neither: ask for the tensors that it is made of"
        )
    return address


def _has_own_backup(row: _core.Segment, holds_old: _HoldsOld) -> bool:
    """Return whether a backup of the allocation, if there is one, is of the tensors that it holds now."""
    is_resident = row.state in (_core.STATE_ACTIVE, _core.STATE_PAUSING)  # a pause may fail
    return not is_resident or (row.backup_bytes > 0 and holds_old(row))


def _has_several_pieces(row: _core.Segment | None, last: int) -> bool:
    """Return whether memory up to `last` that begins in the allocation lies in several, the pieces of an expandable
    segment."""
    end = None if row is None else row.address + row.bytes
    return end is not None and last > end and _core.find(end, last - end) is not None


def _copy_pieces(address: int, size: int, destination: int, holds_old: _HoldsOld) -> bool:
    """Copy contents from the backups of the allocations that they lie in: one, or the pieces of an expandable segment.
    Return whether there were backups of all of them."""
    end = address + size
    while address < end:
        row = _core.find(address)
        if row is None or not _has_own_backup(row, holds_old):
            return False
        part = min(end, row.address + row.bytes) - address
        owner = _core.read_only_backup(address, part)
        if owner is not None:
            ctypes.memmove(destination, owner.address, part)
        elif not _read(row, address, part, destination):
            return False
        address += part
        destination += part
    return True


def _read(row: _core.Segment, address: int, size: int, destination: int) -> bool:
    """Read paused contents from a backup on disk. Return whether there was one."""
    if row.state == _core.STATE_ACTIVE or row.backup_bytes == 0:
        return False
    torch_cuda = layer.in_use()
    stream = None if torch_cuda is None else torch_cuda.current_stream()
    return _core.read_backup(address, size, destination, stream, interruptible=on_main_thread())


def _as_bytes(owner: _core.HostBuffer, size: int) -> Any:
    """Return a buffer over the host copy that keeps it alive. torch keeps the buffer while a tensor uses it."""
    view: Any = (ctypes.c_ubyte * size).from_address(owner.address)
    # This attribute holds the reference that keeps the memory.
    view.owner = owner
    return view
