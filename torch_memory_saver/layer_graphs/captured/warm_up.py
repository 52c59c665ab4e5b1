"""Runs a layer before it is captured: at their first use libraries create handles, choose kernels, allocate workspaces."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree

from .arguments import Arguments
from .parts import run_in_scope

__all__ = ["unchanged", "warm_up"]


def warm_up(
    module: Any, arguments: Arguments, tensors: Sequence[Any], times: int, scope: Collection[str] | None = None
) -> None:
    """Runs forward and backward on the current stream. Buffers and the random generator's state are restored, and no
    gradient is accumulated.

    Args:
        module: The layer.
        arguments: Those of its sample.
        tensors: The sample's tensors.
        times: How often.
        scope: The parts that are captured; None: the whole layer.
    """
    with unchanged(module), torch.enable_grad():
        for _ in range(times):
            _run_once(module, arguments, tensors, scope)


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


@contextlib.contextmanager
def unchanged(module: Any) -> Iterator[None]:
    """Restores what running a module changes: its buffers and the state of the random generator."""
    random = torch.cuda.get_rng_state()
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        torch.cuda.set_rng_state(random)
