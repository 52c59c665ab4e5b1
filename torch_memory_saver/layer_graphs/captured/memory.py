"""What captured layers take, measured while they are captured."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from torch_memory_saver._torch import layer
from torch_memory_saver._torch.layer import PoolId

__all__ = ["MemoryMeter", "MemoryReport"]


@dataclass(frozen=True)
class MemoryReport:
    """What captured layers take. All sizes are in bytes.

    Attributes:
        graphs: The number of CUDA graphs, forwards and backwards together.
        graph_bytes: GPU memory that the driver took for the graphs themselves, outside of the pools. A pause does not
            release it. It is the change of the GPU's free memory during the captures, so what other processes do meanwhile
            is in it.
        static_inputs: The number of static inputs: one for each layer and micro-batch in flight.
        static_input_bytes: Their size.
        static_gradient_bytes: The size of the static gradients of outputs, one for each shape and type.
        pools: The number of pools.
        pool_bytes: What the pools have from the driver: results, what the graphs need while they run, and what is unused.
        result_bytes: The results that were alive at once at most: outputs, what backwards read, and gradients. As they were
            requested, without PyTorch's rounding.
    """

    graphs: int
    graph_bytes: int
    static_inputs: int
    static_input_bytes: int
    static_gradient_bytes: int
    pools: int
    pool_bytes: int
    result_bytes: int

    @property
    def fragmentation(self) -> float:
        """The part of the pools that no result was in when most of them were alive: used while a graph runs, or never."""
        return 1 - self.result_bytes / self.pool_bytes if self.pool_bytes else 0.0


class MemoryMeter:
    """Measures while graphs are captured."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._free = torch.cuda.mem_get_info(device)[0]
        self._reserved = torch.cuda.memory_reserved(device)
        self._graphs: list[Any] = []
        self._pools: set[PoolId] = set()
        self._results = 0

    def add(self, graph: Any) -> None:
        """Called when a graph was captured, before results are released."""
        self._graphs.append(graph)
        self._pools.add(graph.pool())
        blocks = (block for segment in self._segments() for block in segment["blocks"])
        self._results = max(self._results, sum(_requested_bytes(block) for block in blocks))

    def _segments(self) -> Iterator[dict[str, Any]]:
        segments = layer.require().segments
        return (segment for pool in self._pools for segment in segments(pool))

    def report(self, static_inputs: Collection[Any], static_gradients: Iterable[Any]) -> MemoryReport:
        """What was measured.

        Args:
            static_inputs: A tuple of tensors for each.
            static_gradients: The tensors.
        """
        taken = self._free - torch.cuda.mem_get_info(self._device)[0]
        grown = torch.cuda.memory_reserved(self._device) - self._reserved
        return MemoryReport(
            graphs=len(self._graphs),
            graph_bytes=taken - grown,
            static_inputs=len(static_inputs),
            static_input_bytes=sum(tensor.nbytes for row in static_inputs for tensor in row),
            static_gradient_bytes=sum(tensor.nbytes for tensor in static_gradients),
            pools=len(self._pools),
            pool_bytes=sum(int(segment["total_size"]) for segment in self._segments()),
            result_bytes=self._results,
        )


def _requested_bytes(block: dict[str, Any]) -> int:
    return int(block["requested_size"]) if block["state"] == "active_allocated" else 0
