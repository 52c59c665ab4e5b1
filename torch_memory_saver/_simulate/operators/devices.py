"""Checks of the arguments' devices, with PyTorch's messages."""

from __future__ import annotations

from typing import Any

import torch

__all__ = [
    "COPIES_NUMBERS",
    "check_arguments",
    "different_devices",
    "is_filled_by_mask",
    "masks_in",
    "mismatch",
    "numbers_copied",
]

_MASKS = (torch.bool, torch.uint8)
_EXPECTED = "Expected all tensors to be on the same device, but "
#: Arguments that may not be host tensors even if other arguments may.
_NEVER_OF_THE_HOST = ("index", "mask")
#: Arguments that PyTorch copies to the operator's GPU if they have no dimensions and are on another one.
COPIES_NUMBERS = {
    "fill": ("value",),
    "fill_": ("value",),
    "index_put": ("values",),
    "index_put_": ("values",),
    "_index_put_impl_": ("values",),
    "_unsafe_index_put": ("values",),
    "masked_fill": ("value",),
    "masked_fill_": ("value",),
    "where": ("self", "other"),
}


def numbers_copied(operator: str, given: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the numbers on another GPU than the first argument, by their argument, copied to that GPU. `operator` is a key
    of COPIES_NUMBERS."""
    here = next(iter(given.values())).device
    if here.type != "cuda":
        return {}
    numbers = {name: given.get(name) for name in COPIES_NUMBERS[operator]}
    return {
        name: value.to(here)
        for name, value in numbers.items()
        if isinstance(value, torch.Tensor) and value.is_cuda and value.dim() == 0 and value.device != here
    }


def mismatch(
    operator: str, argument: str, tensor: torch.Tensor, others: torch.device, *, written: bool, compares: bool
) -> RuntimeError:
    """Return the error for a tensor that is not on the device of the tensors before it.

    Args:
        argument: Name of the argument that is or contains the tensor.
        written: Whether the operator writes to the argument.
        compares: Whether the operator compares the devices of all arguments, and takes no numbers of the host.
    """
    if argument == "indices":
        return RuntimeError(f"indices should be either on cpu or on the same device as the indexed tensor ({others})")
    found = tensor.device
    if operator.startswith("_foreach_") and argument == "other" and tensor.is_cuda and tensor.dim() == 0:
        return RuntimeError(f"scalar tensor expected to be on {others} but is on {found}")
    if compares:
        return _elsewhere(argument, found, others, operator)
    return different_devices(found, others) if written else different_devices(others, found)


def different_devices(first: torch.device, second: torch.device) -> RuntimeError:
    """Return the error of an operator that takes numbers of the host. It names the GPU first."""
    first, second = (second, first) if first.type == "cpu" else (first, second)
    return RuntimeError(f"{_EXPECTED}found at least two devices, {first} and {second}!")


def _elsewhere(argument: str, found: torch.device, others: torch.device, operator: str) -> RuntimeError:
    """Return the error of an operator that compares the devices of all arguments."""
    return RuntimeError(
        f"{_EXPECTED}got {argument} is on {found}, different from other tensors on {others} "
        f"(when checking argument in method wrapper_CUDA_{operator})"
    )


def check_arguments(operator: str, given: dict[str, Any]) -> None:
    """Check the arguments of an operator that takes some host tensors, or a mask.

    Raises:
        RuntimeError: An index or a mask, or the values of an assignment, are on the host; or the mask of a masked_fill is on
            another GPU.
    """
    if operator in ("masked_fill", "masked_fill_") and (found := given["mask"].device) != (here := given["self"].device):
        raise RuntimeError(f"expected self and mask to be on the same device, but got mask on {found} and self on {here}")
    for name in _NEVER_OF_THE_HOST:
        if _is_of_the_host(given.get(name)):
            here = next((each.device for each in _tensors(given) if each.is_cuda), torch.device("cuda"))
            raise _elsewhere(name, torch.device("cpu"), here, operator)
    if (
        "indices" in given
        and _is_of_the_host(given.get("values"))
        and given["values"].dim()
        and not is_filled_by_mask(given)
    ):
        raise different_devices(given["self"].device, given["values"].device)


def is_filled_by_mask(given: dict[str, Any]) -> bool:
    """Return whether an assignment is done as masked_fill: of one element of the host, by one mask."""
    indices = [each for each in given["indices"] if each is not None]
    values = given["values"]
    return bool(
        values.device.type == "cpu"
        and values.numel() == 1
        and not given.get("accumulate")
        and len(indices) == len(masks_in(indices)) == 1
        and indices[0].device == given["self"].device
    )


def masks_in(indices: Any) -> list[torch.Tensor]:
    """Return the masks among `indices`. An index may be None."""
    return [each for each in indices if each is not None and each.dtype in _MASKS]


def _is_of_the_host(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"


def _tensors(given: dict[str, Any]) -> list[torch.Tensor]:
    return [each for each in given.values() if isinstance(each, torch.Tensor)]
