"""Replaces PyTorch's CUDA implementations, once, when torch has been imported."""

from __future__ import annotations

import os
import warnings
from typing import Any

__all__ = ["install"]

_VARIABLE = "TMS_SIMULATED_KERNELS"
_CPU = "cpu"

#: Keeps the registrations: they go with it.
_library: Any = None


def install() -> None:
    """Does nothing unless ``simulate --kernels cpu`` started this process."""
    global _library
    if os.environ.get(_VARIABLE, "") != _CPU or _library is not None:
        return
    import torch

    from torch_memory_saver._simulate.operators import composed, eager, launch, originals, special, table

    originals.keep()
    _library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each replacement is announced
        for operator in table.operators():
            kernel = launch.kernel_of(operator) if table.has_cpu_implementation(operator) else composed.kernel_of(operator)
            _library.impl(operator.name()[len("aten::") :], eager.eager(kernel), "CUDA", allow_override=True)
        special.install(_library)
    special.choose_simulated_paths()
    launch.ensure_started()
