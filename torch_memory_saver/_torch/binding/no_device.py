"""What a message says if PyTorch finds no device: the probable reason, and what to do."""

from __future__ import annotations

import os

__all__ = ["WITHOUT_A_GPU", "why_no_device"]

#: Advice for a machine that has no GPU.
WITHOUT_A_GPU = "on a machine without a GPU, run the program by `python -m torch_memory_saver simulate -- python ...`"


def why_no_device() -> str:
    """Return what leaves this process without a device, and what to do."""
    simulated = os.environ.get("TMS_SIMULATED_DEVICES")
    if simulated == "0":
        return "the simulated machine has none: start it with `simulate --devices 1` or more"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hidden = "" if visible is None else f"CUDA_VISIBLE_DEVICES is {visible!r}: unset it, or name devices that are there"
    if simulated is not None:
        return f"{hidden or 'all are hidden'}; the simulated machine has {simulated}"
    return f"{hidden and hidden + '; otherwise '}check the driver by `doctor`; {WITHOUT_A_GPU}"
