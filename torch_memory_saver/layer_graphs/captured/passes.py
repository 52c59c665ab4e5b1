"""One layer's forward and backward as two CUDA graphs, for the micro-batches of one slot.

A pass is captured in this order: its forward, then its backward. The results of each of them are released once later
captures may overwrite them. The caller decides when that is, and runs the replays in an order for which that is right.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree

from torch_memory_saver._services import storages_of
from torch_memory_saver.errors import InvalidStateError

from .arguments import Arguments, TensorKind, check_plain, is_same_tensor
from .parts import run_in_scope
from .weak import weak_tensor

__all__ = ["CapturedPass", "Capturing", "Gradients"]


class Capturing(NamedTuple):
    """The functions and settings that captures get from their caller.

    Attributes:
        into: Returns the context of a capture, for its owner, the graph, and the number of the pool.
        gradient: Returns the static tensor for the gradient of an output. Its arguments are the kind of the output, and the
            number of the output among those of this kind in its layer, from 0.
        reuse: Whether results are released.
        scope: The parts that are captured. None means whole layers.
    """

    into: Callable[[str, Any, int], AbstractContextManager[None]]
    gradient: Callable[[TensorKind, int], Any]
    reuse: bool
    scope: Collection[str] | None = None


class Gradients(NamedTuple):
    """The gradients that a replayed backward has computed.

    Attributes:
        inputs: The gradients of the tensors among the arguments. Each may be None. They lie in the pool.
        parameters: The gradients of the parameters. Each may be None. They are copies.
    """

    inputs: list[Any]
    parameters: list[Any]


class CapturedPass:
    """A forward and a backward that share the results of the forward.

    Attributes:
        inputs: The static inputs. Contents that are already there are not copied.
        differentiable: For each output tensor, whether it has a gradient.
        has_backward: Whether there is anything to compute in the backward.
    """

    def __init__(self, arguments: Arguments, inputs: Sequence[Any]) -> None:
        self._arguments = arguments
        self.inputs = tuple(inputs)
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        self.is_forward_captured = self.is_backward_captured = False

    # -- capture -------------------------------------------------------------------------------------------------------

    def capture_forward(self, module: Any, pool: int, capturing: Capturing) -> None:
        """Capture the forward.

        Parameters are used through other tensors with the same memory, so that hooks of the parameters and the accumulation
        of their gradients do not get into the graph.
        """
        kinds = self._arguments.kinds
        leaves = [
            tensor.detach().requires_grad_(kind.requires_grad) for tensor, kind in zip(self.inputs, kinds, strict=True)
        ]
        parameters = {
            name: parameter.detach().requires_grad_(parameter.requires_grad) for name, parameter in module.named_parameters()
        }
        arguments, keywords = self._arguments.fill(leaves)
        saved: set[int] = set()
        with capturing.into(self._arguments.owner, self._forward, pool), torch.enable_grad(), _saved_tensors_noted(saved):
            result = run_in_scope(self._arguments.owner, module, capturing.scope, parameters, arguments, keywords)
        flat, self._structure = _pytree.tree_flatten(result)
        self._constants = tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in flat)
        self._is_tensor = tuple(isinstance(leaf, torch.Tensor) for leaf in flat)
        self.outputs = [leaf for leaf in flat if isinstance(leaf, torch.Tensor)]
        for number, output in enumerate(self.outputs):
            check_plain(self._arguments.owner, f"tensor {number} of the result", output)
        self.differentiable = tuple(output.requires_grad for output in self.outputs)
        self._is_saved = tuple(output.untyped_storage().data_ptr() in saved for output in self.outputs)
        self._sources = [leaf if leaf.requires_grad else None for leaf in leaves]
        self._parameters = [parameter for parameter in parameters.values() if parameter.requires_grad]
        needs = any(source is not None for source in self._sources) or bool(self._parameters)
        self.has_backward = needs and any(self.differentiable)
        self.is_forward_captured = True

    def capture_backward(self, pool: int, capturing: Capturing) -> None:
        """Capture the backward."""
        ends = [output for output in self.outputs if output.requires_grad]
        kinds = [TensorKind.of(output.detach()) for output in ends]
        self.output_gradients = tuple(
            capturing.gradient(kind, kinds[:number].count(kind)) for number, kind in enumerate(kinds)
        )
        sources = [source for source in self._sources if source is not None] + self._parameters
        static = {tensor.untyped_storage().data_ptr() for tensor in (*self.output_gradients, *self.inputs, *self.outputs)}
        # Autograd's own threads drop their last references a moment later, perhaps after the next capture has begun.
        with capturing.into(self._arguments.owner, self._backward, pool), torch.autograd.set_multithreading_enabled(False):
            found = torch.autograd.grad(ends, sources, self.output_gradients, allow_unused=True)
            # A gradient that a layer passes on unchanged must not stay in a tensor that other graphs write.
            found = [
                each.clone() if each is not None and each.untyped_storage().data_ptr() in static else each for each in found
            ]
        remaining = iter(found)
        self._input_gradients = [None if source is None else next(remaining) for source in self._sources]
        self._parameter_gradients = list(remaining)
        del self._sources, self._parameters
        self.is_backward_captured = True

    @property
    def boundaries(self) -> list[Any]:
        """The outputs and the gradients of the inputs, which other layers get."""
        gradients = self._input_gradients if self.is_backward_captured else []
        return [*self.outputs, *(gradient for gradient in gradients if gradient is not None)]

    def release_forward(self) -> None:
        """Let later captures use the memory of the outputs, and of the tensors that the backward has read."""
        self.outputs = [weak_tensor(output, self._forward) for output in self.outputs]

    def release_backward(self) -> None:
        """Let later captures use the memory of the gradients."""
        self._input_gradients, self._parameter_gradients = (
            [None if each is None else weak_tensor(each, self._backward) for each in gradients]
            for gradients in (self._input_gradients, self._parameter_gradients)
        )

    # -- replay --------------------------------------------------------------------------------------------------------

    def replay_forward(self, tensors: Sequence[Any]) -> tuple[Any, ...]:
        """Run the forward for these inputs, and return the outputs.

        The outputs lie in the pool, and are valid until the backward has run.
        """
        for static, tensor in zip(self.inputs, tensors, strict=True):
            if not is_same_tensor(tensor, static):
                static.copy_(tensor)
        self._forward.replay()
        self._versions = [output._version for output in self.outputs]
        return tuple(output.detach() for output in self.outputs)

    def result(self, outputs: Sequence[Any]) -> Any:
        """Return the result of the layer, with these output tensors."""
        remaining = iter(outputs)
        leaves = [
            next(remaining) if is_tensor else constant
            for is_tensor, constant in zip(self._is_tensor, self._constants, strict=True)
        ]
        return _pytree.tree_unflatten(leaves, self._structure)

    def replay_backward(self, gradients: Sequence[Any]) -> Gradients:
        """Run the backward for the gradients of the outputs.

        None stands for a gradient of zero.

        Raises:
            InvalidStateError: An output that the backward reads was changed in place.
        """
        self._check_versions()
        ends = [gradient for gradient, has_one in zip(gradients, self.differentiable, strict=True) if has_one]
        for static, gradient in zip(self.output_gradients, ends, strict=True):
            if gradient is None:
                static.zero_()
            elif not is_same_tensor(gradient, static):
                static.copy_(gradient)
        self._backward.replay()
        # AccumulateGrad keeps the tensor that it gets as .grad, and the next replay would overwrite it.
        return Gradients(
            [None if each is None else each.detach() for each in self._input_gradients],
            [None if each is None else each.clone() for each in self._parameter_gradients],
        )

    def _check_versions(self) -> None:
        for number, (output, version) in enumerate(zip(self.outputs, self._versions, strict=True)):
            if self._is_saved[number] and output._version != version:
                raise InvalidStateError(
                    f"{self._arguments.owner}: output {number} was changed in place after the layer had returned it, but "
                    "the layer's backward needs the original values. Change a clone of it instead",
                    operation="layer_graphs",
                )


@contextlib.contextmanager
def _saved_tensors_noted(addresses: set[int]) -> Iterator[None]:
    """Record the storages that autograd saves for the backward, also those of quantised weights."""

    def note(tensor: Any) -> Any:
        addresses.update(storage.data_ptr() for storage in storages_of(torch, [tensor]))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield
