"""Program that the preload library runs in a Python process at the first managed allocation of ``TMS_INIT_ENABLE``
(csrc/preload/interpreter.h).

The process may be a worker that inherits the environment and never imports this package. PyTorch cannot send managed tensors
to other processes then, so this installs what sending needs (``_torch/sharing.py``). The program runs on the main thread
between two lines of the user's program, and on a thread of the native core. A process without PyTorch is left alone.

A failure must not disturb a program that does not know of this package. The library explains the send that fails later.
"""

import importlib.util
import logging
import os
import pathlib
import sys


def _install_sharing() -> None:
    torch = sys.modules.get("torch")
    if torch is None:
        return
    if importlib.util.find_spec("torch_memory_saver") is None:
        sys.path.append(str(pathlib.Path(os.fsdecode(__file__)).parents[2]))
    from torch_memory_saver._engine.process import install_sharing

    install_sharing(torch)


try:
    _install_sharing()
except Exception:
    logging.getLogger("torch_memory_saver").debug("this process cannot send managed tensors", exc_info=True)
