"""The capture of a whole step: forward and backward of a model, of one micro-batch or of all, as one CUDA graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree

from torch_memory_saver import _core
from torch_memory_saver.errors import InvalidArgumentError, InvalidStateError
from torch_memory_saver.options import check_tag, errors_of
from torch_memory_saver.saver import torch_memory_saver as saver

from .arguments import Arguments
from .capture_context import autocast_without_cache, cheap_garbage_collection, errors_named, refuse_inside_capture, unchanged
from .memory import MemoryMeter, MemoryReport
from .module_state import ModuleState, find_hook, one_gpu
from .step_gradients import Gradients, GradientSums, OneGradient, check_parameter_hooks
from .step_program import StepProgram, check_model, run_microbatch
from .weak import weak_tensor

__all__ = ["CapturedStep", "capture_step"]

_WHY_CAPTURES_FAIL = (
    "The model and the loss function must not wait for the GPU (.item(), .cpu(), nonzero(), `if tensor:`). Return the loss "
    "as a tensor and read it after the step. If a layer has to wait for the GPU, capture the others with capture_layers()"
)


class CapturedStep:
    """A step that replays its graph.

    The graph lives as long as this object.

    Attributes:
        model: The model that was captured.
        microbatches: The number of micro-batches in a call.
        tag: The tag of the graph's memory and of the static inputs, for pause() and resume(). Pause it between calls, when
            none of its contents have to be kept.
    """

    def __init__(self, capture: _Capture, graph: Any, losses: Any, gradients: Gradients, memory: MemoryReport) -> None:
        self.model = capture.program.model
        self.microbatches = capture.microbatches
        self.tag = capture.tag
        self._arguments = capture.arguments
        self._state = ModuleState(capture.program)
        self._inputs = capture.inputs
        self._graph = graph
        self._losses = losses
        self._gradients = gradients
        self._memory = memory

    def __call__(self, *batch: Any) -> Any:
        """Compute the loss, and add the gradients to the ``.grad`` of the parameters.

        The gradients are added bit for bit as eager backwards add them. Everything is on the current stream.

        Args:
            batch: The arguments of the sample, with tensors of the same shapes and types. With several micro-batches, the
                batch of all of them.

        Returns:
            The loss, without history. With several micro-batches, their losses, stacked. It is a copy, like the gradients:
                neither a later call nor a pause changes it.

        Raises:
            InvalidArgumentError: The batch does not fit the sample; with several micro-batches: a parameter has a hook.
            InvalidStateError: The memory is paused; gradients are switched off; the model has changed: a parameter or buffer
                was replaced, or a module has got a hook or another mode.
            CaptureInProgressError: The current stream is being captured.
        """
        self._check_state()
        _refuse_with_gradients(self._arguments.owner, batch)
        tensors = self._arguments.tensors_of(batch, {})
        self._gradients.check()
        for static, tensor in zip(self._inputs, tensors, strict=True):
            static.copy_(tensor)
        self._gradients.begin()
        self._graph.replay()
        losses = self._losses.clone()
        self._gradients.end()
        return losses

    def memory_report(self) -> MemoryReport:
        """Return the memory that the graph takes, as it was measured during the capture.

        A pool that the graph shares is counted as a whole.
        """
        return self._memory

    def _check_state(self) -> None:
        owner = self._arguments.owner
        refuse_inside_capture(owner)
        _refuse_without_gradients(owner)
        _refuse_paused(owner, self.tag)
        mode, hook, changed = self._state.other_mode(), find_hook(self._state.parts.items()), self._state.changed()
        why = ""
        if mode is not None:
            why = (
                f"module {mode} was switched between train() and eval() after the capture. Switch it back, call the model "
                "itself, or capture a step in this mode"
            )
        elif hook is not None:
            why = f"{hook}, and had none when it was captured. A replay does not run the hook: remove it"
        elif changed:
            why = (
                f"{', '.join(changed)} changed its address or requires_grad after the capture. The graph reads the old "
                "memory. Copy into the tensor (tensor.copy_) instead of replacing it, or capture again"
            )
        if why:
            raise InvalidStateError(f"{owner}: {why}", operation="layer_graphs")


def capture_step(
    model: Any,
    loss: Callable[..., Any],
    sample: Any,
    *,
    microbatches: int = 1,
    tag: str = "default",
    warmup: int = 3,
    pool: tuple[int, int] | None = None,
) -> CapturedStep:
    """Capture forward and backward of a model as one CUDA graph, in memory that pause() can release.

    The step runs `warmup` times, and is then captured. Parameters, their gradients, buffers and the state of the random
    generator are the same afterwards as before. Autocast and the modes of the modules are those of this call.

    Args:
        model: A module on one GPU, without hooks. Its shapes and its way through the code do not depend on the batch.
        loss: A function that is called as ``loss(model, *sample)`` and returns a tensor with one element. It calls the
            model, and neither ``backward()`` nor an optimizer.
        sample: The batch that one step gets: a tuple, or a single value. Its tensors are on the model's GPU and require no
            gradient. Values that are not tensors are constants of the graph.
        microbatches: The number of micro-batches in the graph. Each tensor of the batch is cut into as many along its first
            dimension, and ``loss`` is called for each of them.
        tag: The tag of the memory.
        warmup: How often the step runs before it is captured, at least 1.
        pool: The token of a pool for the graph, from ``torch.cuda.graph_pool_handle()``. Steps with one pool share its
            memory, for instance steps of several sizes. They may run in any order, but on one stream. None means a pool of
            its own.

    Raises:
        InvalidArgumentError: The model, the loss or the sample has something that a graph cannot contain.
        InvalidStateError: The tag is paused, or gradients are switched off.
        CaptureInProgressError: The current stream is being captured.
    """
    with errors_of("capture_step"):
        check_tag(tag)
    if not isinstance(model, torch.nn.Module):
        raise InvalidArgumentError(f"model is a {type(model).__name__}: it must be a torch.nn.Module")
    if not callable(loss):
        raise InvalidArgumentError(f"loss is a {type(loss).__name__}: it must be a function of the model and the sample")
    owner = f"step ({type(model).__name__})"
    if warmup < 1:
        raise InvalidArgumentError(
            f"{owner}: warmup is {warmup}: it must be 1 or more, because a step must run before it is captured"
        )
    refuse_inside_capture(owner)
    _refuse_without_gradients(owner)
    _refuse_paused(owner, tag)
    program = StepProgram(model, loss)
    check_model(owner, program)
    batch = sample if isinstance(sample, tuple) else (sample,)
    arguments = Arguments.of(owner, batch, {})
    _refuse_with_gradients(owner, batch)
    tensors = arguments.tensors_of(batch, {})
    state = [*program.parameters(), *program.buffers()]
    device = one_gpu(f"{owner}: model and sample", {tensor.device for tensor in (*state, *tensors)})
    _check_microbatches(owner, microbatches, tensors)
    if microbatches > 1:
        check_parameter_hooks(owner, dict(program.named_parameters()))
    with cheap_garbage_collection(), torch.cuda.device(device), autocast_without_cache():
        capture = _Capture(program, arguments, tensors, microbatches, tag)
        capture.warm_up(warmup)
        return capture.run(pool)


class _Capture:
    """One call of capture_step()."""

    def __init__(
        self, program: StepProgram, arguments: Arguments, sample: Sequence[Any], microbatches: int, tag: str
    ) -> None:
        self.program = program
        self.arguments = arguments
        self.microbatches = microbatches
        self.tag = tag
        self.inputs: list[Any] = []
        self._sample = sample
        self._stream = _stream(torch.cuda.current_device())
        self._with_gradient: list[str] = []

    def warm_up(self, times: int) -> None:
        """Run a micro-batch on the stream of the capture.

        Libraries then allocate their workspaces for this stream before the capture, and in ordinary memory.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), unchanged(self.program):
            for number in range(times):
                first = self._microbatches([tensor.detach().clone() for tensor in self._sample])[0]
                names = list(run_microbatch(self.program, self.arguments, first).gradients)
                if number > 0:
                    self._check_names(names)
                self._with_gradient = names
        torch.cuda.current_stream().wait_stream(self._stream)

    def run(self, pool: tuple[int, int] | None) -> CapturedStep:
        """Capture the step."""
        meter = MemoryMeter(self._stream.device)
        owner = self.arguments.owner
        parameters = dict(self.program.named_parameters())
        with_gradient = {name: parameters[name] for name in self._with_gradient}
        with saver.region(tag=self.tag):
            self.inputs = [torch.empty_like(tensor) for tensor in self._sample]
            sums = GradientSums(owner, with_gradient) if self.microbatches > 1 else None
        graph = torch.cuda.CUDAGraph()
        with (
            errors_named(owner, _WHY_CAPTURES_FAIL),
            saver.cuda_graph(graph, pool=pool, stream=self._stream, tag=self.tag),
        ):
            losses, results = self._capture(sums)
        meter.add(graph)
        # No result is read after the end of a call, so other graphs of the pool may use the memory of the results.
        losses = weak_tensor(losses, graph)
        gradients: Gradients = sums or OneGradient(
            [parameters[name] for name in results], [weak_tensor(gradient, graph) for gradient in results.values()]
        )
        results.clear()
        memory = meter.report([tuple(self.inputs)], sums.sums.values() if sums else ())
        return CapturedStep(self, graph, losses, gradients, memory)

    def _capture(self, sums: GradientSums | None) -> tuple[Any, dict[str, Any]]:
        """Run the micro-batches, and return the losses and the gradients that were not added to the sums."""
        losses = []
        gradients: dict[str, Any] = {}
        for tensors in self._microbatches(self.inputs):
            loss, gradients = run_microbatch(self.program, self.arguments, tensors)
            self._check_names(list(gradients))
            losses.append(loss)
            if sums is not None:
                sums.add(gradients)
                gradients.clear()  # the next micro-batch gets the memory
        return losses[0] if sums is None else torch.stack(losses), gradients

    def _microbatches(self, tensors: Sequence[Any]) -> list[list[Any]]:
        """Return the tensors of each micro-batch."""
        if self.microbatches == 1:
            return [list(tensors)]
        rows = [tensor.shape[0] // self.microbatches for tensor in tensors]
        return [
            [tensor.narrow(0, number * length, length) for tensor, length in zip(tensors, rows, strict=True)]
            for number in range(self.microbatches)
        ]

    def _check_names(self, names: list[str]) -> None:
        changed = sorted(set(names) ^ set(self._with_gradient))
        if changed:
            raise InvalidArgumentError(
                f"{self.arguments.owner}: {', '.join(changed)} got a gradient in one run and none in another. A graph "
                "always repeats the run that was captured: remove decisions that differ between runs (Python `if`) from "
                "the model and the loss function"
            )


@functools.cache
def _stream(device: int) -> Any:
    """Return the stream of all captures of steps on a device.

    The captures have one stream, because PyTorch reuses a pool's memory on one stream only.
    """
    return torch.cuda.Stream(device)


def _refuse_with_gradients(owner: str, batch: tuple[Any, ...]) -> None:
    tensors = [leaf for leaf in _pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    for number, tensor in enumerate(tensors):
        if tensor.requires_grad:
            raise InvalidArgumentError(
                f"{owner}: tensor {number} of the batch requires a gradient, but a step computes gradients of parameters "
                "only. Detach the tensor, or move the code that computes it into the model"
            )


def _refuse_without_gradients(owner: str) -> None:
    if not torch.is_grad_enabled():
        raise InvalidStateError(
            f"{owner}: gradients are switched off here (torch.no_grad() or torch.inference_mode()), and a step computes "
            "gradients. Call the model itself instead",
            operation="layer_graphs",
        )


def _refuse_paused(owner: str, tag: str) -> None:
    if _core.tag_info(tag).paused:
        raise InvalidStateError(
            f"{owner}: the memory of its graph is paused: resume tag {tag!r} first", operation="layer_graphs", tag=tag
        )


def _check_microbatches(owner: str, microbatches: int, tensors: Sequence[Any]) -> None:
    if type(microbatches) is not int or microbatches < 1:
        raise InvalidArgumentError(f"{owner}: microbatches is {microbatches!r}: it must be an int of 1 or more")
    if microbatches == 1:
        return
    for number, tensor in enumerate(tensors):
        if tensor.dim() == 0 or tensor.shape[0] == 0 or tensor.shape[0] % microbatches:
            raise InvalidArgumentError(
                f"{owner}: tensor {number} of the batch has the shape {list(tensor.shape)}, which cannot be cut into "
                f"{microbatches} micro-batches of one size along the first dimension. Pad it, or expand it"
            )
