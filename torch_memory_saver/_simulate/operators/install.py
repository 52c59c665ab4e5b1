"""Replaces PyTorch's CUDA implementations, once, when torch has been imported."""

from __future__ import annotations

import inspect
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

__all__ = ["install"]

_VARIABLE = "TMS_SIMULATED_KERNELS"
_CPU = "cpu"

#: Keeps the registrations, which go with it. Empty, not None, after a failure: it is not tried again.
_library: Any = None


def install() -> None:
    """Does nothing unless ``simulate --kernels cpu`` started this process. A release of PyTorch that lacks what is needed is
    left as it is, which stderr says: then its kernels are interpreted."""
    global _library
    if os.environ.get(_VARIABLE, "") != _CPU or _library is not None:
        return
    import torch

    library: Any = torch.library.Library("aten", "IMPL")
    try:
        _replace_all(library)
    except (AttributeError, ImportError, RuntimeError, TypeError) as error:
        library._destroy()
        _library = ()
        print(
            f"simulated GPU: --kernels cpu does not know PyTorch {torch.__version__} ({type(error).__name__}: {error}); its "
            "kernels are interpreted, as with --kernels error",
            file=sys.stderr,
        )
        return
    _library = library
    from torch_memory_saver._simulate.operators import eager, launch, special

    eager.postpone_compiler()
    special.choose_simulated_paths()
    launch.ensure_started()


def _replace_all(library: Any) -> None:
    from torch_memory_saver._simulate.operators import composed, launch, special, table

    replace = _replacing(library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each replacement is announced
        for operator in table.operators():
            kernel = launch.kernel_of(operator) if table.has_cpu_implementation(operator) else composed.kernel_of(operator)
            replace(operator.name()[len("aten::") :], kernel)
        for operator, key in table.of_quantised_tensors():
            replace(operator.name()[len("aten::") :], special.refusal_of_quantised(operator), key)
        special.install(replace)


def _replacing(library: Any) -> Callable[..., None]:
    """The function that makes another one the CUDA implementation of an operator, named without "aten::"."""
    from torch_memory_saver._simulate.operators.eager import eager

    # Releases of PyTorch that lack the argument need none.
    allowed = {"allow_override": True} if "allow_override" in inspect.signature(library.impl).parameters else {}

    def replace(name: str, kernel: Callable[..., Any], key: str = "CUDA") -> None:
        library.impl(name, eager(kernel), key, **allowed)

    return replace
