"""Stand-ins for what the NCCL hook suspends: PyTorch's process groups, and NCCL libraries with communicators by handle."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Container
from typing import Any

from built import LIBRARIES

__all__ = ["HELD", "Backend", "Gloo", "Group", "Nccl", "OldBackend"]

#: What a rank of a simulated communicator holds of its device, bytes.
HELD = 16 << 20
_TIMEOUT_S = 60
_PERSISTENT_BYTES = 2


class Backend:
    """ProcessGroupNCCL of PyTorch 2.12: suspend() and resume() are collective, and not to be called twice."""

    def __init__(self, log: list[str], name: str, ranks: threading.Barrier | None = None, version: Any = (2, 29, 7)) -> None:
        self.log, self.own_name, self.ranks, self.version = log, name, ranks, version
        self.is_suspended = False
        self.kept_bytes = 0
        self.raises: BaseException | None = None
        self.raises_after: BaseException | None = None  # as a signal handler does when the call has returned
        self.before: Callable[[], object] = lambda: None  # called by suspend() and resume()
        self.pointer = 1
        self.type_name = "nccl"

    def name(self) -> str:
        return self.type_name

    def get_runtime_nccl_version(self) -> tuple[int, ...]:
        return tuple(self.version)

    def _comm_ptr(self) -> int:
        return self.pointer

    def memory_stats(self) -> dict[str, int]:
        total = (16 << 20) + self.kept_bytes
        return {"suspend": 16 << 20, "suspended": int(self.is_suspended), "persist": self.kept_bytes, "total": total}

    def suspend(self) -> None:
        self._change("suspend", True)

    def resume(self) -> None:
        self._change("resume", False)

    def _change(self, call: str, suspended: bool) -> None:
        before, self.before = self.before, lambda: None
        before()
        if self.raises is not None:
            raise self.raises
        assert self.is_suspended is not suspended, f"{call} twice"
        if self.ranks is not None:
            self.ranks.wait(_TIMEOUT_S)
        self.is_suspended = suspended
        self.log.append(f"{call} {self.own_name}")
        if self.raises_after is not None:
            raise self.raises_after


class OldBackend:
    """ProcessGroupNCCL before PyTorch 2.12."""

    def name(self) -> str:
        return "nccl"


class Gloo:
    def name(self) -> str:
        return "gloo"


class Group:
    def __init__(self, name: str, backend: Any) -> None:
        self.group_name = name
        self.backend = backend

    def _get_backend(self, device: Any) -> Any:
        if self.backend is None:
            raise RuntimeError("No backend type associated with device type cuda")
        return self.backend


class Function:
    """A function of a library, written in Python."""

    restype: Any = ctypes.c_int
    argtypes: Any = None

    def __init__(self, body: Callable[..., int]) -> None:
        self.body = body

    def __call__(self, *arguments: Any) -> int:
        return self.body(*arguments)


class Nccl(ctypes.CDLL):
    """The simulated NCCL, loaded as a program does, from a file of another name.

    Args:
        file: Path that the library seems to have.
        version: Code that ncclGetVersion gives, in place of the simulated NCCL's.
        without: Functions that the library does not have.
        kept_bytes: Persistent memory of each communicator, in bytes.
        in_progress: How often a suspended communicator is not ready yet, as one that does not block.
    """

    def __init__(
        self,
        file: str = "/opt/nccl/libnccl.so.2",
        version: int | None = None,
        without: Container[str] = (),
        kept_bytes: int = 0,
        in_progress: int = 0,
    ) -> None:
        super().__init__(str(LIBRARIES["simulator"]))
        self._name = file
        self.version, self.without, self.kept_bytes, self.in_progress = version, without, kept_bytes, in_progress
        self.polled = 0

    def __getitem__(self, name: Any) -> Any:
        if name in self.without:
            raise AttributeError(f"undefined symbol: {name}")
        body = getattr(type(self), f"_{name}", None)
        return super().__getitem__(name) if body is None else Function(functools.partial(body, self))

    def _ncclGetVersion(self, code: Any) -> int:
        if self.version is None:
            return int(super().__getitem__("ncclGetVersion")(code))
        code._obj.value = self.version
        return 0

    def _ncclCommMemStats(self, handle: int, which: int, value: Any) -> int:
        result = int(super().__getitem__("ncclCommMemStats")(ctypes.c_void_p(handle), which, value))
        if which == _PERSISTENT_BYTES:
            value._obj.value = self.kept_bytes
        return result

    def _ncclCommSuspend(self, handle: Any, flags: int) -> int:
        if isinstance(handle, int):
            handle = ctypes.c_void_p(handle)
        result = int(super().__getitem__("ncclCommSuspend")(handle, flags))
        return 7 if self.in_progress else result

    def _ncclCommGetAsyncError(self, handle: int, state: Any) -> int:
        self.polled += 1
        state._obj.value = 7 if self.polled < self.in_progress else 0
        return 0
