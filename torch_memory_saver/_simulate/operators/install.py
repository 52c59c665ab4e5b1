"""Replaces PyTorch's CUDA implementations, once, after torch was imported."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch_memory_saver._simulate.torch_build import check_release

__all__ = ["install"]

#: Owns the registrations and removes them when destroyed.
_library: Any = None


def install() -> None:
    """Replace PyTorch's CUDA implementations of operators. A second call does nothing.

    Raises:
        TorchUnavailableError: The release of PyTorch is not supported. ``simulate`` has checked the PyTorch of its own
            interpreter, but the program may have started another interpreter.
    """
    global _library
    if _library is not None:
        return
    import torch

    check_release(torch.__version__)
    library: Any = torch.library.Library("aten", "IMPL")
    _replace_all(library)
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

    def replace(name: str, kernel: Callable[..., Any], key: str = "CUDA") -> None:
        library.impl(name, eager(kernel), key, allow_override=True)

    return replace
