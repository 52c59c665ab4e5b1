"""``torch.cuda.empty_cache()`` and ``torch.accelerator.empty_cache()`` also release idle managed memory.

Programs call these functions and then size what they allocate by the free memory. PyTorch releases nothing of a pool whose
object lives, so memory of tensors that were deleted in regions would be missing. :func:`install` replaces the functions, in
every module of PyTorch that has them as an attribute, at the first use of this package. A name that a program has imported
before (``from torch.cuda import empty_cache``) and ``torch._C._cuda_emptyCache`` stay PyTorch's.

A wrapper does only what PyTorch's function does during a capture, while a thread is in a region, if it gets an argument (a
pool, in later releases), and in a process that has not used this package, such as a forked child. Memory of pools that a
captured graph uses is never released.

Messages about a lack of memory say how much managed memory ``empty_cache()`` would give back (:func:`count_idle_bytes`).

Any thread may call, even inside PyTorch's observer of its allocator. No lock is held while PyTorch is called.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch_memory_saver import _core
from torch_memory_saver._patches import is_replaced, replace, restore
from torch_memory_saver._torch.binding import layer
from torch_memory_saver._torch.binding.layer import DEFAULT_POOL, PoolId, TorchCuda, eager, pool_of
from torch_memory_saver._torch.memory.store import PoolStore
from torch_memory_saver._torch.pools.retirement import must_not_free

__all__ = ["count_idle_bytes", "install", "remove"]

#: PyTorch's modules that have the functions, by the names of their attributes.
_PLACES = (
    ("torch.cuda.memory", "empty_cache"),
    ("torch.cuda", "empty_cache"),
    ("torch.accelerator.memory", "empty_cache"),
    ("torch.accelerator", "empty_cache"),
)


def install(store: PoolStore) -> None:
    """Replace the functions of the imported PyTorch. Does nothing where they are replaced already."""
    wrappers: dict[Any, Callable[..., Any]] = {}
    for module, name in _PLACES:
        function = getattr(sys.modules.get(module), name, None)
        if function is None or is_replaced(sys.modules[module], name):
            continue
        if function not in wrappers:
            wrappers[function] = _releasing_managed(function, store)
            _compile_alike(module, function, wrappers[function])
        replace(f"{module}.{name}", sys.modules[module], name, wrappers[function])


def remove() -> None:
    """Restore PyTorch's functions, except where another wrapper is around ours."""
    for module, name in _PLACES:
        if module in sys.modules:
            restore(sys.modules[module], name)


@functools.cache  # the table of torch.compile knows the wrapper that was there at the first compilation
def _releasing_managed(empty_cache: Callable[..., Any], store: PoolStore) -> Callable[..., Any]:
    @functools.wraps(empty_cache)
    def wrapper(*arguments: Any, **keywords: Any) -> Any:
        torch = None if arguments or keywords else layer.in_use()
        if torch is None or store.regions.is_any_routed() or must_not_free(torch):
            return empty_cache(*arguments, **keywords)

        def empty_all() -> Any:
            with store.substitutes.suspended(torch):  # PyTorch returns nothing while they are routed
                return empty_cache()

        return store.empty_cache_with(torch, empty_all)

    return wrapper


def _compile_alike(module: str, original: Callable[..., Any], wrapper: Callable[..., Any]) -> None:
    """Make ``torch.compile`` treat the wrapper as PyTorch's function. The wrapper of ``torch.cuda`` may be part of a graph:
    PyTorch's table of such functions is made at the first compilation, from the attributes of its modules, and is completed
    here if it exists already. The wrapper of ``torch.accelerator`` is called outside of graphs."""
    if not module.startswith("torch.cuda"):
        eager(wrapper)
        return
    rules = getattr(sys.modules.get("torch._dynamo.trace_rules"), "get_torch_obj_rule_map", None)
    if rules is not None and rules.cache_info().currsize:
        table = rules()
        if original in table:
            table[wrapper] = table[original]


def count_idle_bytes(torch: TorchCuda, store: PoolStore, device: int) -> int:
    """Return the bytes of the device in resident managed segments without a tensor that ``empty_cache()`` of this thread
    would give back: those of pools that it retires, of retired pools, and of PyTorch's default pool."""
    active = {row.address for row in _core.segments() if row.state == _core.STATE_ACTIVE and row.device == device}
    by_pool: dict[PoolId, list[dict[str, Any]]] = {}
    for segment in torch.segments():
        if segment["address"] in active:
            by_pool.setdefault(pool_of(segment), []).append(segment)
    returned = store.pools_to_empty(torch, by_pool) | {DEFAULT_POOL}
    return sum(
        int(segment["total_size"])
        for pool, segments in by_pool.items()
        if pool in returned
        for segment in segments
        if not segment["active_size"]
    )
