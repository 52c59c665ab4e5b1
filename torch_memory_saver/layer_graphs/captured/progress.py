"""The position of a step in the order that was captured.

Replays in another order than that of the plan would overwrite memory that is in use, without any error. So each run checks
its position here first. This module is plain Python. One thread at a time uses it: the caller's, or autograd's while the
caller waits for it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from torch_memory_saver.errors import InvalidArgumentError, InvalidStateError
from torch_memory_saver.layer_graphs.plan.buffers import GraphUse

__all__ = ["Awaitable", "Progress", "describe_run"]


class Awaitable(Protocol):
    """An object that makes the current stream wait: a torch.cuda.Event, or a Work of torch.distributed."""

    def wait(self) -> object:
        """Make the current stream wait."""


def describe_run(backward: bool, chunk: int, layer: int) -> str:
    """Return a run in words, for messages."""
    return f"the {'backward' if backward else 'forward'} of chunk {chunk}, layer {layer}"


class Progress:
    """The position of the next run in the order, and sends that later runs have to wait for."""

    def __init__(self, uses: Sequence[GraphUse]) -> None:
        """Begin before the first run of an order.

        Args:
            uses: One use for each step of the order, as `graph_uses` returns them.
        """
        self._uses = uses
        self._no_backward: Collection[tuple[int, int]] = ()
        self._runs = 0  # number of steps of the order since the last restart
        self._last_use: dict[int, int] = {}  # by address of a result: the last run that reads it, counted like _runs
        self._in_flight: list[tuple[int, Awaitable]] = []
        self._needed_until = -1  # the last run that reads a result of an earlier run, counted like _runs
        self._discards = 0  # discards of the tag when the first of those results was computed

    def skip_backwards(self, layers: Collection[tuple[int, int]]) -> None:
        """Skip the backwards of these layers, given by chunk and layer, because nothing in them has a gradient."""
        self._no_backward = layers

    def next(self) -> GraphUse:
        """Return the run that comes next."""
        while True:
            use = self._uses[self._runs % len(self._uses)]
            if not use.graph.backward or (use.graph.chunk, use.graph.layer) not in self._no_backward:
                return use
            self._runs += 1

    def begin(self, backward: bool, chunk: int, layer: int, tag: str, discards: int) -> GraphUse:
        """Check that a run comes next, and return it.

        This must be called before the run. It makes the current stream wait for sends whose memory this run may use again.

        Args:
            backward: Whether the run is a backward.
            chunk: The chunk of the layer.
            layer: The position of the layer in its chunk.
            tag: The tag of the graphs' memory, for the message.
            discards: The number of times that a pause has discarded contents of the tag so far (`TagInfo.discards`).

        Raises:
            InvalidStateError: Another run comes next, or a pause has discarded results that this run or a later one reads.
                Nothing has changed.
        """
        use = self.next()
        graph = use.graph
        if (backward, chunk, layer) != (graph.backward, graph.chunk, graph.layer):
            raise InvalidStateError(
                f"layer_graphs: {describe_run(backward, chunk, layer)} was called, but "
                f"{describe_run(graph.backward, graph.chunk, graph.layer)}, for micro-batch {use.microbatch} comes next in "
                f"the captured order (run {use.first} of {len(self._uses)}). Run the layers in that order. After a step "
                "that did not end, call restart()",
                operation="layer_graphs",
            )
        if self._runs > self._needed_until:
            self._discards = discards
        elif self._discards != discards:
            raise InvalidStateError(
                f"layer_graphs: {describe_run(backward, chunk, layer)}, for micro-batch {use.microbatch}: a pause of tag "
                f"{tag!r} has discarded results of earlier runs of this step, which later ones read. Pause the tag between "
                f'steps, or keep its contents with pause({tag!r}, backup="host"). Clear the gradients of this step, call '
                "restart() and run the step again",
                operation="layer_graphs",
                tag=tag,
            )
        for last, work in self._in_flight:
            if last < self._runs:
                work.wait()
        self._in_flight = [(last, work) for last, work in self._in_flight if last >= self._runs]
        return use

    def end(self, use: GraphUse, addresses: Sequence[int]) -> None:
        """Record that a run has ended.

        Args:
            use: The return value of begin().
            addresses: The addresses of the results that the caller gets.
        """
        last = self._runs + use.last - use.first
        self._needed_until = max(self._needed_until, last)
        for address in addresses:
            self._last_use[address] = last
        self._runs += 1

    def keep_for(self, address: int, work: Awaitable) -> None:
        """Make the current stream wait for the work before the memory at that address is used again.

        Raises:
            InvalidArgumentError: No result of a run is there.
        """
        last = self._last_use.get(address)
        if last is None:
            raise InvalidArgumentError(
                f"in_flight: the tensor at {address:#x} is no output of a captured layer, nor a gradient of its inputs, so "
                "no captured layer overwrites its memory. Pass the tensor that the layer returned"
            )
        self._in_flight.append((last, work))

    def restart(self) -> None:
        """Make the first run of the order the next one, whatever was run before.

        The call waits for all work that is in flight.
        """
        for _, work in self._in_flight:
            work.wait()
        self._in_flight.clear()
        self._last_use.clear()
        self._needed_until = -1
        self._runs = 0
