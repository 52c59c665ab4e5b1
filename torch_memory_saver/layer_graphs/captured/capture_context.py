"""Functions that prepare a capture, and the context managers in which it runs.

A layer runs before its capture. During the capture, errors are named, casts are not kept, and garbage collection is cheap.

A layer runs before its capture because libraries create handles, choose kernels and allocate workspaces at their first use.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree

from torch_memory_saver.errors import CaptureInProgressError, InvalidArgumentError, TorchMemorySaverError

from .arguments import Arguments
from .parts import run_in_scope

__all__ = [
    "autocast_without_cache",
    "cheap_garbage_collection",
    "errors_named",
    "refuse_inside_capture",
    "unchanged",
    "warm_up",
]


def warm_up(
    module: Any, arguments: Arguments, tensors: Sequence[Any], times: int, scope: Collection[str] | None = None
) -> None:
    """Run forward and backward on the current stream.

    Buffers and the random generator's state are restored, and no gradient is accumulated.

    Args:
        module: The layer.
        arguments: The arguments of its sample.
        tensors: The sample's tensors.
        times: The number of runs.
        scope: The parts that are captured. None means the whole layer.
    """
    with unchanged(module), torch.enable_grad():
        for _ in range(times):
            _run_once(module, arguments, tensors, scope)


@contextlib.contextmanager
def unchanged(module: Any) -> Iterator[None]:
    """Restore everything that running a module changes: its buffers and the state of the random generator."""
    random = torch.cuda.get_rng_state()
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        torch.cuda.set_rng_state(random)


def refuse_inside_capture(owner: str) -> None:
    """Raise an error if the current stream is being captured.

    Raises:
        CaptureInProgressError: The current stream is being captured.
    """
    if torch.cuda.is_current_stream_capturing():
        raise CaptureInProgressError(
            f"{owner}: the current stream is being captured, and a capture cannot contain another capture, nor a replay of "
            "captured layers. End the capture first",
            operation="layer_graphs",
        )


@contextlib.contextmanager
def errors_named(owner: str, advice: str) -> Iterator[None]:
    """Turn errors of a capture into errors that name what is captured.

    Args:
        owner: What is captured.
        advice: What to do if the capture waits for the GPU, which is why most captures fail.

    Raises:
        InvalidArgumentError: The capture failed. The message contains the first failure. Errors of this package, and a lack
            of memory, are raised unchanged.
    """
    outer = sys.exc_info()[1]
    try:
        yield
    except RuntimeError as error:
        first = _first(error, outer)
        if isinstance(first, (TorchMemorySaverError, torch.OutOfMemoryError)):
            raise first from None
        text = (str(first).splitlines() or [type(first).__name__])[0].rstrip(".")
        raise InvalidArgumentError(f"{owner} cannot be captured: {text}. {advice}") from error


def _first(error: BaseException, outer: BaseException | None) -> BaseException:
    """Return the first failure, because the end of an invalidated capture fails as well.

    An exception that was being handled before the capture is not part of the failure.
    """
    while error.__context__ is not None and error.__context__ is not outer:
        error = error.__context__
    return error


@contextlib.contextmanager
def autocast_without_cache() -> Iterator[None]:
    """Switch autocast's cache off, so that no cast of a parameter is kept from one graph to another."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


@contextlib.contextmanager
def cheap_garbage_collection() -> Iterator[None]:
    """Collect garbage, such as unused graphs.

    Some releases of PyTorch collect garbage before each capture. Objects that exist already are frozen, so that these
    collections skip them.
    """
    gc.collect()
    if gc.get_freeze_count():  # frozen by the program, or by Python 3.12 when it starts
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _run_once(module: Any, arguments: Arguments, tensors: Sequence[Any], scope: Collection[str] | None) -> None:
    leaves = [
        tensor.detach().clone().requires_grad_(kind.requires_grad)
        for tensor, kind in zip(tensors, arguments.kinds, strict=True)
    ]
    parameters = {
        name: parameter.detach().requires_grad_(parameter.requires_grad) for name, parameter in module.named_parameters()
    }
    positional, keywords = arguments.fill(leaves)
    result = run_in_scope(arguments.owner, module, scope, parameters, positional, keywords, is_warm_up=True)
    outputs = _pytree.tree_leaves(result)
    ends = [output for output in outputs if isinstance(output, torch.Tensor) and output.requires_grad]
    sources = [tensor for tensor in (*leaves, *parameters.values()) if tensor.requires_grad]
    if ends and sources:
        torch.autograd.grad(ends, sources, [torch.zeros_like(end) for end in ends], allow_unused=True)
