"""Python imports this module at startup, because ``simulate`` puts its folder at the front of ``PYTHONPATH``.

After the import of torch, it installs the operators of the simulated GPU. A ``sitecustomize`` of the user runs as it would
without this one.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

_FOLDER = os.path.dirname(os.path.abspath(__file__))


def _load_shared() -> Any:
    path = os.path.join(os.path.dirname(os.path.dirname(_FOLDER)), "_startup.py")
    specification = importlib.util.spec_from_file_location("_torch_memory_saver_startup", path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


_startup = _load_shared()


def _install_operators() -> None:
    with _startup.OwnImports():
        from torch_memory_saver._simulate.operators.install import install

        install()


_startup.after_import_of_torch(_install_operators)
_startup.run_next(_FOLDER)
