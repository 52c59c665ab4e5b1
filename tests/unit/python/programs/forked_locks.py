"""Forks, and prints two lists as JSON: the locks that were found, and those of them that the child still has.

A lock is found from the modules of the package, through its objects and through containers. Its name is its module, the
class of its owner, and its attribute.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import sys
import threading
from collections.abc import Iterator
from functools import partial
from types import MethodType, ModuleType
from typing import Any

import torch_memory_saver as package
from torch_memory_saver._torch.base.steps import InterruptSafeLock

_LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Event, InterruptSafeLock)


def _members(owner: object) -> Iterator[tuple[str, object]]:
    """Yield the names and values of what an object of the package holds."""
    if isinstance(owner, dict):
        yield from (("", value) for value in list(owner.values()))
    elif isinstance(owner, (list, tuple, set, frozenset)):
        yield from (("", value) for value in list(owner))
    elif isinstance(owner, MethodType):
        yield "", owner.__self__
    elif isinstance(owner, partial):
        yield from (("", value) for value in (owner.func, *owner.args, *owner.keywords.values()))
    elif type(owner).__module__.startswith(package.__name__) or getattr(owner, "__name__", "").startswith(package.__name__):
        yield from list(getattr(owner, "__dict__", {}).items())


def _owners(owner: Any) -> list[str]:
    if isinstance(owner, ModuleType):
        return [owner.__name__]
    kinds = [kind for kind in type(owner).__mro__ if kind.__module__.startswith(package.__name__)]
    return [f"{kind.__module__}.{kind.__qualname__}" for kind in kinds]


def find_locks() -> dict[str, list[object]]:
    """Return the locks that can be reached, by their names."""
    found: dict[str, list[object]] = {}
    waiting = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == package.__name__]
    seen: dict[int, object] = {}
    while waiting:
        owner: Any = waiting.pop()
        if id(owner) in seen:
            continue
        seen[id(owner)] = owner
        for name, value in _members(owner):
            if isinstance(value, _LOCKS):
                for each in _owners(owner):
                    found.setdefault(f"{each}.{name}", []).append(value)
            else:
                waiting.append(value)
    return found


def main() -> None:
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not {"_simulate", "_site", "__main__"}.intersection(module.name.split(".")):  # parts of other programs
            try:
                importlib.import_module(module.name)
            except ImportError:  # it needs PyTorch or vLLM
                continue
    from torch_memory_saver._engine import background
    from torch_memory_saver.observe.events import from_environment
    from torch_memory_saver.observe.memory import log, sampler

    folder = sys.argv[1]
    recordings = [sampler.MemorySnapshotSampler(folder), log.MemoryLog(os.path.join(folder, "log.csv"))]
    background.__dict__["recordings"] = recordings  # where find_locks() sees them
    from_environment.start_event_files(folder)
    before = find_locks()
    pid = os.fork()
    if pid == 0:
        after = find_locks()
        kept = [name for name, locks in before.items() if any(one is two for one in locks for two in after.get(name, []))]
        print(json.dumps([sorted(before), sorted(kept)]), flush=True)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


main()
