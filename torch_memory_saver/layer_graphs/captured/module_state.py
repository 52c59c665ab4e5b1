"""What must stay as it is in a captured module: its parts, their modes and hooks, and where its tensors are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch_memory_saver.errors import InvalidArgumentError

__all__ = ["ModuleState", "find_hook", "one_gpu"]

#: The attributes of a module that have its hooks, and what registers them.
_HOOKS = {
    "_forward_pre_hooks": "register_forward_pre_hook",
    "_forward_hooks": "register_forward_hook",
    "_backward_pre_hooks": "register_full_backward_pre_hook",
    "_backward_hooks": "register_full_backward_hook",
}


def find_hook(parts: Iterable[tuple[str, Any]]) -> str | None:
    """The first hook of these named modules, in words."""
    for name, part in parts:
        if part._forward_pre_hooks or part._forward_hooks or part._backward_pre_hooks or part._backward_hooks:
            registered = next(registers for attribute, registers in _HOOKS.items() if getattr(part, attribute))
            return f"module {name or 'itself'} has a hook ({registered})"
    return None


def one_gpu(owners: str, devices: set[Any]) -> Any:
    """
    Raises:
        InvalidArgumentError: These are not one GPU.
    """
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        raise InvalidArgumentError(
            f"{owners} are on {', '.join(sorted(map(str, devices))) or 'no device'}: they must be on one GPU"
        )
    return next(iter(devices))


class ModuleState:
    """A module as it was when this object was made.

    Attributes:
        parts: The module and all modules in it, by name.
    """

    def __init__(self, module: Any) -> None:
        self.parts: dict[str, Any] = dict(module.named_modules())
        self._training = [part.training for part in self.parts.values()]
        self._tensors = self._look()

    def _look(self) -> dict[tuple[str, str], tuple[int, bool]]:
        """The address of each parameter and buffer with whether it needs a gradient, and which modules are where."""
        found = {}
        for name, part in self.parts.items():
            for table in (part._parameters, part._buffers):
                for key, tensor in table.items():
                    if tensor is not None:
                        found[name, key] = (tensor.data_ptr(), tensor.requires_grad)
            for key, child in part._modules.items():
                found[name, key] = (id(child), True)
        return found

    def changed(self) -> list[str]:
        """The parameters, buffers and modules that are not those of then, by name. A parameter whose requires_grad has
        changed is one."""
        now = self._look()
        if now == self._tensors:
            return []
        keys = now.keys() | self._tensors.keys()
        return sorted(".".join(filter(None, key)) for key in keys if now.get(key) != self._tensors.get(key))

    def other_mode(self) -> str | None:
        """The first module whose mode, train() or eval(), has changed."""
        for (name, part), training in zip(self.parts.items(), self._training, strict=True):
            if part.training != training:
                return name or "itself"
        return None
