"""The allocator of vLLM's sleep mode: each memory pool of vLLM is a region whose tag is the name of the pool.

The methods are those that vLLM's worker, its backends and its captures call. vLLM requires no base class.

Weights rarely change between two sleeps. So their host copy stays after a wake-up, and the next sleep copies only what has
changed. ``VLLM_SLEEP_MODE_RELEASE_HOST_MEMORY=1`` releases it. vLLM's pull request 55206 has this variable for the pinned
memory of its own allocator. A sleep that drops contents also releases their host copy.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Literal

from torch_memory_saver._services import GraphPool, PoolId
from torch_memory_saver.options import DEFAULT_TAG
from torch_memory_saver.reports.usage import Usage
from torch_memory_saver.saver import torch_memory_saver as saver

__all__ = ["GRAPHS", "KV_CACHE", "WEIGHTS", "SleepAllocator", "allocator"]

#: Tags of vLLM. A wake-up may leave memory of the first two asleep.
WEIGHTS, KV_CACHE, GRAPHS = "weights", "kv_cache", "cudagraph"
#: The variable that releases the host memory of a sleep when it ends.
_RELEASE = "VLLM_SLEEP_MODE_RELEASE_HOST_MEMORY"


class SleepAllocator:
    """The memory of an engine that sleeps, in regions of this package.

    The methods act on tags for which :meth:`use_memory_pool` or :meth:`cudagraph_pool` was called. Memory of other tags in
    the process is left unchanged. vLLM's tags are tags of this package under the same names, so that
    ``stats("kv_cache")`` and ``on_pause("weights")`` refer to the engine's memory.
    """

    def __init__(self) -> None:
        self._tags: set[str] = set()
        self._graph_pool: GraphPool | None = None

    def use_memory_pool(self, tag: str | None = None) -> AbstractContextManager[None]:
        """Return a region: memory that PyTorch allocates on this thread inside it can sleep.

        Args:
            tag: Name by which the other methods select the memory. None is the tag "default".
        """
        name = DEFAULT_TAG if tag is None else tag
        region = saver.region(name, host_memory="release" if os.environ.get(_RELEASE, "0") != "0" else "retain")
        self._tags.add(name)
        return region

    @contextmanager
    def cudagraph_pool(self) -> Iterator[PoolId]:
        """Yield the id of the pool for CUDA graphs, whose captures have to begin and end inside the context.

        Their memory has the tag "cudagraph". A graph that is captured into the pool can be replayed whenever its memory and
        the memory that it uses are awake.
        """
        if self._graph_pool is None:
            self._graph_pool = GraphPool(GRAPHS)
        with self.use_memory_pool(GRAPHS):
            yield self._graph_pool.id

    def sleep(self, offload_tags: tuple[str, ...] | str | None = None) -> None:
        """Release all memory of the engine, and keep the contents of some tags in host memory.

        Memory that is already asleep stays as it is, with or without its contents. If the host has too little memory for the
        contents, nothing changes. Contents of tensors in reference cycles are kept as well: a garbage collection would take
        longer than their copy in a large engine.

        Args:
            offload_tags: Tags whose contents are kept. The contents of all other tags are dropped, except tensors of
                :meth:`TorchMemorySaver.preserve`. None keeps the tag "default".

        Raises:
            TorchMemorySaverError: The memory could not be released, see :meth:`TorchMemorySaver.pause`. Call again.
        """
        kept = _names((DEFAULT_TAG,) if offload_tags is None else offload_tags)
        tags = self._usage()
        _pause([tag for tag in tags if tag in kept], backup="host")
        self.discard([tag for tag in tags if tag not in kept])
        saver.empty_cache()

    def discard(self, tags: Iterable[str] | str) -> None:
        """Release the memory of tags without keeping its contents. Memory that is already asleep stays as it is.

        Args:
            tags: The tags. Tags without memory are ignored.

        Raises:
            TorchMemorySaverError: See :meth:`TorchMemorySaver.pause`.
        """
        selected = _names(tags)
        # With backup="discard" a pause would also drop the contents of memory that is already asleep.
        _pause([tag for tag in self._usage() if tag in selected], backup=None)

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Map memory again, at the same addresses and with the contents that were kept. Other contents are undefined.

        Args:
            tags: Tags to wake up. Only "weights" and "kv_cache" can be left asleep: memory of other tags wakes up in any
                case. None wakes up everything.

        Raises:
            OutOfMemoryError: The device has too little free memory. Everything stays asleep: free memory and call again.
            TorchMemorySaverError: See :meth:`TorchMemorySaver.resume`.
        """
        left = set() if tags is None else {WEIGHTS, KV_CACHE} - _names(tags)
        selected = [tag for tag in self._usage() if tag not in left]
        if selected:
            saver.resume(selected)

    @property
    def is_asleep(self) -> bool:
        """Whether memory of the engine is asleep."""
        return any(usage.paused_bytes for usage in self._usage().values())

    def get_current_usage(self) -> int:
        """Return the bytes that the engine has allocated, awake or asleep.

        vLLM calls this method before it loads a model, and expects 0. So memory that an engine has left without a tensor is
        released first.
        """
        self.release_pools()
        return sum(usage.bytes for usage in self._usage().values())

    def release_pools(self) -> None:
        """Release the memory that no tensor and no CUDA graph uses to the driver."""
        if self._graph_pool is not None and self._graph_pool.release():
            self._graph_pool = None
        saver.empty_cache()

    def _usage(self) -> dict[str, Usage]:
        """Return the usage of the engine's tags that have memory."""
        return {tag: usage for tag, usage in saver.stats().tags.items() if tag in self._tags and usage.allocations}


def _names(tags: Iterable[str] | str) -> set[str]:
    return {tags} if isinstance(tags, str) else set(tags)


def _pause(tags: Collection[str], backup: Literal["host"] | None) -> None:
    if tags:
        saver.pause(tags, backup=backup)


#: The allocator of this process.
allocator = SleepAllocator()
