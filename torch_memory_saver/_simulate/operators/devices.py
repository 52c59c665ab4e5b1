"""Checks of the arguments' devices, with PyTorch's messages."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["check_host_arguments", "different_devices", "elsewhere", "is_filled_by_mask", "masks_in"]

_MASKS = (torch.bool, torch.uint8)
_EXPECTED = "Expected all tensors to be on the same device, but "
#: Arguments that may not be host tensors even if other arguments may.
_NEVER_OF_THE_HOST = ("index", "mask")


def different_devices(first: torch.device, second: torch.device) -> RuntimeError:
    """The error of an operator that takes numbers of the host. It names the GPU first."""
    first, second = (second, first) if first.type == "cpu" else (first, second)
    return RuntimeError(f"{_EXPECTED}found at least two devices, {first} and {second}!")


def elsewhere(argument: str, found: torch.device, others: torch.device, operator: str) -> RuntimeError:
    """The error of an operator that compares the devices of all arguments."""
    return RuntimeError(
        f"{_EXPECTED}got {argument} is on {found}, different from other tensors on {others} "
        f"(when checking argument in method wrapper_CUDA_{operator})"
    )


def check_host_arguments(operator: str, given: dict[str, Any]) -> None:
    """Checks the arguments of an operator that takes some host tensors.

    Raises:
        RuntimeError: An index or a mask, or the values of an assignment, are on the host.
    """
    for name in _NEVER_OF_THE_HOST:
        if _is_of_the_host(given.get(name)):
            here = next((each.device for each in _tensors(given) if each.is_cuda), torch.device("cuda"))
            if operator in ("masked_fill", "masked_fill_"):
                raise RuntimeError(
                    f"expected self and mask to be on the same device, but got mask on cpu and self on {here}"
                )
            raise elsewhere(name, torch.device("cpu"), here, operator)
    if (
        "indices" in given
        and _is_of_the_host(given.get("values"))
        and given["values"].dim()
        and not is_filled_by_mask(given)
    ):
        raise different_devices(given["self"].device, given["values"].device)


def is_filled_by_mask(given: dict[str, Any]) -> bool:
    """Whether an assignment is done as masked_fill: of one element of the host, by one mask."""
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
    """The masks among indices, which may be None."""
    return [each for each in indices if each is not None and each.dtype in _MASKS]


def _is_of_the_host(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"


def _tensors(given: dict[str, Any]) -> list[torch.Tensor]:
    return [each for each in given.values() if isinstance(each, torch.Tensor)]
