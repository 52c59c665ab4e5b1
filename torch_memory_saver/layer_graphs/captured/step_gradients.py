"""Brings the gradients of a captured step into ``parameter.grad``, as eager backwards would: bit for bit, and into memory of
their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from torch_memory_saver.errors import InvalidArgumentError, InvalidStateError

__all__ = ["GradientSums", "Gradients", "OneGradient", "check_parameter_hooks"]

#: What any number can be added to without a change: 0.0 + -0.0 is 0.0.
_NOTHING = -0.0


class Gradients(Protocol):
    """The gradients of a graph's replay."""

    def check(self) -> None:
        """Raises if they could not be accumulated. Changes nothing."""

    def begin(self) -> None:
        """Called before a replay."""

    def end(self) -> None:
        """Called after a replay, on the same stream: accumulates."""


class OneGradient:
    """One for each parameter. Autograd accumulates them, with the hooks of the parameters."""

    def __init__(self, parameters: Sequence[Any], gradients: Sequence[Any]) -> None:
        """
        Args:
            parameters: Those that have a gradient.
            gradients: What each replay writes. Autograd keeps only gradients that nobody else has, so as long as these are
                held here it makes copies of them.
        """
        self._parameters = tuple(parameters)
        self._gradients = tuple(gradients)

    def check(self) -> None:
        """Every state of the parameters will do."""

    def begin(self) -> None:
        """Nothing to do."""

    def end(self) -> None:
        """Accumulates."""
        # A hook may keep what it is called with.
        given = [
            gradient.clone() if parameter._backward_hooks else gradient
            for parameter, gradient in zip(self._parameters, self._gradients, strict=True)
        ]
        torch.autograd.backward(self._parameters, given)


class GradientSums:
    """Sums over micro-batches, to which the graph adds. They begin with ``.grad``, because the sum of floating-point numbers
    depends on the order."""

    def __init__(self, owner: str, parameters: Mapping[str, Any]) -> None:
        """
        Args:
            owner: The step, for messages.
            parameters: Those that have a gradient, by name.
        """
        self._owner = owner
        self._parameters = dict(parameters)
        #: By name of the parameter.
        self.sums = {name: torch.empty_like(parameter.detach()) for name, parameter in parameters.items()}

    def check(self) -> None:
        """
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
        """Fills the sums."""
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if parameter.grad is None:
                    self.sums[name].fill_(_NOTHING)
                else:
                    self.sums[name].copy_(parameter.grad)

    def add(self, gradients: Mapping[str, Any]) -> None:
        """Within the capture: adds those of a micro-batch."""
        for name, gradient in gradients.items():
            self.sums[name].add_(gradient)

    def end(self) -> None:
        """Copies the sums."""
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if parameter.grad is None:
                    parameter.grad = self.sums[name].clone()
                else:
                    parameter.grad.copy_(self.sums[name])


def check_parameter_hooks(owner: str, parameters: Mapping[str, Any]) -> None:
    """
    Raises:
        InvalidArgumentError: A parameter has a hook, which could not run for each micro-batch of one graph.
    """
    for name, parameter in parameters.items():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise InvalidArgumentError(
                f"{owner}: parameter {name} has a hook, and one graph of several micro-batches has only the sum of their "
                "gradients. Remove the hook, or capture with microbatches=1 and call the step for each micro-batch"
            )
