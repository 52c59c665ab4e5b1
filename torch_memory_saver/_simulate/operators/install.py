"""Replace PyTorch's CUDA implementations, once, after torch was imported.

torch.compile does not compile the implementations here together with the program's functions. The import of the compiler
takes a second and is delayed until the program uses it.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable
from types import FunctionType
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
    from torch_memory_saver._simulate.operators import native, special
    from torch_memory_saver._simulate.operators.start import ensure_started

    native.set_manager(_core.library_path, _core.INTERFACE)
    _postpone_compiler()
    special.choose_simulated_paths()
    ensure_started()


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
    """Return a function that registers a kernel as the CUDA implementation of an operator, named without "aten::"."""

    def replace(name: str, kernel: Callable[..., Any], key: str = "CUDA") -> None:
        library.impl(name, _eager(kernel), key, allow_override=True)

    return replace


def _eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function without torch.compile's frame evaluation.

    PyTorch's decorator for this would import the compiler.
    """
    import torch

    evaluation = torch._C._dynamo.eval_frame

    def run(*arguments: Any, **keywords: Any) -> Any:
        before = evaluation.set_eval_frame(None)
        try:
            return function(*arguments, **keywords)
        finally:
            evaluation.set_eval_frame(before)

    skip = evaluation._FrameAction.SKIP
    evaluation.set_code_exec_strategy(run.__code__, evaluation._FrameExecStrategy(skip, skip))
    return run


def _postpone_compiler() -> None:
    """Stop PyTorch's meta implementations from importing the compiler before the program has imported it.

    ``torch._compile._disable_dynamo`` wraps them. At its first call, the wrapper imports the compiler to exclude the wrapped
    function from compilation, and stores the resulting function in an attribute of the wrapped function.
    """
    from torch._compile import _disable_dynamo
    from torch._decomp import global_decomposition_table

    wrapper: Any = _disable_dynamo(lambda: None)
    wrappers: dict[int, FunctionType] = {}
    seen: set[int] = set()
    for table in global_decomposition_table.values():
        for function in table.values():
            _find_wrappers(function, wrapper.__code__, wrappers, seen)
    for each in wrappers.values():
        _postpone(each)


def _find_wrappers(function: Any, code: Any, found: dict[int, FunctionType], seen: set[int]) -> None:
    """Collect the functions with this code among the function and the functions in its closure, recursively."""
    if not isinstance(function, FunctionType) or id(function) in seen:
        return
    seen.add(id(function))
    if function.__code__ is code:
        found[id(function)] = function
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # the cell is empty
            _find_wrappers(cell.cell_contents, code, found, seen)


def _postpone(wrapper: FunctionType) -> None:
    place = wrapper.__code__.co_freevars.index("fn")
    wrapped: Any = (wrapper.__closure__ or ())[place].cell_contents

    def run(*arguments: Any, **keywords: Any) -> Any:
        if hasattr(sys.modules.get("torch._dynamo"), "disable"):
            wrapped.__dict__.pop("__dynamo_disable", None)  # another thread may have removed it
            return wrapper(*arguments, **keywords)  # creates PyTorch's own function
        return wrapped(*arguments, **keywords)

    wrapped.__dynamo_disable = run
