"""Uses PyTorch with the package, and prints as JSON which callables of all modules are others than before.

python patches.py plain|torch|preload

`plain` uses PyTorch in the same way without the package: what changes then is PyTorch's own doing. `preload` is for a
process with TMS_INIT_ENABLE=1.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import types
import warnings
from collections.abc import Iterator
from importlib import import_module
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

MODE = sys.argv[1]
#: A place: the identity of the object that has the name, and the name.
Place = tuple[int, str]
SIZE = 1 << 20


def places() -> Iterator[tuple[Place, str, Any]]:
    """Every callable of every module and of the classes in it, and every table of them; with a name for messages."""
    seen: set[int] = set()
    for path, module in list(sys.modules.items()):
        if not isinstance(module, types.ModuleType) or path.split(".")[0] in ("torch_memory_saver", "__main__"):
            continue
        for owner, shown in [(module, path), *((each, f"{path}.{each.__name__}") for each in classes_of(module))]:
            if id(owner) in seen:
                continue
            seen.add(id(owner))
            for name, value in list(vars(owner).items()):
                if callable(value) or isinstance(value, (property, classmethod, staticmethod)):
                    yield (id(owner), name), f"{shown}.{name}", value
                elif isinstance(value, dict) and name != "__warningregistry__":
                    yield (id(owner), name), f"{shown}.{name}", {key: each for key, each in value.items() if callable(each)}


def classes_of(module: types.ModuleType) -> list[type]:
    return [each for each in list(vars(module).values()) if isinstance(each, type)]


def operators() -> dict[str, str]:
    return {name: torch._C._dispatch_dump(name) for name in torch._C._dispatch_get_all_op_names()}


def settings() -> dict[str, Any]:
    """Settings of the interpreter and of PyTorch, as texts."""
    return {
        "collector": str((gc.get_threshold(), gc.isenabled(), gc.get_freeze_count())),
        "finders": str(sys.meta_path),
        # Modules that PyTorch imports meanwhile add filters for their own warnings.
        "warnings": str([each for each in warnings.filters if each[2].__module__ == "builtins"]),
        "signals": str([signal.getsignal(number) for number in sorted(signal.valid_signals())]),
        "traces": str((sys.gettrace(), sys.getprofile(), sys.getrecursionlimit(), sys.getswitchinterval())),
        "environment": str(sorted(os.environ.items())),
        "autograd": str((torch.is_grad_enabled(), torch._C._is_multithreading_enabled())),
    }


def is_other(before: Any, after: Any) -> bool:
    if isinstance(before, dict) and isinstance(after, dict):  # additions are no replacements
        return any(after.get(key) is not value for key, value in before.items())
    return before is not after


def use(saver: Any) -> None:
    """Use PyTorch, inside a region if there is a saver."""
    outside = torch.ones(SIZE, device="cuda")
    with contextlib.nullcontext() if saver is None else saver.region("weights", backup="host"):
        weights = torch.ones(SIZE, device="cuda")
        network = torch.nn.LSTM(8, 8, 2, dropout=0.5).cuda()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph) if saver is None else saver.cuda_graph(graph, tag="graph"):
        weights.add_(1)
    graph.replay()
    ForkingPickler.dumps(weights.cpu())
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        torch.ones(SIZE, device="cuda")
    del pool
    torch.ones(SIZE, device=f"cuda:{torch.cuda.device_count() - 1}")
    if saver is not None:
        from torch_memory_saver.observe import memory

        saver.manage(network, tag="state")
        saver.pause("weights")
        saver.resume("weights")
        saver.preserve(weights)
        print(saver.stats(), saver.ledger(), file=sys.stderr)
        memory.release_cached()
        if MODE == "preload":
            saver.pause(backup="host")
            saver.resume()
        saver.enable_peer_access()
        saver.empty_cache()
    torch.cuda.empty_cache()
    torch.accelerator.empty_cache()
    assert float(outside[0]) == 1


def place_of(path: str) -> Place:
    parts = path.split(".")
    for number in range(len(parts) - 1, 0, -1):
        with contextlib.suppress(ImportError):
            owner: Any = import_module(".".join(parts[:number]))
            break
    for part in parts[number:-1]:
        owner = getattr(owner, part)
    return id(owner), parts[-1]


def main() -> None:
    import torch.multiprocessing.reductions  # noqa: F401

    kept = [(place, name, value) for place, name, value in places()]
    before = {place: value for place, _, value in kept}
    operators_before, settings_before = operators(), settings()
    saver, listed = None, ()
    if MODE != "plain":
        from torch_memory_saver import torch_memory_saver as saver

        assert saver is not None and saver.patches() == ()
    use(saver)
    if saver is not None:
        listed = [patch.name for patch in saver.patches()]
    owners = {owner for owner, _ in before}  # PyTorch imports more modules meanwhile
    found = {place: name for place, name, value in places() if place[0] in owners and is_other(before.get(place), value)}
    names = {place_of(name): name for name in listed if "::" not in name}
    later = operators()
    changed = [name for name, text in later.items() if operators_before.get(name, text) != text]
    settings_after = settings()
    print(
        json.dumps(
            {
                "changed": sorted([names.get(place, name) for place, name in found.items()] + changed),
                "listed": sorted(listed),
                "settings": [name for name, text in settings_after.items() if text != settings_before[name]],
            }
        )
    )


if __name__ == "__main__":
    main()
