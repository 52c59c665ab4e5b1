"""Tokens of graph pools that a program passes to cuda_graph(): decides whether a capture can use the token's pool.

It can if torch's allocations in that pool are managed:

- preloaded, in any pool: inside the capture a region's settings are in force, and torch calls cudaMalloc, which is ours. Not
  for expandable segments, which torch makes in every pool without an allocator while they are on;
- otherwise in a pool with our allocator. torch makes the pool of a bare token (``graph_pool_handle()``) at its first use,
  and no allocator can be attached to it. Whether a pool has ours is seen by its segments, or by an allocation.

A pool holds memory of one tag and one kind of backup, because graphs of one pool use each other's idle memory. If the
token's pool cannot be used, a managed pool replaces it (graphs.py); only a program that routes to the token itself can
detect that.

These functions call torch, so they are called with no lock held.
"""

from __future__ import annotations

from torch_memory_saver import _core
from torch_memory_saver._torch import region_settings
from torch_memory_saver._torch.layer import PoolId, TorchCuda
from torch_memory_saver._torch.pool_stock import Key
from torch_memory_saver.errors import InvalidArgumentError, InvalidStateError

__all__ = [
    "bytes_not_managed",
    "check_token",
    "managed_default_pool_bytes",
    "names_pool_to_use",
    "refuse_paused",
    "replaced_error",
]

_DEFAULT_POOL: PoolId = (0, 0)
#: torch's error if a routing is ended that is not in force.
_NOT_ROUTED = "not currently recording to mempool_id"
_WAYS_OUT = (
    'start the process with the preload library (hook mode "preload"; see configure_subprocess()) and without PyTorch\'s '
    "expandable_segments, or give cuda_graph() the id of a torch.cuda.MemPool that was made with this package's allocator"
)


def check_token(token: object) -> PoolId | None:
    """torch's token of a pool (a pair of ints), or None."""
    if token is None:
        return None
    if isinstance(token, (tuple, list)) and len(token) == 2 and all(isinstance(part, int) for part in token):
        return (int(token[0]), int(token[1]))
    raise InvalidArgumentError(
        "pool must be a token from torch.cuda.graph_pool_handle() or from a graph's or MemPool's id, or None, "
        f"not {type(token).__name__}: {token!r}"
    )


def names_pool_to_use(torch: TorchCuda, token: PoolId, key: Key) -> bool:
    """Whether a capture uses the token's own pool. False: a managed pool replaces it.

    Raises:
        InvalidStateError: The pool holds memory that cannot be managed, or that is paused.
    """
    options = key.options
    found = refuse_paused(torch, token)
    managed = [row for row in found if row is not None]
    if not _core.preloaded or torch.settings().get("expandable_segments", False):
        if len(managed) < len(found):
            raise InvalidStateError(
                f"graph pool {token} already holds memory that is not managed: give cuda_graph() a token that only "
                f"cuda_graph() has used, or none, or {_WAYS_OUT}",
                operation="cuda_graph",
                tag=options.tag,
            )
        if not found:
            with region_settings.RegionSettings(options):
                return torch.has_our_allocator(token, key.device)
    return all(row.tag == options.tag and row.backup == options.backup for row in managed)


def refuse_paused(torch: TorchCuda, token: PoolId) -> list[_core.Segment | None]:
    """The allocations that the segments of the token's pool are; None for ordinary memory.

    Raises:
        InvalidStateError: One is paused.
    """
    found = [_core.find(segment["address"]) for segment in torch.segments(token)]
    paused = next((row for row in found if row is not None and row.state != _core.STATE_ACTIVE), None)
    if paused is not None:
        raise InvalidStateError(
            f"the memory of graph pool {token} is paused: resume tag {paused.tag!r} before capturing into it again",
            operation="cuda_graph",
            tag=paused.tag,
        )
    return found


def bytes_not_managed(torch: TorchCuda, token: PoolId) -> int:
    """Bytes of ordinary memory in the token's pool."""
    return sum(int(row["total_size"]) for row in torch.segments(token) if _core.find(row["address"]) is None)


def managed_default_pool_bytes(torch: TorchCuda) -> int:
    """Managed bytes of torch's default pool."""
    return sum(
        int(row["total_size"])
        for row in torch.segments()
        if tuple(row.get("segment_pool_id", _DEFAULT_POOL)) == _DEFAULT_POOL and _core.find(row["address"]) is not None
    )


def replaced_error(exception: BaseException | None, token: PoolId | None, used: PoolId) -> InvalidStateError | None:
    """The error for ending the routing to a token whose pool has been replaced, or None."""
    if token in (None, used) or not isinstance(exception, RuntimeError) or _NOT_ROUTED not in str(exception):
        return None
    return InvalidStateError(
        f"routing to graph pool {token} was ended inside a capture, which allocates from pool {used} in its place, because "
        f"PyTorch cannot manage the token's own: {_WAYS_OUT}",
        operation="cuda_graph",
    )
