"""Process that inherits TMS_INIT_ENABLE=1 and never imports the package: its first managed allocation.

    python unaware.py SCENARIO RUNTIME

The module torch is a stand-in with the functions that are wrapped for sending. The sender keeps the GIL, as torch does.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util  # torch has imported it as well
import os
import sys
import threading
import types
from multiprocessing.reduction import ForkingPickler
from typing import Any

scenario, runtime = sys.argv[1:]
ctypes.PyDLL(runtime, mode=ctypes.RTLD_GLOBAL)
library = ctypes.PyDLL(None)


class Tensor:
    """A stand-in for torch.Tensor."""


class UntypedStorage:
    """A stand-in for torch.UntypedStorage."""

    def _share_cuda_(self) -> str:
        return "handle"


def reduce_tensor(tensor: Tensor) -> tuple[Any, tuple[()]]:
    return Tensor, ()


def make_torch() -> types.ModuleType:
    torch: Any = types.ModuleType("torch")
    torch.__spec__ = importlib.machinery.ModuleSpec("torch", None)
    torch.UntypedStorage = UntypedStorage
    torch.cuda = types.SimpleNamespace(ipc_collect=lambda: None)
    torch.multiprocessing = types.SimpleNamespace(reductions=types.SimpleNamespace(reduce_tensor=reduce_tensor))
    ForkingPickler.register(Tensor, reduce_tensor)
    return torch  # type: ignore[no-any-return]


def allocate() -> None:
    address = ctypes.c_void_p()
    assert library.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(2 << 20)) == 0


def is_installed() -> bool:
    return hasattr(UntypedStorage._share_cuda_, "__wrapped__")


def on_main_thread() -> None:
    """The next line of the program may send already."""
    allocate()
    assert is_installed()
    assert UntypedStorage._share_cuda_.__wrapped__.__name__ == "_share_cuda_"  # type: ignore[attr-defined]


def after_a_change_of_folder() -> None:
    """The new working directory is another user's, who has put modules there."""
    os.chdir(os.environ["FOREIGN"])
    on_main_thread()
    assert "" not in sys.path or importlib.util.find_spec("only_there") is not None


def while_the_main_thread_waits() -> None:
    """It waits in C code, so that it makes no pending call."""
    lock = threading.Lock()
    lock.acquire()

    def work() -> None:
        allocate()
        while not is_installed():
            pass
        lock.release()

    threading.Thread(target=work, daemon=True).start()
    assert lock.acquire(timeout=60)


def fork_before_the_pending_call() -> None:
    """A thread forks, and its child begins with a call that the parent's main thread has not made yet."""
    sys.setswitchinterval(1000)  # no other thread runs before this one waits
    statuses = []

    def work() -> None:
        allocate()
        child = os.fork()
        if child == 0:
            os.sched_yield()  # gives the GIL away and takes it again, which is when Python sees that calls are pending
            os._exit(int(is_installed() or "torch_memory_saver" in sys.modules))
        statuses.append(os.waitpid(child, 0)[1])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert statuses == [0]


def free_bytes() -> int:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    assert library.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total)) == 0
    return free.value


def with_ctypes_only() -> None:
    """A program that uses the runtime itself, and pauses through the C functions."""
    address, size = ctypes.c_void_p(), 8 << 20
    assert library.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(size)) == 0
    assert library.cudaMemset(address, 0x5C, ctypes.c_size_t(size)) == 0
    before = free_bytes()
    assert library.tms_pause(None) == 0
    assert free_bytes() == before + size
    assert library.tms_resume(None) == 0
    assert free_bytes() == before
    host = ctypes.create_string_buffer(size)
    assert library.cudaMemcpy(host, address, ctypes.c_size_t(size), 2) == 0
    assert host.raw == b"\x5c" * size
    assert library.cudaFree(address) == 0
    assert "torch_memory_saver" not in sys.modules


if scenario not in ("without_torch", "with_ctypes_only"):
    sys.modules["torch"] = make_torch()
if scenario == "on_main_thread":
    on_main_thread()
elif scenario == "after_a_change_of_folder":
    after_a_change_of_folder()
elif scenario == "change_of_folder_without_torch":
    del sys.modules["torch"]
    os.chdir(os.environ["FOREIGN"])
    allocate()
elif scenario == "with_ctypes_only":
    with_ctypes_only()
elif scenario == "while_the_main_thread_waits":
    while_the_main_thread_waits()
elif scenario == "fork_before_the_pending_call":
    fork_before_the_pending_call()
elif scenario == "not_enabled":
    allocate()
    assert not is_installed()
    assert "torch_memory_saver" not in sys.modules
else:
    allocate()
    assert not is_installed()
    # With torch, a thread of the library may be in the middle of an import that fails.
    assert scenario != "without_torch" or "torch_memory_saver" not in sys.modules
print("done")
