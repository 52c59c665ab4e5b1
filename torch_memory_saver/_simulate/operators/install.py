"""Replaces PyTorch's CUDA implementations, once, after torch was imported."""

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

#: Owns the registrations and removes them when destroyed. After a failure an empty tuple, so that it is not tried again.
_library: Any = None


def install() -> None:
    """Does nothing unless ``simulate --kernels cpu`` started this process. If this release of PyTorch lacks a required
    interface, its implementations stay in place, its kernels are interpreted, and a message goes to stderr."""
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
    from torch_memory_saver import _core
    from torch_memory_saver._simulate.operators import eager, launch, native, special

    native.set_manager(_core.library_path)
    eager.postpone_compiler()
    special.choose_simulated_paths()
    launch.ensure_started()


def _replace_all(library: Any) -> None:
    from torch_memory_saver._simulate.operators import composed, launch, sparse, special, table

    replace = _replacing(library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns of each replacement
        for operator in table.operators():
            kernel = launch.kernel_of(operator) if table.has_cpu_implementation(operator) else composed.kernel_of(operator)
            replace(operator.name()[len("aten::") :], kernel)
        for operator, key in table.of_quantised_tensors():
            replace(operator.name()[len("aten::") :], special.refusal_of_quantised(operator), key)
        for operator, key in sparse.operators():
            replace(operator.name()[len("aten::") :], sparse.kernel_of(operator, key), key)
        special.install(replace)


def _replacing(library: Any) -> Callable[..., None]:
    """A function that registers a kernel as the CUDA implementation of an operator, named without "aten::"."""
    from torch_memory_saver._simulate.operators.eager import eager

    # Releases of PyTorch without this argument allow the override by default.
    allowed = {"allow_override": True} if "allow_override" in inspect.signature(library.impl).parameters else {}

    def replace(name: str, kernel: Callable[..., Any], key: str = "CUDA") -> None:
        library.impl(name, eager(kernel), key, **allowed)

    return replace
