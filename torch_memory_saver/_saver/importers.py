"""What a pause does about memory that was sent to other processes: pause(if_shared=)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch_memory_saver._saver.options import PauseOptions
from torch_memory_saver._torch.shared_memory import SharedMemory
from torch_memory_saver.errors import InvalidStateError

__all__ = ["importers_awaited"]


@contextlib.contextmanager
def importers_awaited(shared_memory: SharedMemory, options: PauseOptions) -> Iterator[int]:
    """Around a pause. Yields the bytes that other processes may still use when it begins. If the options do
    not allow any, none is sent until it has ended.

    Raises:
        InvalidStateError: There are some, and the options do not allow that.
    """
    if options.if_shared == "allow":
        yield shared_memory.possibly_shared_bytes(options.tags)
        return
    waits = options.if_shared == "wait"
    with shared_memory.closed(options.tags, options.deadline if waits else 0.0) as shared:
        if shared:
            raise InvalidStateError(
                f"pause: other processes may still use {shared} bytes of this memory, which was sent to them"
                + (" and did not drop it within the timeout" if waits else "")
                + ". Let them drop their tensors (and call torch.cuda.ipc_collect() there), or call it with "
                'if_shared="allow": they then keep the memory, with its contents, until they drop it',
                operation="pause",
                bytes=shared,
            )
        yield shared
