"""Forward and backward of one micro-batch of a step, with checks for code that a graph cannot contain."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.func import functional_call
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torch_memory_saver.errors import InvalidArgumentError

from .arguments import Arguments, check_plain
from .module_state import find_hook

__all__ = ["MicrobatchResult", "StepProgram", "check_model", "run_microbatch"]


class MicrobatchResult(NamedTuple):
    """The results of a micro-batch.

    Attributes:
        loss: The loss, without history.
        gradients: The gradients, by name of the parameter. Parameters that the loss does not depend on are missing.
    """

    loss: Any
    gradients: dict[str, Any]


class StepProgram(torch.nn.Module):  # type: ignore[misc]
    """A model and the function of its loss as one module, whose result is the loss.

    If the loss is a module with parameters, they belong to this module.
    """

    def __init__(self, model: Any, loss: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, *batch: Any) -> Any:
        """Return the loss of a micro-batch."""
        return self.loss(self.model, *batch)


def check_model(owner: str, program: Any) -> None:
    """Check that a graph can contain the model, and that there is a gradient to compute.

    Raises:
        InvalidArgumentError: The model has something that a graph would leave out, or nothing to compute a gradient for.
    """
    hook = find_hook(program.named_modules())
    if hook is not None:
        raise InvalidArgumentError(
            f"{owner}: {hook}. It would run once, in the capture, and not in replays. Remove it, or move its code into the "
            "loss function"
        )
    for name, part in program.named_modules():
        if isinstance(part, torch.nn.parallel.DistributedDataParallel):
            raise InvalidArgumentError(
                f"{owner}: {name} is a DistributedDataParallel, and a step does not run its reduction of gradients. Capture "
                "the module that it wraps (its attribute module), and reduce .grad after the step"
            )
    if not any(parameter.requires_grad for parameter in program.parameters()):
        raise InvalidArgumentError(
            f"{owner} has no parameter that requires a gradient: there is no backward to capture. Capture a forward with "
            "cuda_graph(), or call requires_grad_()"
        )


def run_microbatch(program: StepProgram, arguments: Arguments, tensors: Sequence[Any]) -> MicrobatchResult:
    """Run forward and backward on the current stream.

    Parameters are used through other tensors with the same memory, so that their hooks do not run and no gradient is
    accumulated.

    Raises:
        InvalidArgumentError: The model or the loss does something that a graph cannot contain.
    """
    owner = arguments.owner
    leaves = {
        name: parameter.detach().requires_grad_(parameter.requires_grad) for name, parameter in program.named_parameters()
    }
    versions = {name: parameter._version for name, parameter in program.named_parameters()}
    batch, _ = arguments.fill(tensors)
    with torch.enable_grad(), _buffers_stay(owner, program), _no_optimizer(owner):
        loss = functional_call(program, leaves, batch)
        _check_loss(owner, loss, leaves)
        _check_leaves(owner, loss, leaves, program)
        sources = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
        # Autograd's own threads drop their last references a moment later, perhaps when a capture has begun.
        with torch.autograd.set_multithreading_enabled(False):
            found = torch.autograd.grad(loss, list(sources.values()), allow_unused=True)
    gradients = {name: each for name, each in zip(sources, found, strict=True) if each is not None}
    _check_results(owner, program, versions, gradients)
    return MicrobatchResult(loss.detach(), gradients)


def _check_loss(owner: str, loss: Any, leaves: dict[str, Any]) -> None:
    if any(leaf.grad is not None for leaf in leaves.values()):
        raise InvalidArgumentError(
            f"{owner}: the loss function has called backward(), which the step calls itself. Return the loss without "
            "calling backward()"
        )
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(type(loss).__name__)
        raise InvalidArgumentError(f"{owner}: the loss function returned {shape}: it must return a tensor with one element")
    check_plain(owner, "the loss", loss)
    if not loss.requires_grad:
        raise InvalidArgumentError(
            f"{owner}: the loss does not depend on any parameter that requires a gradient. Remove detach() and "
            "torch.no_grad() from the code that computes the loss"
        )


def _check_leaves(owner: str, loss: Any, leaves: dict[str, Any], program: StepProgram) -> None:
    """Check that the loss depends on no tensor whose gradient the step would omit."""
    own = {id(leaf) for leaf in leaves.values()}
    for tensor in _leaves_of(loss):
        if id(tensor) not in own:
            name = next((name for name, parameter in program.named_parameters() if parameter is tensor), None)
            what = f"a tensor of shape {list(tensor.shape)} that is no parameter of the model" if name is None else name
            raise InvalidArgumentError(
                f"{owner}: the loss depends on {what}, which was not read from the model that the loss function gets, so "
                "the step would compute no gradient for it. Read parameters from that model, and detach other tensors"
            )


def _leaves_of(loss: Any) -> Iterator[Any]:
    """Yield the tensors for which a backward would accumulate gradients."""
    nodes, seen = [loss.grad_fn], {loss.grad_fn}
    while nodes:
        node = nodes.pop()
        if type(node).__name__ == "AccumulateGrad":
            yield node.variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)


def _check_results(owner: str, program: StepProgram, versions: dict[str, int], gradients: dict[str, Any]) -> None:
    for name, parameter in program.named_parameters():
        if parameter._version != versions[name]:
            raise InvalidArgumentError(
                f"{owner}: the model or the loss function changes {name} in place, and this run has already changed it. A "
                "step computes gradients only: change parameters after the step"
            )
    for name, gradient in gradients.items():
        check_plain(owner, f"the gradient of {name}", gradient)
        if gradient.layout != torch.strided:
            raise InvalidArgumentError(
                f"{owner}: the gradient of {name} is {gradient.layout}, and its size depends on the batch. A graph has "
                "fixed sizes: make the gradient dense (sparse=False)"
            )


@contextlib.contextmanager
def _buffers_stay(owner: str, program: StepProgram) -> Iterator[None]:
    """Check that no buffer is replaced by another tensor, and undo such a replacement."""
    before = [
        (name, part, key, buffer)
        for name, part in program.named_modules()
        for key, buffer in part._buffers.items()
        if buffer is not None
    ]
    replaced: list[tuple[str, Any, str, Any]] = []
    try:
        yield
    finally:
        replaced += [row for row in before if row[1]._buffers.get(row[2]) is not row[3]]
        for _, part, key, buffer in replaced:
            part._buffers[key] = buffer
    if replaced:
        name, _, key, _ = replaced[0]
        raise InvalidArgumentError(
            f"{owner}: the model replaces its buffer {name}.{key} by another tensor, which replays would not do. Change it "
            "in place (buffer.copy_, buffer.add_)"
        )


@contextlib.contextmanager
def _no_optimizer(owner: str) -> Iterator[None]:
    """Refuse steps of optimizers on this thread."""
    thread = threading.get_ident()

    def refuse(optimizer: Any, arguments: Any, keywords: Any) -> None:
        if threading.get_ident() == thread:
            raise InvalidArgumentError(
                f"{owner}: the loss function calls {type(optimizer).__name__}.step(). A step ends with the gradients: they "
                "may be clipped, reduced or added up before the optimizer. Call it after the step"
            )

    handle = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()
