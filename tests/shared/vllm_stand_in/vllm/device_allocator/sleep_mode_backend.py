"""The abstract class of backends, vLLM's own backend, and the registry."""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib import import_module
from typing import Any


class SleepModeBackend(ABC):
    def __init__(self) -> None:
        self._state = "RUNNING"

    @abstractmethod
    def suspend(self, level: int = 1) -> None: ...

    @abstractmethod
    def resume(self, tags: list[str] | None = None) -> None: ...

    def state(self) -> str:
        return self._state

    def discard(self, tags: tuple[str, ...]) -> None:
        raise RuntimeError(f"{type(self).__name__} cannot discard")

    @classmethod
    def is_supported(cls) -> bool:
        return True

    @classmethod
    def preserves_communicators(cls) -> bool:
        return False

    @classmethod
    def preserves_compiled_artifacts(cls) -> bool:
        return False

    @classmethod
    def preserves_graphs_with_communicators(cls) -> bool:
        return False

    @classmethod
    def supports_durable_storage(cls) -> bool:
        return False


class CuMemBackend(SleepModeBackend):
    def suspend(self, level: int = 1) -> None:
        kept = ("weights", "runtime", "cudagraph")
        _allocator().sleep(offload_tags=kept if level == 1 else kept[1:])
        self._state = "SUSPENDED"

    def resume(self, tags: list[str] | None = None) -> None:
        _allocator().wake_up(tags)
        self._state = "RUNNING"

    def discard(self, tags: tuple[str, ...]) -> None:
        _allocator().discard(tags)
        self._state = "SUSPENDED"


def _allocator() -> Any:
    from vllm.device_allocator import get_mem_allocator_instance

    return get_mem_allocator_instance()


class SleepModeBackendFactory:
    _places: dict[str, tuple[str, str]] = {}  # noqa: RUF012

    @classmethod
    def register_backend(cls, name: str, module_path: str, class_name: str) -> None:
        if name in cls._places:
            raise ValueError(f"there is a backend {name!r} already")
        cls._places[name] = module_path, class_name

    @classmethod
    def get_backend_class(cls, name: str) -> Any:
        if name not in cls._places:
            raise ValueError(f"there is no backend {name!r}, only {sorted(cls._places)}")
        module_path, class_name = cls._places[name]
        return getattr(import_module(module_path), class_name)

    @classmethod
    def create_backend(cls, model_config: Any) -> SleepModeBackend:
        backend = cls.get_backend_class(model_config.sleep_mode_backend)
        if not backend.is_supported():
            raise ValueError(f"the backend {model_config.sleep_mode_backend!r} does not support this platform")
        created: SleepModeBackend = backend()
        return created


SleepModeBackendFactory.register_backend("cumem", __name__, "CuMemBackend")
