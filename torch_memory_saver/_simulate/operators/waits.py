"""Operators whose CUDA implementation waits for the device, so that a capture refuses them. The ones here do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_memory_saver._simulate.operators.devices import is_filled_by_mask, masks_in

__all__ = ["wait_of"]


def wait_of(operator: Any) -> Callable[[dict[str, Any]], None] | None:
    """The function that waits for the device if CUDA's implementation does. It takes the arguments by name. During a capture
    it raises PyTorch's exception. None if CUDA's implementation never waits, or the one here waits itself."""
    return _WAITS.get(operator._schema.name.removeprefix("aten::"))


def _of_an_assignment(given: dict[str, Any]) -> None:
    """Counts the places that a mask selects."""
    if masks_in(given["indices"]) and not is_filled_by_mask(given):
        _synchronise(given)


def _of_a_histogram(given: dict[str, Any]) -> None:
    """Finds the limits if none are given."""
    if given.get("min", 0) == given.get("max", 0):
        _copy_to_the_host(given)


def _copy_to_the_host(given: dict[str, Any]) -> None:
    if given["self"].numel():
        given["self"].cpu()


def _synchronise(given: dict[str, Any]) -> None:
    tensor = given["self"] if "self" in given else given["A"]
    torch.cuda.current_stream(tensor.device).synchronize()


_WAITS: dict[str, Callable[[dict[str, Any]], None]] = {
    "_index_put_impl_": _of_an_assignment,
    "_linalg_eigh": _synchronise,
    "bincount": _copy_to_the_host,
    "histc": _of_a_histogram,
}
