"""Find the storages that manage() moves, those of tensors, modules and optimizers, and refuse those that must not move.

A tensor stands for its whole storage. A module stands for its parameters and buffers, and an optimizer for its state.
Tensors of modules and optimizers that are not on a CUDA device stay where they are, such as the step counters of Adam on the
CPU. Every storage is checked before the first one is moved, so that a refusal changes nothing.

This module owns no state and keeps no tensor alive. Its functions may be called on any thread.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch_memory_saver import _core
from torch_memory_saver._engine.tensors.lookup import segments_in, storages_of
from torch_memory_saver._engine.tensors.optimizers import find_optimizers
from torch_memory_saver._engine.tensors.saved_tensors import find_saved_storages
from torch_memory_saver._torch.binding.layer import PoolId, TorchCuda, pool_of
from torch_memory_saver._torch.memory.live_blocks import pools_with_known_blocks
from torch_memory_saver._torch.memory.store import PoolStore
from torch_memory_saver.errors import InvalidArgumentError, InvalidStateError
from torch_memory_saver.options import RegionOptions

__all__ = ["Movable", "find_movable", "flat", "not_in_place", "refuse_others_memory", "refuse_saved", "tensors_in"]

_OPERATION = "manage"


@dataclasses.dataclass(frozen=True, slots=True)
class Movable:
    """A storage on a CUDA device.

    Attributes:
        storage: PyTorch's storage.
        name: Name of the first tensor that has it, for messages.
        device: CUDA ordinal.
        address: Address of the first byte.
        bytes: Size of the storage.
    """

    storage: Any = dataclasses.field(repr=False)  # PyTorch shows all its bytes
    name: str
    device: int
    address: int
    bytes: int


class _Named(NamedTuple):
    name: str
    tensor: Any


def flat(torch: Any, what: Any) -> list[Any]:
    """Return the tensors and modules among `what` and in its iterables, and the optimizers that hold state (optimizers.py).

    Raises:
        InvalidArgumentError: An object is none of these, or an optimizer is wrapped in an unknown way.
    """
    if isinstance(what, (torch.Tensor, torch.nn.Module)):
        return [what]
    optimizers = [] if isinstance(what, (list, tuple, dict)) else find_optimizers(torch, what)
    if optimizers:
        return optimizers
    if isinstance(what, Iterable) and not isinstance(what, (str, bytes)):
        return [each for part in what for each in flat(torch, part)]
    raise InvalidArgumentError(
        f"manage() needs tensors, modules, optimizers or iterables of them, not {type(what).__name__}"
        + (": pass a name as tag=, and of a dict its values()" if isinstance(what, str) else "")
    )


def find_movable(torch: Any, objects: Iterable[Any]) -> list[Movable]:
    """Return the storages of tensors, modules and optimizers on CUDA devices, each once, by device and address.

    Raises:
        InvalidArgumentError: A tensor is not a leaf, or has no storage of its own; or a given tensor, or all tensors of a
            module, are not on a CUDA device.
    """
    found: dict[int, Movable] = {}
    for each in objects:
        for name, tensor in _tensors_of(torch, each):
            for storage in _storages(torch, name, tensor):
                if storage._cdata not in found:
                    ordinal, address = storage.device.index, storage.data_ptr()
                    found[storage._cdata] = Movable(storage, name, ordinal, address, storage.nbytes())
    return sorted(found.values(), key=lambda movable: (movable.device, movable.address))


def _tensors_of(torch: Any, given: Any) -> list[_Named]:
    """Return the tensors on CUDA devices that an object stands for, with their names."""
    if isinstance(given, torch.Tensor):
        name = _name_of(torch, given)
        if not given.is_cuda:
            raise _refusal(name, f"is on device {given.device}", "move it to a CUDA device first")
        return [_Named(name, given)]
    kind = type(given).__name__
    if isinstance(given, torch.optim.Optimizer):
        every = [
            _Named(f"{kind}.state[{index}][{key!r}]", tensor)
            for index, state in enumerate(given.state.values())
            for key, value in (state.items() if isinstance(state, dict) else [("", state)])
            for tensor in tensors_in(torch, [value])
        ]
        return [named for named in every if named.tensor.is_cuda]
    members = [*given.named_parameters(remove_duplicate=False), *given.named_buffers(remove_duplicate=False)]
    every = [_Named(f"{kind}.{path}", tensor) for path, tensor in members]
    on_device = [named for named in every if named.tensor.is_cuda]
    if every and not on_device:
        where = every[0].tensor.device
        raise _refusal(f"every tensor of {kind}", f"is on device {where}", "move the module to a CUDA device first")
    return on_device


def _name_of(torch: Any, tensor: Any) -> str:
    """Return a name for messages. A strided nested tensor has no shape: its parts differ, and it refuses the question."""
    if tensor.is_nested and tensor.layout is torch.strided:
        return f"a nested tensor of {tensor.size(0)} parts"
    return f"a tensor of shape {tuple(tensor.shape)}"


def tensors_in(torch: Any, values: Iterable[Any]) -> list[Any]:
    """Return the tensors among values of an optimizer's state, also those in dicts, lists and tuples.

    Each step of an optimizer calls this for its whole state.
    """
    tensors: list[Any] = []
    while values:
        nested: list[Any] = []
        for value in values:
            if isinstance(value, torch.Tensor):
                tensors.append(value)
            elif isinstance(value, dict):
                nested.extend(value.values())
            elif isinstance(value, (list, tuple)):
                nested.extend(value)
        values = nested
    return tensors


def _storages(torch: Any, name: str, tensor: Any) -> list[Any]:
    """Return the storages of a tensor on a CUDA device. Parts of a subclass may be on the CPU: they stay there."""
    if not tensor.is_leaf:
        made_by = type(tensor.grad_fn).__name__
        raise _refusal(name, f"is not a leaf: {made_by} has made it", "pass a leaf, or detach() the tensor")
    try:
        storages = [storage for storage in storages_of(torch, [tensor]) if storage.device.type != "cpu" and storage.nbytes()]
        has_memory = all(storage.device.type == "cuda" and storage.data_ptr() for storage in storages)
    except InvalidArgumentError:
        raise
    except (RuntimeError, NotImplementedError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise _refusal(name, f"has no storage of its own ({reason})", "pass the tensors that it is made of") from error
    if not has_memory:
        raise _refusal(name, f"is a {type(tensor).__name__} without memory", "pass a tensor that has memory")
    return storages


def not_in_place(found: Iterable[Movable], options: RegionOptions) -> list[Movable]:
    """Return the storages that do not lie in memory with the tag and the backup of the options."""
    return [each for each in found if not _is_in_place(each, options)]


def _is_in_place(movable: Movable, options: RegionOptions) -> bool:
    end = movable.address
    for row in segments_in(movable.address, movable.bytes):
        if row.address > end or (row.tag, row.backup) != (options.tag, options.backup):
            return False
        end = row.address + row.reserved_bytes
    return end >= movable.address + movable.bytes


def refuse_others_memory(torch: TorchCuda, store: PoolStore, found: Sequence[Movable]) -> None:
    """Raise if the memory of a storage is not PyTorch's, is paused, or may be a captured graph's.

    Raises:
        InvalidArgumentError: The memory of a storage is not PyTorch's, or may be a captured graph's.
        InvalidStateError: The memory of a storage is paused.
    """
    segments = torch.segments()
    known = pools_with_known_blocks(torch, store, segments) | torch.ordinary_pools
    pools: dict[int, PoolId] = {block["address"]: pool_of(row) for row in segments for block in row["blocks"]}
    imported = _imported_storages()
    for each in found:
        pool = pools.get(each.address)
        if not each.storage.resizable() or (pool is None and torch.caches):
            if each.storage._cdata in imported:
                raise _refusal(each.name, "is memory of another process (CUDA IPC)", "pass a clone()")
            raise _refusal(
                each.name,
                "has memory that PyTorch's CUDA allocator has not made, as from_blob() and DLPack give it",
                "pass a clone()",
            )
        if pool is not None and pool not in known:
            raise _refusal(
                each.name,
                f"has memory of pool {pool}, which captured graphs or a MemPool of the program may use",
                "allocate it outside of the capture or pool, or pass a clone()",
            )
        row = next((row for row in segments_in(each.address, each.bytes) if row.state != _core.STATE_ACTIVE), None)
        if row is not None:
            raise InvalidStateError(
                f"manage: {each.name} is paused with tag {row.tag!r}: resume that tag first. Nothing was moved.",
                operation=_OPERATION,
                tag=row.tag,
                device=each.device,
                address=each.address,
            )


def _imported_storages() -> set[int]:
    """Return the storages that this process has imported, and those that it has sent."""
    reductions: Any = sys.modules.get("torch.multiprocessing.reductions")
    cache = getattr(reductions, "shared_cache", {})
    return {reference.cdata for reference in list(cache.values())}


def refuse_saved(torch: Any, found: Iterable[Movable], objects: Iterable[Any]) -> None:
    """Raise if a storage is saved for a backward (saved_tensors.py). A module among the objects may hold the result.

    Raises:
        InvalidStateError: A storage is saved.
    """
    saved = find_saved_storages(torch)
    for each in found:
        node = saved.get(each.storage._cdata)
        if node is not None:
            holder = _holder_of_result(torch, each, objects)
            what_to_do = (
                f"attribute {holder} holds the result: delete that attribute. If weight_norm or spectral_norm of "
                "torch.nn.utils have made it, the next forward makes it again"
                if holder
                else "call manage() after that backward(), or delete the result of the forward"
            )
            raise InvalidStateError(
                f"manage: {each.name} is saved for a backward ({node}): {what_to_do}. Nothing was moved.",
                operation=_OPERATION,
                device=each.device,
                address=each.address,
            )


def _holder_of_result(torch: Any, saved: Movable, objects: Iterable[Any]) -> str:
    """Return the attribute of a module that holds a tensor whose graph has saved the storage, or ""."""
    for given in objects:
        for path, module in given.named_modules() if isinstance(given, torch.nn.Module) else ():
            for attribute, value in vars(module).items():
                if isinstance(value, torch.Tensor) and saved.storage._cdata in find_saved_storages(torch, [value]):
                    return ".".join(filter(None, (type(given).__name__, path, attribute)))
    return ""


def _refusal(name: str, why: str, what_to_do: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"manage: {name} {why}: {what_to_do}. Nothing was moved.", operation=_OPERATION)
