"""The static inputs, graphs and pool memory that the micro-batches of an order share.

A captured graph reads its inputs at fixed addresses, the *static inputs*, and keeps its results in the memory of a pool.
Both are needed from a forward to its backward, so what a backward frees can serve a later forward. Which forward that may be
follows from the order in which everything is *replayed*, not from the order of the captures.

There are two ways to have graphs. ``"per_microbatch"``: each layer has a graph for each micro-batch. ``"shared"``:
micro-batches of a chunk that are never in flight together use the same graph and buffers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch_memory_saver.errors import InvalidArgumentError

from .orders import Pass, passes

__all__ = [
    "Graph",
    "GraphUse",
    "StaticInputs",
    "assign_pool_memory",
    "assign_static_inputs",
    "find_overlap",
    "graph_uses",
]

_GRAPHS = ("per_microbatch", "shared")

#: The chunk and the micro-batch.
_Place = tuple[int, int]


@dataclass(frozen=True)
class StaticInputs:
    """The static inputs, and the one that each layer reads for each micro-batch.

    Attributes:
        shapes: The shape of each static input. Their number is the number of buffers to allocate.
        numbers: The number of the static input that a layer reads for a micro-batch: ``numbers[chunk][microbatch][layer]``.
    """

    shapes: tuple[Hashable, ...]
    numbers: tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True, order=True)
class Graph:
    """One captured graph: the forward or the backward of one layer.

    Attributes:
        backward: Whether it is the backward.
        chunk: The chunk.
        layer: The layer in the chunk.
        slot: With ``"per_microbatch"``, the micro-batch. With ``"shared"``, a number from 0 on. A chunk has as many slots as
            it has micro-batches in flight at once.
    """

    backward: bool
    chunk: int
    layer: int
    slot: int


@dataclass(frozen=True)
class GraphUse:
    """The time in which the memory of a graph is in use for one micro-batch.

    Time is counted in steps: each layer that an entry of the order runs is one step.

    Attributes:
        graph: The graph.
        microbatch: The micro-batch.
        first: The step in which the graph runs.
        last: The last step that reads its memory. For a forward this is its backward. For a backward it is the backward of
            the chunk's first layer: autograd adds up the gradients of a tensor that several layers have read, and keeps the
            first one until then. At that step the chunk's own gradient is copied or sent on. A send on another stream has to
            be waited for before the next step.
    """

    graph: Graph
    microbatch: int
    first: int
    last: int


def assign_static_inputs(
    order: Sequence[int],
    layers: int | Sequence[int] = 1,
    *,
    shapes: Sequence[Sequence[Hashable]] | None = None,
    graphs: str = "per_microbatch",
) -> StaticInputs:
    """Give each layer a static input for each micro-batch.

    A backward frees the static inputs of its forward for a later forward with inputs of the same shape. If several are free,
    the one that was freed first is taken.

    With ``graphs="per_microbatch"`` the number of static inputs is the peak in flight x the layers of a chunk, if all have
    one shape. With ``graphs="shared"`` a static input belongs to a graph, so it follows the slots of the graphs, and chunks
    do not share any. Their number is then the peak of the chunk x its layers, summed over the chunks.

    Args:
        order: One rank's order.
        layers: The layers of each chunk, or of every chunk.
        shapes: The properties that two inputs must share to use the same memory, such as shape and dtype, by chunk and
            layer. None means that all have one shape, which is called None.
        graphs: ``"per_microbatch"`` or ``"shared"``.

    Raises:
        InvalidArgumentError: The order cannot be read (`passes`), or the layers or shapes do not fit its chunks.
    """
    found, counts = passes(order), _layers_of(order, layers)
    _check_graphs(graphs)
    if shapes is None:
        shapes = [[None] * count for count in counts]
    if [len(row) for row in shapes] != list(counts):
        raise InvalidArgumentError(
            f"the shapes are for {[len(row) for row in shapes]} layers, but the chunks have {list(counts)} layers"
        )
    stock = _Stock()
    taken: dict[_Place, tuple[int, ...]] = {}
    for backward, item in _events(found):
        key = (item.chunk, item.microbatch)
        if backward:
            for number in taken[key]:
                stock.give_back(number)
        else:
            kinds = [(shape, (key[0], layer) if graphs == "shared" else None) for layer, shape in enumerate(shapes[key[0]])]
            taken[key] = tuple(stock.take(kind) for kind in kinds)
    microbatches = len(found) // len(counts)
    return StaticInputs(
        tuple(shape for shape, _ in stock.kinds),
        tuple(tuple(taken[chunk, number] for number in range(microbatches)) for chunk in range(len(counts))),
    )


def graph_uses(
    order: Sequence[int], layers: int | Sequence[int] = 1, graphs: str = "per_microbatch"
) -> tuple[GraphUse, ...]:
    """Return when the memory of each graph is in use, sorted by first step.

    A graph that several micro-batches share has one use for each of them.

    Args:
        order: One rank's order.
        layers: The layers of each chunk, or of every chunk.
        graphs: ``"per_microbatch"`` or ``"shared"``.

    Raises:
        InvalidArgumentError: The order cannot be read (`passes`), or the layers do not fit its chunks.
    """
    _check_graphs(graphs)
    found, counts = passes(order), _layers_of(order, layers)
    begins = list(accumulate((counts[abs(entry) - 1] for entry in order), initial=0))
    slots = _slots(found) if graphs == "shared" else {(item.chunk, item.microbatch): item.microbatch for item in found}
    uses = []
    for item in found:
        slot, last_layer = slots[item.chunk, item.microbatch], counts[item.chunk] - 1
        for layer in range(last_layer + 1):
            forward, backward = begins[item.forward] + layer, begins[item.backward] + last_layer - layer
            uses.append(GraphUse(Graph(False, item.chunk, layer, slot), item.microbatch, forward, backward))
            end = begins[item.backward] + last_layer
            uses.append(GraphUse(Graph(True, item.chunk, layer, slot), item.microbatch, backward, end))
    return tuple(sorted(uses, key=lambda use: use.first))


def assign_pool_memory(uses: Iterable[GraphUse]) -> dict[Graph, int]:
    """Give each graph a part of the pool, by number.

    Two graphs get the same part only if none of their uses overlap anywhere in the order. Forwards share with forwards and
    backwards with backwards, since their sizes differ.

    Graphs choose in the order of their first uses. Each takes the first part that is free in all of its uses. For
    ``"per_microbatch"`` that is the least number of parts, as for any intervals that are coloured by their start.

    Args:
        uses: All uses, as `graph_uses` returns them.
    """
    by_graph: dict[Graph, list[GraphUse]] = {}
    for use in sorted(uses, key=lambda use: use.first):
        by_graph.setdefault(use.graph, []).append(use)
    parts: list[tuple[bool, set[int]]] = []
    memory = {}
    for graph, mine in by_graph.items():
        steps = {step for use in mine for step in range(use.first, use.last + 1)}
        for number, (backward, busy) in enumerate(parts):
            if backward == graph.backward and busy.isdisjoint(steps):
                busy |= steps
                memory[graph] = number
                break
        else:
            memory[graph] = len(parts)
            parts.append((graph.backward, steps))
    return memory


def find_overlap(uses: Iterable[GraphUse], memory: Mapping[Graph, Hashable]) -> tuple[GraphUse, GraphUse] | None:
    """Check that graphs share memory only if their uses never overlap.

    The check covers every use in the whole order, so None is a proof for that order.

    Args:
        uses: All uses, as `graph_uses` returns them.
        memory: The memory in which each graph keeps its results, under any name. Graphs with equal names share it. A graph
            that is not named has memory of its own.

    Returns:
        The earliest two uses of the same memory at the same time, sorted by their beginning; or None. Both may be uses of
            one graph, for two micro-batches in flight together.
    """
    latest: dict[Hashable, GraphUse] = {}
    for use in sorted(uses, key=lambda use: use.first):
        place = memory.get(use.graph, use.graph)
        before = latest.get(place)
        if before is not None and use.first <= before.last:
            return before, use
        latest[place] = use
    return None


class _Stock:
    """Numbered buffers of several kinds.

    If several buffers were given back, the one that has waited longest is taken.
    """

    def __init__(self) -> None:
        self.kinds: list[tuple[Hashable, Hashable]] = []
        self._free: dict[tuple[Hashable, Hashable], deque[int]] = {}

    def take(self, kind: tuple[Hashable, Hashable]) -> int:
        free = self._free.setdefault(kind, deque())
        if free:
            return free.popleft()
        self.kinds.append(kind)
        return len(self.kinds) - 1

    def give_back(self, number: int) -> None:
        self._free[self.kinds[number]].append(number)


def _events(found: Sequence[Pass]) -> list[tuple[bool, Pass]]:
    """Return each pass twice, in the order of the positions: when its forward runs, and (True) when its backward runs."""
    events = [(item.forward, False, item) for item in found] + [(item.backward, True, item) for item in found]
    return [(backward, item) for _, backward, item in sorted(events, key=lambda event: event[0])]


def _slots(found: Sequence[Pass]) -> dict[_Place, int]:
    """Return the slot of each chunk and micro-batch.

    A chunk has as many slots as it has passes in flight at once.
    """
    stocks: dict[int, _Stock] = {}
    slots: dict[_Place, int] = {}
    for backward, item in _events(found):
        stock, key = stocks.setdefault(item.chunk, _Stock()), (item.chunk, item.microbatch)
        if backward:
            stock.give_back(slots[key])
        else:
            slots[key] = stock.take((None, None))
    return slots


def _layers_of(order: Sequence[int], layers: int | Sequence[int]) -> tuple[int, ...]:
    """Return the number of layers of each chunk of the order."""
    chunks = max(order, default=0)
    counts = (layers,) * chunks if isinstance(layers, int) else tuple(layers)
    if len(counts) != chunks or not all(type(count) is int and count > 0 for count in counts):
        raise InvalidArgumentError(f"layers is {layers!r}: it must be an int above 0, or one for each of {chunks} chunks")
    return counts


def _check_graphs(graphs: str) -> None:
    if graphs not in _GRAPHS:
        raise InvalidArgumentError(f"graphs is {graphs!r}: it must be one of {', '.join(map(repr, _GRAPHS))}")
