"""A warning about symmetric memory (``torch.distributed._symmetric_memory``) that is allocated inside a region.

PyTorch allocates symmetric memory from the driver, not from its caching allocator, and other ranks map it. So no region
manages it, and PyTorch's count of reserved bytes, which outside_memory.py compares, does not have it. Every allocation in
Python calls ``_SymmetricMemory.empty_strided_p2p``, which :func:`install` wraps at the first use of the package.

``symm_mem.empty`` routes a MemPool around that call. In preload mode the core's settings are unmanaged then
(routing/program_pools.py), so the thread's frame tells whether it is inside a region.

Any thread may call. There is no lock.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch_memory_saver._patches import is_replaced, replace
from torch_memory_saver._text import binary_size, warn_once
from torch_memory_saver._torch.binding.layer import eager
from torch_memory_saver._torch.routing.regions import Regions

__all__ = ["install"]

_CLASS, _FUNCTION = "_SymmetricMemory", "empty_strided_p2p"
#: The module is missing in builds of PyTorch without `torch.distributed`.
_MODULE = "torch._C._distributed_c10d"


def install(regions: Regions) -> None:
    """Wrap PyTorch's function. Does nothing where it is wrapped already, or where PyTorch does not have it. `regions` has
    the frames of this process's threads."""
    owner = getattr(sys.modules.get(_MODULE), _CLASS, None)
    if hasattr(owner, _FUNCTION) and not is_replaced(owner, _FUNCTION):
        wrapper = staticmethod(_warning(getattr(owner, _FUNCTION), regions))
        replace(f"{_MODULE}.{_CLASS}.{_FUNCTION}", owner, _FUNCTION, wrapper)


def _warning(allocate: Callable[..., Any], regions: Regions) -> Callable[..., Any]:
    @functools.wraps(allocate)
    def wrapper(*arguments: Any, **keywords: Any) -> Any:
        tensor = allocate(*arguments, **keywords)
        stack = regions.stack()
        if stack and stack[-1].managed:
            warn_once(
                "symmetric memory",
                "%s of symmetric memory were allocated in %s, but no region manages them and no pause releases them. "
                "PyTorch takes them from the driver, and other ranks map them. Allocate symmetric memory outside of "
                "regions. If it is too large to stay during a pause, delete its tensors before, and allocate them again "
                "after the resume.",
                binary_size(tensor.untyped_storage().nbytes()),
                stack[-1],
            )
        return tensor

    eager(wrapper)
    return wrapper
