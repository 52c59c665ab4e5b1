"""A captured layer, to be called in place of the module."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from torch_memory_saver import _core
from torch_memory_saver.errors import InvalidStateError
from torch_memory_saver.layer_graphs.plan.buffers import GraphUse

from .arguments import Arguments
from .module_state import ModuleState
from .parts import PartialResults, Resumption
from .passes import CapturedPass
from .progress import Progress

__all__ = ["CapturedLayer"]


class CapturedLayer:
    """A layer that replays its graphs.

    Call it like the module.

    The results lie in the graphs' memory. Outputs are valid until the layer's backward has run for this micro-batch.
    Gradients of inputs are valid until the chunk's backward has run. Clone results that are needed for longer. Gradients of
    parameters are copies.

    The module itself runs, without graphs, if it is called without gradients (``torch.no_grad()``) or after a change between
    ``train()`` and ``eval()``.

    Attributes:
        module: The layer that was captured.
        chunk: Its chunk.
        layer: Its position in the chunk.
    """

    def __init__(
        self,
        module: Any,
        chunk: int,
        layer: int,
        arguments: Arguments,
        progress: Progress,
        tag: str,
        scope: Collection[str] | None = None,
    ) -> None:
        self.module = module
        self.chunk = chunk
        self.layer = layer
        self.arguments = arguments
        self.passes: dict[int, CapturedPass] = {}  # by slot
        self._progress = progress
        self._tag = tag
        self._training = module.training
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._state = ModuleState(module)
        self._resumption = None if scope is None else Resumption(arguments.owner, module, scope)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Run the layer.

        Raises:
            InvalidArgumentError: The arguments do not fit the sample.
            InvalidStateError: Another run comes next in the order; the memory is paused; a pause within the step has
                discarded results that are still read; a parameter or buffer was replaced by another tensor; the forward does
                not call the parts that were captured.
        """
        if not torch.is_grad_enabled() or self.module.training != self._training:
            return self.module(*arguments, **keywords)
        tensors = self.arguments.tensors_of(arguments, keywords)
        owned = [tensor.requires_grad and tensor.is_leaf for tensor in tensors]
        use = self._begin(backward=False)
        run = self.passes[use.graph.slot]
        outputs = _Replay.apply(self, use, run, owned, *tensors, *self._parameters)
        result = run.result(outputs)
        if self._resumption is None or not isinstance(result, PartialResults):
            return result
        if use.microbatch == 0:
            self._resumption.report_differences(result)
        return self._resumption.run(result, arguments, keywords)

    @property
    def has_backward(self) -> bool:
        """Whether anything in the layer, or an input of it, has a gradient."""
        return any(each.has_backward for each in self.passes.values())

    def _begin(self, backward: bool) -> GraphUse:
        info = _core.tag_info(self._tag)
        if info.paused:
            raise InvalidStateError(
                f"{self.arguments.owner}: the memory of its graphs is paused: resume tag {self._tag!r} first",
                operation="layer_graphs",
                tag=self._tag,
            )
        use = self._progress.begin(backward, self.chunk, self.layer, self._tag, info.discards)
        if not backward and use.microbatch == 0:
            self._check_addresses()
        return use

    def _check_addresses(self) -> None:
        """Check that the graphs read the module's parameters and buffers.

        Raises:
            InvalidStateError: A parameter or buffer is another tensor than at the capture.
        """
        changed = self._state.changed()
        if changed:
            raise InvalidStateError(
                f"{self.arguments.owner}: {', '.join(changed)} changed its address or requires_grad after the "
                "capture. The graphs read the old memory. Copy into the tensor (tensor.copy_) instead of replacing it, or "
                "capture again",
                operation="layer_graphs",
            )

    def _run_forward(self, use: GraphUse, run: CapturedPass, tensors: Sequence[Any]) -> tuple[Any, ...]:
        """Replay the forward, for autograd."""
        outputs = run.replay_forward(tensors)
        self._progress.end(use, [output.untyped_storage().data_ptr() for output in outputs])
        return outputs

    def _run_backward(self, run: CapturedPass, gradients: Sequence[Any], owned: Sequence[bool]) -> list[Any]:
        """Replay the backward, for autograd, and return the gradients of the inputs and of the parameters."""
        use = self._begin(backward=True)
        found = run.replay_backward(gradients)
        self._progress.end(use, [gradient.untyped_storage().data_ptr() for gradient in found.inputs if gradient is not None])
        # A leaf keeps its gradient, as a parameter does, so it gets a copy.
        inputs = [
            gradient.clone() if is_owned and gradient is not None else gradient
            for gradient, is_owned in zip(found.inputs, owned, strict=True)
        ]
        return inputs + found.parameters


class _Replay(torch.autograd.Function):  # type: ignore[misc]
    """The graphs as one operation of autograd."""

    @staticmethod
    def forward(
        ctx: Any, layer: CapturedLayer, use: GraphUse, run: CapturedPass, owned: Sequence[bool], *tensors: Any
    ) -> tuple[Any, ...]:
        ctx.layer, ctx.run, ctx.owned = layer, run, owned
        ctx.set_materialize_grads(False)
        outputs = layer._run_forward(use, run, tensors[: len(owned)])
        ctx.mark_non_differentiable(
            *(output for output, has_gradient in zip(outputs, run.differentiable, strict=True) if not has_gradient)
        )
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        return (None, None, None, None, *ctx.layer._run_backward(ctx.run, gradients, ctx.owned))
