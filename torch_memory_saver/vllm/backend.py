"""The sleep mode backend that vLLM creates. It needs vLLM, which imports it when an engine sleeps for the first time."""

from __future__ import annotations

from collections.abc import Callable

from vllm.device_allocator.sleep_mode_backend import SleepModeBackend
from vllm.platforms import current_platform

from .allocator import GRAPHS, WEIGHTS, allocator

__all__ = ["SleepBackend"]

#: Tags whose contents survive at every level: small state that an engine has no other copy of, and captured graphs.
_KEPT = ("runtime", GRAPHS)


class SleepBackend(SleepModeBackend):  # type: ignore[misc]
    """vLLM's interface to the allocator of this package."""

    def suspend(self, level: int = 1) -> None:
        """Release the engine's memory. At level 1 the weights are kept in host memory, at level 2 they are dropped."""
        self._release(allocator.sleep, (WEIGHTS, *_KEPT) if level == 1 else _KEPT)

    def resume(self, tags: list[str] | None = None) -> None:
        """Wake the engine's memory up, see :meth:`SleepAllocator.wake_up`.

        Afterwards the state is "RUNNING", or "SUSPENDED" if some memory is still asleep.
        """
        self._state = "RESUMING"
        try:
            allocator.wake_up(tags)
        finally:
            self._note_state()

    def discard(self, tags: tuple[str, ...]) -> None:
        """Release the memory of tags without keeping its contents."""
        self._release(allocator.discard, tags)

    def _release(self, release: Callable[[tuple[str, ...]], None], tags: tuple[str, ...]) -> None:
        try:
            release(tags)
        except BaseException:
            self._note_state()  # a part may be asleep
            raise
        self._state = "SUSPENDED"

    def _note_state(self) -> None:
        self._state = "SUSPENDED" if allocator.is_asleep else "RUNNING"

    @classmethod
    def is_supported(cls) -> bool:
        """Return whether the platform is CUDA."""
        return bool(current_platform.is_cuda())

    @classmethod
    def preserves_communicators(cls) -> bool:
        """Return True: memory of NCCL is not in vLLM's pools."""
        return True

    @classmethod
    def preserves_compiled_artifacts(cls) -> bool:
        """Return True: compiled code is not in vLLM's pools."""
        return True

    @classmethod
    def supports_durable_storage(cls) -> bool:
        """Return False: a new process cannot restore a suspended engine.

        In vLLM 0.26.0 the flag means that the whole suspended state can be kept beyond the process and restored in a new
        one, and nothing reads it. The load format of this package restores the weights of the checkpoint. Level 1 also keeps
        small state and CUDA graphs, which live in the process.
        """
        return False
