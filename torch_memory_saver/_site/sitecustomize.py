"""Python imports this module at startup, because ``simulate`` and ``run`` put its folder at the front of ``PYTHONPATH``.

On the simulated GPU it installs PyTorch's operators after the import of torch. Everywhere it makes the requests of TMS_DEBUG
and similar variables apply to a program that never imports torch_memory_saver. They take effect when PyTorch has initialised
CUDA in the process. A process that does not use CUDA does not even import the package for them. A ``sitecustomize`` of the
user runs as it would without this one.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from typing import Any

_FOLDER = os.path.dirname(os.path.abspath(__file__))


def _load(name: str, file: str) -> Any:
    """Load a file of the package that needs nothing else of it."""
    if name not in sys.modules:
        specification = importlib.util.spec_from_file_location(name, os.path.join(os.path.dirname(_FOLDER), file))
        assert specification is not None and specification.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(sys.modules[name])
    return sys.modules[name]


_startup = _load("_torch_memory_saver_startup", "_startup.py")


def _install_operators() -> None:
    with _startup.OwnImports():
        from torch_memory_saver._simulate.operators.install import install

        install()


def _start_with_cuda() -> None:
    """Wrap the function by which PyTorch initialises CUDA, until CUDA is initialised."""
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    initialize = getattr(cuda, "_lazy_init", None)
    if initialize is None:
        _warn("this PyTorch has no torch.cuda._lazy_init, so they take effect at the first use of torch_memory_saver")
        return
    if os.environ.get("TMS_DISABLE") and _is_disabled():
        return
    first = threading.Lock()
    patches = _load("torch_memory_saver._patches", "_patches.py")  # a later import of the package finds it in sys.modules

    def initialize_and_start() -> None:
        initialize()
        if not cuda.is_initialized():  # a call inside of the initialisation
            return
        patches.restore(cuda, "_lazy_init")
        if first.acquire(blocking=False):
            _start()

    patches.replace("torch.cuda._lazy_init", cuda, "_lazy_init", initialize_and_start)


def _is_disabled() -> bool:
    """Ask the native core, which alone reads the variable. `_start` logs a failure of its import."""
    try:
        with _startup.OwnImports():
            from torch_memory_saver import _core

            return _core.get_disabled()
    except Exception:
        return False


def _start() -> None:
    """Start what is requested. A failure must not disturb a program that does not know of this package."""
    try:
        with _startup.OwnImports():
            from torch_memory_saver._engine.background import start_from_environment

            start_from_environment()
    except Exception:
        _warn("they could not be started", exc_info=True)


def _warn(reason: str, exc_info: bool = False) -> None:
    import logging

    logger = logging.getLogger("torch_memory_saver")
    logger.warning("the TMS_* variables of this process: %s", reason, exc_info=exc_info)


if _startup.is_requested(os.environ):
    _startup.after_import_of_torch(_start_with_cuda)
if _startup.SIMULATED in os.environ:
    _startup.after_import_of_torch(_install_operators)
_startup.run_next(_FOLDER)
