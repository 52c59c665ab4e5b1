"""The modules that were given to manage(), and what has left managed memory since then.

Libraries replace the memory of parameters: ``module.to(dtype)``, ``parameter.data = ...``, adapters that are merged, weights
that are quantised. The new memory is ordinary, so later pauses release less than their caller expects. Each pause of the tag
looks at its modules. It moves nothing, because addresses must hold while memory is paused.

A look compares the addresses of parameters and buffers with those of the last look. Only if one has changed, each tensor is
looked up. Tensors have *left* if they lie in ordinary memory of a device, and memory that the module had is gone. If that
memory lives on, there is no warning: a library such as FSDP keeps it and will bring it back. There is no warning either if
parameters have no memory in its place, as those that DeepSpeed's ZeRO divides.

The list belongs to this process. It keeps neither modules nor memory alive. Any thread may call.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import weakref
from collections.abc import Iterable
from typing import Any

from torch_memory_saver import _core
from torch_memory_saver._engine.tensors.lookup import storages_of
from torch_memory_saver._text import binary_size
from torch_memory_saver._torch.records.tags import Tags, selects
from torch_memory_saver.options import BACKUPS, RegionOptions

__all__ = ["ManagedModules"]

logger = logging.getLogger("torch_memory_saver")

#: The names that a warning lists.
_MAX_NAMES = 3


class ManagedModules:
    """The modules of manage(), each with its options."""

    def __init__(self) -> None:
        self._modules: list[_ManagedModule] = []

    def add(self, torch: Any, module: Any, options: RegionOptions) -> None:
        """Remember a module whose tensors lie in managed memory. This replaces what an earlier call has remembered of it."""
        added = _ManagedModule(torch, module, options)
        self._modules.append(added)
        # Only older entries are removed, so that of two calls at once for one module the entry of the second one stays.
        for each in list(itertools.takewhile(lambda each: each is not added, list(self._modules))):
            if each.module() in (None, module):
                with contextlib.suppress(ValueError):  # another thread has removed it
                    self._modules.remove(each)

    def left_bytes(self, torch: Any, tags: Tags) -> int:
        """Return the bytes that have left managed memory, of modules of the tags. Log them once for each module."""
        return sum(each.left_bytes(torch) for each in list(self._modules) if selects(tags, each.options.tag))


class _ManagedModule:
    def __init__(self, torch: Any, module: Any, options: RegionOptions) -> None:
        self.module = weakref.ref(module)
        self.options = options
        storages, self._addresses = _storages(torch, _tensors_of(module))
        #: What the module had at first, by address. Memory that its owner has given back is forgotten.
        self._had = {
            address: torch.multiprocessing.reductions.StorageWeakRef(storage)
            for storage, address in zip(storages, self._addresses, strict=True)
            if _is_on_device(storage) and address
        }
        #: What the module had and does not have now, although it lives: it may come back.
        self._kept: list[Any] = []
        self._left_bytes = 0
        self._is_logged = False

    def left_bytes(self, torch: Any) -> int:
        module = self.module()
        if module is None:
            return 0
        storages, addresses = _storages(torch, _tensors_of(module))
        if addresses != self._addresses or any(each.expired() for each in self._kept):
            left = self._find_left(storages, set(addresses))
            self._addresses = addresses
            self._left_bytes = sum(storage.nbytes() for storage in left.values())
            if left and not self._is_logged:
                self._is_logged = True
                self._log(torch, module, left)
        return self._left_bytes

    def _find_left(self, storages: Iterable[Any], addresses: set[int]) -> dict[int, Any]:
        """Return the storages in ordinary memory, by the address of their record, if memory that the module had is gone."""
        on_device = [storage for storage in storages if _is_on_device(storage)]
        outside = {each._cdata: each for each in on_device if each.nbytes() and _core.find(each.data_ptr()) is None}
        missing = {address: had for address, had in self._had.items() if address not in addresses}
        gone = [address for address, had in missing.items() if had.expired()]
        self._kept = [had for address, had in missing.items() if address not in gone] if outside and not gone else []
        if gone and not outside and any(not each.nbytes() for each in on_device):
            for address in gone:
                del self._had[address]
        return outside if gone else {}

    def _log(self, torch: Any, module: Any, left: dict[int, Any]) -> None:
        kind = type(module).__name__
        members = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        names = [
            f"{kind}.{name}"
            for name, tensor in members
            if any(storage._cdata in left for storage in _storages(torch, [tensor])[0])
        ]
        shown = ", ".join(names[:_MAX_NAMES]) + (f" and {len(names) - _MAX_NAMES} more" if names[_MAX_NAMES:] else "")
        backup = next((f", backup={name!r}" for name, number in BACKUPS.items() if number == self.options.backup), "")
        logger.warning(
            "pause: %s of a module are no longer in managed memory, so pauses of tag %r do not release them: %s. "
            "Something has replaced their memory, as .to(), an assignment to .data, merged adapters and quantisation do. "
            "Call manage(module, tag=%r%s) again after the resume, to move them back. (Logged once for each manage().)",
            binary_size(self._left_bytes),
            self.options.tag,
            shown,
            self.options.tag,
            backup,
        )


def _tensors_of(module: Any) -> list[Any]:
    """Return the parameters and buffers of a module and of the modules in it.

    Every pause calls this, so it is faster than the module's own methods. Dicts are copied at once, because another thread
    may change the module.
    """
    tensors: list[Any] = []
    modules = {id(module): module}
    waiting = [module]
    for each in waiting:
        held = each.__dict__
        for kind in ("_parameters", "_buffers"):
            members = held.get(kind)
            if members:
                tensors += members.values()
        children = held.get("_modules")
        if children:
            new = {id(child): child for child in list(children.values()) if id(child) not in modules and child is not None}
            modules.update(new)
            waiting += new.values()
    return [tensor for tensor in tensors if tensor is not None]


def _storages(torch: Any, tensors: list[Any]) -> tuple[list[Any], list[int]]:
    """Return the storages that tensors have, and their addresses. Tensors without memory of their own are skipped."""
    try:
        storages = list(storages_of(torch, tensors))
        return storages, list(map(torch.UntypedStorage.data_ptr, storages))
    except Exception:  # one of them has no storage, or is of a subclass whose methods expect a state that it is not in
        if len(tensors) == 1:
            return [], []
    each = [_storages(torch, [tensor]) for tensor in tensors]
    return [storage for found, _ in each for storage in found], [address for _, found in each for address in found]


def _is_on_device(storage: Any) -> bool:
    return bool(storage.device.type == "cuda")
