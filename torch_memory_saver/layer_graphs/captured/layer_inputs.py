"""The layers and samples that capture_layers() was given: brought into one structure, and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from torch_memory_saver.errors import InvalidArgumentError

from .arguments import Arguments
from .module_state import find_hook, one_gpu

__all__ = ["LayerInputs", "check_layers"]


class LayerInputs(NamedTuple):
    """The samples, by chunk and layer.

    Attributes:
        device: The GPU of all of them.
        arguments: Their structure.
        samples: Their tensors.
    """

    device: Any
    arguments: tuple[tuple[Arguments, ...], ...]
    samples: tuple[tuple[tuple[Any, ...], ...], ...]


def check_layers(
    layers: Sequence[Any], sample_inputs: Sequence[Any], sample_keywords: Sequence[Any] | None
) -> tuple[tuple[tuple[Any, ...], ...], LayerInputs]:
    """The modules by chunk and layer, and their samples.

    Raises:
        InvalidArgumentError: The structures differ; something is no module; a module has hooks; the tensors are on several
            devices, or not on a GPU.
    """
    one_chunk = all(isinstance(item, torch.nn.Module) and not isinstance(item, torch.nn.ModuleList) for item in layers)
    modules = _by_chunk(layers, one_chunk)
    counts = [len(row) for row in modules]
    samples = _by_chunk(sample_inputs, one_chunk)
    keywords = [[None] * count for count in counts] if sample_keywords is None else _by_chunk(sample_keywords, one_chunk)
    for name, given in (("sample_inputs", samples), ("sample_keywords", keywords)):
        if [len(row) for row in given] != counts:
            raise InvalidArgumentError(f"{name} is for {[len(row) for row in given]} layers, the chunks have {counts}")
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
