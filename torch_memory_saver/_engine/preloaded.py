"""Program that the preload library runs in a Python process at the first managed allocation of ``TMS_INIT_ENABLE``
(csrc/preload/interpreter.h).

The process may be a worker that inherits the environment and never imports this package. PyTorch cannot send managed tensors
to other processes then, so this installs what sending needs (``_torch/sharing/sent_memory.py``). The program runs on the
main thread between two lines of the user's program, and on a thread of the native core. In a process without PyTorch the
program does nothing, and imports no module, because the working directory may be on the path of the process.

A failure must not disturb a program that does not know of this package. The library explains the send that fails later.
"""

import sys


def _install_sharing(torch: object) -> None:
    # PyTorch has imported these modules.
    import importlib.util
    import os

    package = os.path.dirname(os.path.dirname(os.fsdecode(__file__)))
    path = os.path.join(package, "_startup.py")
    specification = importlib.util.spec_from_file_location("_torch_memory_saver_startup", path)
    assert specification is not None and specification.loader is not None
    startup = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(startup)
    with startup.OwnImports():
        from torch_memory_saver._engine.process import install_sharing

        install_sharing(torch)


def _run() -> None:
    torch = sys.modules.get("torch")
    if torch is None:
        return
    try:
        _install_sharing(torch)
    except Exception:
        import logging

        logging.getLogger("torch_memory_saver").debug("this process cannot send managed tensors", exc_info=True)


_run()
