"""The transfer of a captured step's gradients into ``parameter.grad``.

The values are those of eager backwards, bit for bit, and they lie in memory of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from torch_memory_saver.errors import InvalidArgumentError, InvalidStateError

__all__ = ["GradientSums", "Gradients", "OneGradient", "check_parameter_hooks"]

#: A number whose addition changes no other number: 0.0 + -0.0 is 0.0.
_NOTHING = -0.0


class Gradients(Protocol):
    """The gradients of a graph's replay."""

    def check(self) -> None:
        """Raise an error if the gradients could not be accumulated.

        The check changes nothing.
        """

    def begin(self) -> None:
        """Prepare for a replay, before it runs."""

    def end(self) -> None:
        """Accumulate the gradients, after a replay on the same stream."""


class OneGradient:
    """One gradient for each parameter.

    Autograd accumulates the gradients, with the hooks of the parameters.
    """

    def __init__(self, parameters: Sequence[Any], gradients: Sequence[Any]) -> None:
        """Hold the gradients of parameters.

        Args:
            parameters: The parameters that have a gradient.
            gradients: The tensors that each replay writes. Autograd keeps a gradient only if nothing else refers to it.
                These are referred to here, so autograd makes copies of them.
        """
        self._parameters = tuple(parameters)
        self._gradients = tuple(gradients)

    def check(self) -> None:
        """Accept every state of the parameters."""

    def begin(self) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Accumulate the gradients."""
        # A hook may keep the gradient that it is called with.
        given = [
            gradient.clone() if parameter._backward_hooks else gradient
            for parameter, gradient in zip(self._parameters, self._gradients, strict=True)
        ]
        torch.autograd.backward(self._parameters, given)


class GradientSums:
    """Sums over micro-batches, to which the graph adds.

    The sums begin with ``.grad``, because the sum of floating-point numbers depends on the order.
    """

    def __init__(self, owner: str, parameters: Mapping[str, Any]) -> None:
        """Allocate the sums.

        Args:
            owner: The step, for messages.
            parameters: The parameters that have a gradient, by name.
        """
        self._owner = owner
        self._parameters = dict(parameters)
        #: The sums by name of the parameter.
        self.sums = {name: torch.empty_like(parameter.detach()) for name, parameter in parameters.items()}

    def check(self) -> None:
        """Check that the graph can add to each ``.grad``, and that no parameter has a hook.

        Raises:
            InvalidArgumentError: A parameter has a hook.
            InvalidStateError: The graph cannot add to a ``.grad``.
        """
        check_parameter_hooks(self._owner, self._parameters)
        for name, parameter in self._parameters.items():
            old, sums = parameter.grad, self.sums[name]
            if old is not None and (old.layout, old.dtype) != (sums.layout, sums.dtype):
                raise InvalidStateError(
                    f"{self._owner}: the .grad of {name} is {old.dtype} and {old.layout}, and the captured micro-batches "
                    f"add to {sums.dtype} and {sums.layout}. Convert it, or set it to None",
                    operation="layer_graphs",
                )

    def begin(self) -> None:
        """Set the sums to the present gradients."""
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if parameter.grad is None:
                    self.sums[name].fill_(_NOTHING)
                else:
                    self.sums[name].copy_(parameter.grad)

    def add(self, gradients: Mapping[str, Any]) -> None:
        """Add the gradients of a micro-batch.

        This is called within the capture.
        """
        for name, gradient in gradients.items():
            self.sums[name].add_(gradient)

    def end(self) -> None:
        """Copy the sums to the gradients."""
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if parameter.grad is None:
                    parameter.grad = self.sums[name].clone()
                else:
                    parameter.grad.copy_(self.sums[name])


def check_parameter_hooks(owner: str, parameters: Mapping[str, Any]) -> None:
    """Check that no parameter has a hook.

    Raises:
        InvalidArgumentError: A parameter has a hook, which could not run for each micro-batch of one graph.
    """
    for name, parameter in parameters.items():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise InvalidArgumentError(
                f"{owner}: parameter {name} has a hook, which needs the gradient of each micro-batch, but one graph of "
                "several micro-batches has only the sum of the gradients. Remove the hook, or capture with microbatches=1 "
                "and call the step for each micro-batch"
            )
