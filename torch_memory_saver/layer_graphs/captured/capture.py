"""The capture of layers for an order of forwards and backwards, from the layers and samples of the caller.

The graphs are captured in the order in which they first run. Their results stay in the pool until nothing that is captured
later can be in use at the same time. Then their memory serves later captures:

- With a graph for each micro-batch, every graph runs once in a step, in the order of the captures. One pool serves all: its
  memory is divided at each replay as it was at the capture.
- With shared graphs, this holds only for one chunk and slot, from the forward of its first layer to its backward. So the
  forwards of each chunk and slot have a pool. Other forwards share the pool if they are never in flight at the same time
  anywhere in the order (`assign_pool_memory`, proved by `find_overlap`). The backwards of all chunks have one pool, because
  no two of them run at once.

A graph may take memory for its results that another graph left free during its capture. So pools, and not only results, must
be separate.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch

from torch_memory_saver.errors import InvalidArgumentError
from torch_memory_saver.layer_graphs.plan.buffers import (
    Graph,
    GraphUse,
    assign_pool_memory,
    assign_static_inputs,
    find_overlap,
    graph_uses,
)
from torch_memory_saver.options import check_tag, errors_of
from torch_memory_saver.saver import torch_memory_saver as saver

from .arguments import Arguments, TensorKind
from .capture_context import autocast_without_cache, cheap_garbage_collection, errors_named, refuse_inside_capture, warm_up
from .layer import CapturedLayer
from .memory import MemoryMeter, MemoryReport
from .module_state import find_hook, one_gpu
from .passes import CapturedPass, Capturing
from .progress import Awaitable, Progress

__all__ = ["LayerGraphs", "LayerInputs", "capture_layers", "check_layers"]

_WHY_CAPTURES_FAIL = (
    "Captured code must not wait for the GPU (.item(), .cpu(), nonzero(), `if tensor:`). Move such code out of the layer, "
    "or behind the last part that is captured (scope=)"
)


class LayerGraphs:
    """The graphs of a rank's layers.

    The graphs live as long as this object, or a result of them.

    Attributes:
        layers: The layers to call in place of the modules: ``layers[chunk][layer]``.
        order: The order that was captured. The layers must run in it. After its end it begins again.
        tag: The tag of the graphs' memory and of the static inputs, for pause() and resume(). Pause it between steps, when
            none of its contents have to be kept. A pause within a step needs a backup, or the next run raises
            InvalidStateError.
    """

    def __init__(
        self,
        order: tuple[int, ...],
        tag: str,
        layers: tuple[tuple[CapturedLayer, ...], ...],
        progress: Progress,
        memory: MemoryReport,
    ) -> None:
        self.order = order
        self.tag = tag
        self.layers = layers
        self._progress = progress
        self._memory = memory

    def memory_report(self) -> MemoryReport:
        """Return the memory that the graphs take, as it was measured during the captures."""
        return self._memory

    def in_flight(self, tensor: Any, work: Awaitable) -> None:
        """Report that another stream still reads a result, for instance to send it to another rank.

        Before a later run uses the memory of the result again, the current stream waits for `work`.

        Args:
            tensor: An output of a captured layer, or the gradient of an input.
            work: An object whose ``wait()`` makes the current stream wait: a ``torch.cuda.Event``, or the return value of
                ``torch.distributed.isend``.

        Raises:
            InvalidArgumentError: The tensor is no such result.
        """
        self._progress.keep_for(tensor.untyped_storage().data_ptr(), work)

    def restart(self) -> None:
        """Begin the order again, after a step that did not end.

        The call waits for work that is in flight.
        """
        self._progress.restart()


def capture_layers(
    layers: Sequence[Any],
    sample_inputs: Sequence[Any],
    order: Sequence[int] = (1, -1),
    pool: tuple[int, int] | None = None,
    *,
    sample_keywords: Sequence[Any] | None = None,
    scope: Collection[str] | None = None,
    graphs: str = "per_microbatch",
    tag: str = "default",
    warmup: int = 3,
    reuse_memory: bool = True,
) -> LayerGraphs:
    """Capture CUDA graphs of layers, a forward and a backward each, in memory that pause() can release.

    Each layer runs `warmup` times, and is then captured as often as the order needs. Parameters, their gradients, buffers
    and the state of the random generator are the same afterwards as before.

    Args:
        layers: The modules of a chunk in the order in which they run, or a sequence of modules for each chunk. No module may
            have hooks. All lie on one GPU.
        sample_inputs: The input of each layer, in the same structure: a tensor, or a tuple of positional arguments. Calls
            must have tensors of the same shapes and types. A tensor whose sample requires no gradient gets none.
        order: The forwards and backwards that this rank runs in a step (`pipeline_order`). The default runs one micro-batch
            at a time and is repeated.
        pool: The token of a pool for the graphs, from ``torch.cuda.graph_pool_handle()``. None means pools of their own. A
            token needs ``graphs="per_microbatch"``, because PyTorch requires that graphs in one pool run in the order of
            their captures.
        sample_keywords: The keyword arguments of each layer, in the same structure: a dict, or None.
        scope: The names of the parts (`graph_part`) that are captured. The rest of each layer runs after them, without
            graphs. A layer that has no part is captured as a whole, and with None every layer is.
        graphs: ``"per_microbatch"``: a graph for each micro-batch, 2 x layers x micro-batches in all. ``"shared"``: 2 x
            layers of a chunk x its micro-batches that are in flight at once, summed over the chunks. The results are the
            same.
        tag: The tag of the memory.
        warmup: How often each layer runs before it is captured, at least 1.
        reuse_memory: Whether a graph may get the memory of another graph's results. Without that, the pool grows with the
            micro-batches.

    Raises:
        InvalidArgumentError: The arguments do not fit each other, or a layer has hooks.
        CaptureInProgressError: A capture is under way.
    """
    with errors_of("capture_layers"):
        check_tag(tag)
    refuse_inside_capture("capture_layers")
    scope = _check_scope(scope)
    modules, inputs = check_layers(layers, sample_inputs, sample_keywords)
    if warmup < 1:
        raise InvalidArgumentError(
            f"warmup is {warmup}: it must be 1 or more, because a layer must run before it is captured"
        )
    capture = _Capture(modules, inputs, tuple(order), pool, graphs, tag, reuse_memory, scope)
    with cheap_garbage_collection(), torch.cuda.device(capture.device):
        capture.warm_up(warmup)
        memory = capture.run()
    return LayerGraphs(tuple(order), tag, capture.layers, capture.progress, memory)


class LayerInputs(NamedTuple):
    """The samples, by chunk and layer.

    Attributes:
        device: The GPU of all samples.
        arguments: The structure of each sample.
        samples: The tensors of each sample.
    """

    device: Any
    arguments: tuple[tuple[Arguments, ...], ...]
    samples: tuple[tuple[tuple[Any, ...], ...], ...]


def check_layers(
    layers: Sequence[Any], sample_inputs: Sequence[Any], sample_keywords: Sequence[Any] | None
) -> tuple[tuple[tuple[Any, ...], ...], LayerInputs]:
    """Return the modules by chunk and layer, and their samples.

    Raises:
        InvalidArgumentError: The structures differ; an item is no module; a module has hooks; the tensors are on several
            devices, or not on a GPU.
    """
    one_chunk = all(isinstance(item, torch.nn.Module) and not isinstance(item, torch.nn.ModuleList) for item in layers)
    modules = _by_chunk(layers, one_chunk)
    counts = [len(row) for row in modules]
    samples = _by_chunk(sample_inputs, one_chunk)
    keywords = [[None] * count for count in counts] if sample_keywords is None else _by_chunk(sample_keywords, one_chunk)
    for name, given in (("sample_inputs", samples), ("sample_keywords", keywords)):
        if [len(row) for row in given] != counts:
            raise InvalidArgumentError(
                f"{name} is for {[len(row) for row in given]} layers, but the chunks have {counts} layers"
            )
    if not counts or 0 in counts:
        raise InvalidArgumentError("a chunk has no layer: there is nothing to capture")
    arguments, tensors = [], []
    for chunk, row in enumerate(modules):
        found = [
            _sample(f"chunk {chunk}, layer {layer}", module, samples[chunk][layer], keywords[chunk][layer])
            for layer, module in enumerate(row)
        ]
        arguments.append(tuple(item for item, _ in found))
        tensors.append(tuple(item for _, item in found))
    inputs = LayerInputs(_device(modules, arguments), tuple(arguments), tuple(tensors))
    return tuple(tuple(row) for row in modules), inputs


class _Capture:
    """One call of capture_layers()."""

    def __init__(
        self,
        modules: Sequence[Sequence[Any]],
        inputs: LayerInputs,
        order: tuple[int, ...],
        pool: tuple[int, int] | None,
        graphs: str,
        tag: str,
        reuse: bool,
        scope: Collection[str] | None,
    ) -> None:
        counts = [len(chunk) for chunk in modules]
        self.uses = graph_uses(order, counts, graphs)
        self._pools = _pool_numbers(order, graphs)
        if pool is not None and len(set(self._pools.values())) > 1:
            raise InvalidArgumentError(
                f'pool is {pool}, but the graphs need {len(set(self._pools.values()))} pools: with graphs="shared" leave '
                "pool=None"
            )
        self.progress = Progress(self.uses)
        self._inputs = inputs
        self._tag = tag
        self.device = inputs.device
        self.layers = tuple(
            tuple(
                CapturedLayer(module, chunk, layer, inputs.arguments[chunk][layer], self.progress, tag, scope)
                for layer, module in enumerate(row)
            )
            for chunk, row in enumerate(modules)
        )
        kinds = [[arguments.kinds for arguments in row] for row in inputs.arguments]
        self._static = assign_static_inputs(order, counts, shapes=kinds, graphs=graphs)
        self._tokens = {number: pool or torch.cuda.graph_pool_handle() for number in set(self._pools.values())}
        self._stream = torch.cuda.Stream(self.device)
        self._gradients: dict[tuple[TensorKind, int], Any] = {}
        self._buffers: list[tuple[Any, ...]] = []
        self._capturing = Capturing(self._into, self._gradient, reuse, scope)

    def warm_up(self, times: int) -> None:
        """Run each layer on the stream of the captures.

        Libraries then allocate their workspaces for this stream before the captures, and in ordinary memory.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), autocast_without_cache():
            for row in self.layers:
                for layer in row:
                    samples = self._inputs.samples[layer.chunk][layer.layer]
                    warm_up(layer.module, layer.arguments, samples, times, self._capturing.scope)
        torch.cuda.current_stream().wait_stream(self._stream)

    def run(self) -> MemoryReport:
        """Capture every graph at its first use in the order, and return the report of the memory."""
        self._meter = MemoryMeter(self.device)
        with saver.region(tag=self._tag):
            shapes = cast(tuple[tuple[TensorKind, ...], ...], self._static.shapes)
            self._buffers = [tuple(kind.make() for kind in kinds) for kinds in shapes]
        releases: dict[int, list[Callable[[], None]]] = {}
        with autocast_without_cache():
            for step, use in enumerate(self.uses):
                captured = self._capture(use)
                if captured is not None and self._capturing.reuse:
                    release = captured.release_backward if use.graph.backward else captured.release_forward
                    releases.setdefault(use.last, []).append(release)
                for release in releases.pop(step, ()):
                    release()
        self.progress.skip_backwards(
            {(layer.chunk, layer.layer) for row in self.layers for layer in row if not layer.has_backward}
        )
        passes = (captured for row in self.layers for layer in row for captured in layer.passes.values())
        boundaries = [tensor for captured in passes for tensor in captured.boundaries]
        return self._meter.report(self._buffers, self._gradients.values(), boundaries)

    def _capture(self, use: GraphUse) -> CapturedPass | None:
        """Capture the graph of a use if this is its first use, and return its pass.

        If it is not the first use, return None.
        """
        graph = use.graph
        layer = self.layers[graph.chunk][graph.layer]
        pool = self._pools[graph.backward, graph.chunk, graph.slot]
        if not graph.backward:
            if graph.slot in layer.passes:
                return None
            buffers = self._buffers[self._static.numbers[graph.chunk][use.microbatch][graph.layer]]
            captured = layer.passes[graph.slot] = CapturedPass(layer.arguments, buffers)
            captured.capture_forward(layer.module, pool, self._capturing)
            return captured
        captured = layer.passes[graph.slot]
        if captured.is_backward_captured or not captured.has_backward:
            return None
        captured.capture_backward(pool, self._capturing)
        return captured

    @contextlib.contextmanager
    def _into(self, owner: str, graph: Any, pool: int) -> Iterator[None]:
        with (
            errors_named(owner, _WHY_CAPTURES_FAIL),
            saver.cuda_graph(graph, pool=self._tokens[pool], stream=self._stream, tag=self._tag),
        ):
            yield
        self._meter.add(graph)

    def _gradient(self, kind: TensorKind, number: int) -> Any:
        """Return the static tensor for the gradients of such outputs.

        All layers share the tensor, because each backward reads it only while it runs.
        """
        if (kind, number) not in self._gradients:
            with saver.region(tag=self._tag):
                self._gradients[kind, number] = kind.make()
        return self._gradients[kind, number]


def _pool_numbers(order: tuple[int, ...], graphs: str) -> dict[tuple[bool, int, int], int]:
    """Return the number of the pool that each forward and backward gets, by chunk and slot."""
    uses = graph_uses(order, 1, graphs)  # each chunk as one layer
    if graphs == "per_microbatch":
        return {(use.graph.backward, use.graph.chunk, use.graph.slot): 0 for use in uses}
    memory: dict[Graph, int] = assign_pool_memory(uses)
    overlap = find_overlap(uses, memory)
    assert overlap is None, f"pools are shared by {overlap}"
    return {(graph.backward, graph.chunk, graph.slot): number for graph, number in memory.items()}


def _check_scope(scope: Collection[str] | None) -> frozenset[str] | None:
    if scope is None:
        return None
    if isinstance(scope, str) or not scope or not all(isinstance(name, str) for name in scope):
        raise InvalidArgumentError(
            f"scope is {scope!r}: it must be the names of parts, such as ('attn', 'moe_router'), or None for whole layers"
        )
    return frozenset(scope)


def _by_chunk(given: Sequence[Any], one_chunk: bool) -> list[list[Any]]:
    if one_chunk:
        return [list(given)]
    for chunk, row in enumerate(given):
        if not isinstance(row, (list, tuple, torch.nn.ModuleList)):
            raise InvalidArgumentError(
                f"item {chunk} is a {type(row).__name__}: it must be a sequence, one item for each layer"
            )
    return [list(row) for row in given]


def _sample(owner: str, module: Any, sample: Any, keywords: Mapping[str, Any] | None) -> tuple[Arguments, tuple[Any, ...]]:
    if not isinstance(module, torch.nn.Module):
        raise InvalidArgumentError(f"{owner} is a {type(module).__name__}: it must be a torch.nn.Module")
    owner = f"{owner} ({type(module).__name__})"
    hook = find_hook(module.named_modules())
    if hook is not None:
        raise InvalidArgumentError(
            f"{owner}: {hook}. It would run once, in the capture, and not in replays. Remove it, or register it on a module "
            "around the layer"
        )
    positional = sample if isinstance(sample, tuple) else (sample,)
    arguments = Arguments.of(owner, positional, keywords or {})
    return arguments, arguments.tensors_of(positional, keywords or {})


def _device(modules: Sequence[Sequence[Any]], arguments: Sequence[Sequence[Arguments]]) -> Any:
    devices = {kind.device for row in arguments for item in row for kind in item.kinds}
    devices |= {tensor.device for row in modules for module in row for tensor in (*module.parameters(), *module.buffers())}
    return one_gpu("layers and samples", devices)
