"""Guards that a forked child has no lock of its parent, which a thread of the parent may have held for ever."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

from processes import PACKAGE, TIMEOUT_S, environment

PROGRAM = Path(__file__).parent / "programs" / "forked_locks.py"
#: The locks that a child may keep, with the reason.
KEPT = {
    "torch_memory_saver._torch.pools.late_devices._WatchPool.retiring": "the child forgets its parent's pools",
    "torch_memory_saver._torch.base.steps.InterruptSafeLock._lock": "each lock of this class is found by its owner",
    "torch_memory_saver.nccl.NcclHook._lock": "a child cannot use its parent's communicators",
}


def _makes_lock(value: ast.expr | None) -> bool:
    function = value.func if isinstance(value, ast.Call) else None
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in ("Lock", "RLock", "Condition", "Event", "Semaphore", "BoundedSemaphore", "Barrier", "InterruptSafeLock")


def _locks_in(path: Path) -> set[str]:
    """Return the names of the locks that a module keeps: in its variables, or in attributes of its objects."""
    module = ".".join(("torch_memory_saver", *path.relative_to(PACKAGE).with_suffix("").parts))
    tree = ast.parse(path.read_text())
    imported = {
        alias.asname or alias.name
        for each in ast.walk(tree)
        if isinstance(each, (ast.Import, ast.ImportFrom))
        for alias in each.names
    }
    if not {"threading", "multiprocessing", "InterruptSafeLock"} & imported:
        return set()
    owners = [(module, list(tree.body))]
    owners += [(f"{module}.{each.name}", list(ast.walk(each))) for each in ast.walk(tree) if isinstance(each, ast.ClassDef)]
    return {
        f"{owner}.{target.attr if isinstance(target, ast.Attribute) else target.id}"
        for owner, statements in owners
        for each in statements
        if isinstance(each, (ast.Assign, ast.AnnAssign)) and _makes_lock(each.value)
        for target in (each.targets if isinstance(each, ast.Assign) else [each.target])
        if isinstance(target, ast.Attribute) or (isinstance(target, ast.Name) and owner == module)
    }


def test_a_forked_child_has_new_locks(tmp_path: Path) -> None:
    locks = {lock for path in PACKAGE.rglob("*.py") for lock in _locks_in(path)}
    command = [sys.executable, "-W", "ignore::DeprecationWarning", str(PROGRAM), str(tmp_path)]
    done = subprocess.run(
        command, env=environment(preloaded=False), check=True, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    found, kept = (set(names) for names in json.loads(done.stdout))
    assert kept == set(), "give their owner an after_fork_in_child"
    assert locks - found == set(KEPT), "locks that programs/forked_locks.py does not find"
