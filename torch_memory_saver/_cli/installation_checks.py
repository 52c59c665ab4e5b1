"""Checks of what is installed and loaded: this package, PyTorch, the CUDA runtime, the preload library. They need no GPU."""

from __future__ import annotations

import filecmp
import os
import re
import sys
from pathlib import Path

from torch_memory_saver import __version__, _core, simulate
from torch_memory_saver._cli.check import Check, Finding, fail, ok, skip, warn
from torch_memory_saver._cli.facts import torch_facts
from torch_memory_saver._engine import preload
from torch_memory_saver._simulate.elf import read_library
from torch_memory_saver._torch.layer import expandable_segments_on, is_too_old

__all__ = ["CHECKS"]

_TRUE = ("1", "true", "yes")
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
#: The function that the preload library stands before.
_INTERPOSED = "cudaMalloc"


def package() -> Finding:
    lines = [str(Path(simulate.__file__).parent), _core.library_path]
    missing = [path for path in (preload.library_path(), simulate.simulator_path()) if not path.is_file()]
    if missing:
        return fail(f"there is no {missing[0]}", "install torch_memory_saver again", lines)
    return ok(f"torch_memory_saver {__version__}", lines)


def python() -> Finding:
    return ok(f"{sys.version.split()[0]} ({sys.executable})")


def nvtx() -> Finding:
    if _core.NVTX:
        return ok("pauses and resumes are ranges in Nsight Systems and other tools")
    return skip("not built in", "build the package where nvtx3/nvToolsExt.h is, for a profiler to show pauses and resumes")


def pytorch() -> Finding:
    facts = torch_facts()
    if facts.missing:
        return warn("not installed for this Python", "install PyTorch 2.8 or later, built for CUDA")
    if facts.problem is not None:
        return fail(
            f"installed, but cannot be imported: {facts.problem}",
            "solve what the import reports first; without a GPU, run the program under simulate",
        )
    build = f"CUDA {facts.cuda}" if facts.cuda else f"ROCm {facts.hip}" if facts.hip else "the CPU only"
    found = f"PyTorch {facts.version}, built for {build}"
    if not facts.cuda:
        return warn(f"{found}: it has no memory that could be paused", "install PyTorch's CUDA build")
    if is_too_old(facts.version):
        return fail(f"{found}: too old", "install PyTorch 2.8 or later")
    return ok(found)


def runtime() -> Finding:
    facts = torch_facts()
    if facts.runtimes:
        if len({os.path.realpath(path) for path in facts.runtimes}) > 1:
            return warn("PyTorch loads several", "remove all but PyTorch's own from LD_LIBRARY_PATH", facts.runtimes)
        return ok(f"PyTorch loads {facts.runtimes[0]}")
    if facts.version and facts.cuda:
        return warn(
            "PyTorch loads none when it is imported",
            "use a build that is linked with the shared libcudart, or hook mode torch: LD_PRELOAD has no effect on it",
        )
    return skip("PyTorch, which brings it, cannot be imported or is not built for CUDA", "see PyTorch")


def _entries() -> list[str]:
    return [entry for entry in re.split("[ :]", os.environ.get("LD_PRELOAD", "")) if entry]


def _is_hook_library(entry: str) -> bool:
    return os.path.basename(entry).startswith(preload.LIBRARY_NAME.partition(".")[0])


def _is_ours(entry: str) -> bool:
    """Whether it is this package's library, or a copy of it."""
    ours = preload.ledger_library_path() if _stands_before_lookups(entry) else preload.library_path()
    try:
        return os.path.samefile(entry, ours) or filecmp.cmp(entry, ours, shallow=False)
    except OSError:
        return False


def _stands_before_lookups(entry: str) -> bool:
    return os.path.basename(entry) == preload.LEDGER_LIBRARY_NAME


def _stands_before_us(entry: str) -> bool:
    try:
        return any(symbol.defined for symbol in read_library(Path(entry), (_INTERPOSED,)).symbols)
    except (OSError, ValueError):
        return False


def preloaded() -> Finding:
    entries, ours = _entries(), preload.library_path()
    set_it = f"set LD_PRELOAD to {ours}, by torch-memory-saver run --preload or configure_subprocess()"
    lines = entries if len(entries) > 1 else []
    hooks = [entry for entry in entries if _is_hook_library(entry)]
    missing = [entry for entry in entries if "/" in entry and not os.path.isfile(entry)]
    if missing:
        advice = set_it if missing[0] in hooks else "take it out of LD_PRELOAD"
        return fail(f"there is no {missing[0]}, so the linker ignores it", advice, lines)
    if not hooks:
        return ok("the hook library is not in LD_PRELOAD, which hook mode torch does not need", lines)
    if len(hooks) > 1:
        return fail("it has several hook libraries", set_it, lines)
    if not _is_ours(hooks[0]):
        return fail(f"{hooks[0]} is not the library of this package", set_it, lines)
    if not _core.preloaded:
        return fail(f"{hooks[0]} was not loaded into this process", "start Python anew with this LD_PRELOAD", lines)
    earlier = [entry for entry in entries[: entries.index(hooks[0])] if _stands_before_us(entry)]
    if earlier:
        return warn(f"{earlier[0]} comes first, and has {_INTERPOSED} as well", "put the hook library first", lines)
    if _core.get_ledger() and not _stands_before_lookups(hooks[0]):
        use = f"set LD_PRELOAD to {preload.ledger_library_path()}, by torch-memory-saver run --ledger"
        return warn(f"{preload.LEDGER_VARIABLE} has no effect with {hooks[0]}", use, lines)
    return ok(f"the hook library of this package ({__version__}) is loaded", lines)


def hook_mode() -> Finding:
    mode = preload.mode_in_force()
    if os.environ.get("TMS_INIT_ENABLE", "").lower() in _TRUE and not _core.preloaded:
        return warn(
            f"{mode}; TMS_INIT_ENABLE has no effect without the hook library in LD_PRELOAD",
            "start the program by torch-memory-saver run --preload, or unset TMS_INIT_ENABLE",
        )
    return ok(mode)


def allocator() -> Finding:
    given = {name: os.environ[name] for name in _ALLOCATOR_VARIABLES if os.environ.get(name)}
    lines = [f"{name}={value}" for name, value in given.items()]
    if any("backend:cudamallocasync" in value.lower().replace(" ", "") for value in given.values()):
        return fail("PyTorch's cudaMallocAsync allocator has no memory pools", "take backend out of the variable", lines)
    if not expandable_segments_on(os.environ):
        return ok("off", lines)
    if _core.preloaded and os.environ.get("TMS_INIT_ENABLE", "").lower() in _TRUE:
        return fail(
            "on, so that TMS_INIT_ENABLE cannot manage PyTorch's memory",
            "take expandable_segments:True out of the variable, or use regions instead of TMS_INIT_ENABLE",
            lines,
        )
    return ok("on: regions work beside them, and memory outside of regions cannot be managed", lines)


CHECKS = (
    Check("package", package),
    Check("Python", python),
    Check("PyTorch", pytorch),
    Check("libcudart", runtime),
    Check("LD_PRELOAD", preloaded),
    Check("hook mode", hook_mode),
    Check("expandable segments", allocator),
    Check("NVTX ranges", nvtx),
)
