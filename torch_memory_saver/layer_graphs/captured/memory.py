"""The memory that captured layers or a captured step take, measured while they are captured."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from torch_memory_saver._services import PoolId, layer
from torch_memory_saver._text import table

from .accounting import Ranges, count, covered_bytes, part, size
from .weak import extent_bytes

__all__ = ["MemoryMeter", "MemoryReport"]

#: A report does not print results that take less than one of so many bytes of the pools.
_NEGLIGIBLE = 1000


@dataclass(frozen=True)
class MemoryReport:
    """The memory that captured layers, or a captured step, take.

    All sizes are in bytes.

    Attributes:
        graphs: The number of CUDA graphs, forwards and backwards together.
        graph_bytes: GPU memory that the driver took for the graphs themselves, outside of the pools. A pause does not
            release it. It is the change of the GPU's free memory during the captures, so it includes changes by other
            processes at that time.
        static_inputs: The number of static inputs: one for each layer and micro-batch in flight. A step has one.
        static_input_bytes: The size of the static inputs.
        static_gradient_bytes: The size of the static gradients of outputs, one for each shape and type. In a step of several
            micro-batches, the size of the sums of their gradients.
        pools: The number of pools.
        pool_bytes: The memory that the pools have from the driver: results, memory that the graphs need while they run, and
            unused memory.
        result_bytes: The most bytes of results that were alive at once: outputs, tensors that backwards read, and gradients.
            Sizes are as requested, without PyTorch's rounding.
        boundary_tensors: The number of results at the borders of layers: outputs of forwards, and gradients of inputs of
            backwards. One layer hands them to the next one, and they are valid for as long as `CapturedLayer` says. A step
            has none.
        boundary_bytes: The memory of the pools in which they lie. Memory that several of them use in turn counts once.
    """

    graphs: int
    graph_bytes: int
    static_inputs: int
    static_input_bytes: int
    static_gradient_bytes: int
    pools: int
    pool_bytes: int
    result_bytes: int
    boundary_tensors: int
    boundary_bytes: int

    @property
    def fragmentation(self) -> float:
        """The share of the pools that held no result at the peak of the results.

        A graph uses this memory while it runs, or the memory is never used.
        """
        return 1 - self.result_bytes / self.pool_bytes if self.pool_bytes else 0.0

    def __str__(self) -> str:
        results = [
            ("  results at once at most", size(self.result_bytes)),
            ("  part without results (fragmentation)", part(self.fragmentation)),
        ]
        rows = [
            ("graphs", count(self.graphs)),
            ("  their memory outside of pools", size(self.graph_bytes)),
            ("static inputs", count(self.static_inputs)),
            ("  their memory", size(self.static_input_bytes)),
            ("static gradients", size(self.static_gradient_bytes)),
            ("pools", count(self.pools)),
            ("  their memory", size(self.pool_bytes)),
            # The rest of the pools is for what the graphs use while they run, so it is no fault that this is nearly all.
            *(results if self.result_bytes * _NEGLIGIBLE >= self.pool_bytes > 0 else ()),
            ("boundary tensors", count(self.boundary_tensors)),
            ("  their memory", size(self.boundary_bytes)),
        ]
        return "\n".join(table(rows))


class MemoryMeter:
    """A meter of the memory that graphs take while they are captured."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._free = torch.cuda.mem_get_info(device)[0]
        self._reserved = torch.cuda.memory_reserved(device)
        self._graphs: list[Any] = []
        self._pools: set[PoolId] = set()
        self._results = 0

    def add(self, graph: Any) -> None:
        """Measure the results of a graph that was captured.

        This must be called before results are released.
        """
        self._graphs.append(graph)
        self._pools.add(graph.pool())
        blocks = (block for segment in self._segments() for block in segment["blocks"])
        self._results = max(self._results, sum(_requested_bytes(block) for block in blocks))

    def _segments(self) -> Iterator[dict[str, Any]]:
        segments = layer.require().segments
        return (segment for pool in self._pools for segment in segments(pool))

    def report(
        self, static_inputs: Collection[Any], static_gradients: Iterable[Any], boundaries: Iterable[Any] = ()
    ) -> MemoryReport:
        """Return the report of all measurements.

        Args:
            static_inputs: A tuple of tensors for each static input.
            static_gradients: The tensors of the static gradients.
            boundaries: Outputs and gradients of inputs. Tensors that lie in no pool, such as an input that a layer passes
                on, do not count.
        """
        segments = list(self._segments())
        pools = Ranges((segment["address"], segment["total_size"]) for segment in segments)
        borders = [(tensor.data_ptr(), extent_bytes(tensor)) for tensor in boundaries if tensor.data_ptr() in pools]
        taken = self._free - torch.cuda.mem_get_info(self._device)[0]
        grown = torch.cuda.memory_reserved(self._device) - self._reserved
        return MemoryReport(
            graphs=len(self._graphs),
            graph_bytes=taken - grown,
            static_inputs=len(static_inputs),
            static_input_bytes=sum(tensor.nbytes for row in static_inputs for tensor in row),
            static_gradient_bytes=sum(tensor.nbytes for tensor in static_gradients),
            pools=len(self._pools),
            pool_bytes=sum(int(segment["total_size"]) for segment in segments),
            result_bytes=self._results,
            boundary_tensors=len(borders),
            boundary_bytes=covered_bytes(borders),
        )


def _requested_bytes(block: dict[str, Any]) -> int:
    return int(block["requested_size"]) if block["state"] == "active_allocated" else 0
