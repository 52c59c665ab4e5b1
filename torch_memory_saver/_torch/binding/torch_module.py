"""The module torch, imported where it is needed, or an error with the reason and what to do."""

from __future__ import annotations

import importlib
import os
from typing import Any

from torch_memory_saver.errors import TorchUnavailableError

__all__ = ["import_torch", "import_with_device", "is_in_bad_fork", "why_no_device"]

#: Advice for a machine that has no GPU.
_WITHOUT_A_GPU = "on a machine without a GPU, run the program by `python -m torch_memory_saver simulate -- python ...`"


def why_no_device() -> str:
    """Return what leaves this process without a device, and what to do."""
    simulated = os.environ.get("TMS_SIMULATED_DEVICES")
    if simulated == "0":
        return "the simulated machine has none: start it with `simulate --devices 1` or more"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hidden = "" if visible is None else f"CUDA_VISIBLE_DEVICES is {visible!r}: unset it, or name devices that are there"
    if simulated is not None:
        return f"{hidden or 'all are hidden'}; the simulated machine has {simulated}"
    return f"{hidden and hidden + '; otherwise '}check the driver by `doctor`; {_WITHOUT_A_GPU}"


def import_torch(or_else: str = "") -> Any:
    """Return the module torch, imported if necessary. `or_else` is what helps where it is not installed.

    Raises:
        TorchUnavailableError: torch is not installed, or cannot be imported.
    """
    try:
        return importlib.import_module("torch")
    except ModuleNotFoundError as error:
        raise TorchUnavailableError(
            f"this needs PyTorch, which is not installed ({error}): install it{or_else}", operation="initialize"
        ) from error
    except (ImportError, OSError) as error:  # a library that it is linked with is missing
        raise TorchUnavailableError(
            f"this needs PyTorch, whose import failed: {error}. Install what is missing; {_WITHOUT_A_GPU}",
            operation="initialize",
        ) from error


def import_with_device(or_else: str = "") -> Any:
    """Return the module torch, which must find a CUDA device, imported if necessary. `or_else` is as above.

    Raises:
        TorchUnavailableError: torch is not installed, cannot be imported, or finds no CUDA device.
    """
    torch = import_torch(or_else)
    if not torch.cuda.is_available() and not is_in_bad_fork(torch):
        raise TorchUnavailableError(
            f"PyTorch {torch.__version__} has no usable CUDA device: "
            + (why_no_device() if torch.version.cuda else "it is a build without CUDA"),
            operation="initialize",
        )
    return torch


def is_in_bad_fork(torch: Any) -> bool:
    """Return whether this process was forked from one that used CUDA."""
    return bool(getattr(torch.cuda, "_is_in_bad_fork", lambda: False)())
