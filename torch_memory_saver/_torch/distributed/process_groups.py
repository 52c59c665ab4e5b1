"""Process groups of torch.distributed: the store and the ranks of a group.

Imports nothing, and makes no call of a backend: a group of any backend has a store on the CPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch_memory_saver._torch.binding import layer
from torch_memory_saver.errors import InvalidArgumentError, InvalidStateError

__all__ = ["GroupOfRanks", "group_of_ranks"]


class GroupOfRanks(NamedTuple):
    """A process group.

    Attributes:
        store: Store of the group, whose keys no other group has.
        rank: Global rank of this process.
        ranks: Global ranks of all processes of the group, in the order of the group.
        name: Name that torch.distributed has given the group.
    """

    store: Any
    rank: int
    ranks: tuple[int, ...]
    name: str


def group_of_ranks(operation: str, group: Any) -> GroupOfRanks:
    """Return the description of a process group, or of the default group for None.

    Raises:
        InvalidStateError: torch.distributed is not initialized in this process.
        InvalidArgumentError: `group` is not a process group that this process is a member of, or has no store.
    """
    torch = layer.imported()
    distributed = getattr(torch, "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        raise InvalidStateError(
            f"{operation} needs the process group of torch.distributed: call torch.distributed.init_process_group() first",
            operation=operation,
        )
    group = distributed.group.WORLD if group is None else group
    groups = distributed.distributed_c10d._world.pg_map
    if not isinstance(group, distributed.ProcessGroup) or group not in groups:
        raise InvalidArgumentError(
            f"group must be None or a process group that this process is a member of, not {group!r}", operation=operation
        )
    store = groups[group][1]
    if store is None:
        raise InvalidArgumentError(
            f"the process group {group.group_name!r} has no store: pass a group of the backend gloo or nccl",
            operation=operation,
        )
    ranks = tuple(distributed.get_process_group_ranks(group))
    return GroupOfRanks(store, distributed.get_rank(), ranks, group.group_name)
