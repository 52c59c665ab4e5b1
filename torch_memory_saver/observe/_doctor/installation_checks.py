"""Checks of what is installed, loaded and set: this package, PyTorch, the CUDA runtime, the preload library, and the TMS_*
variables with the folders that they name. They need no GPU.
"""

from __future__ import annotations

import filecmp
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from torch_memory_saver import __version__, _core, _startup, simulate
from torch_memory_saver._cli.child_python import command_options, program_options
from torch_memory_saver._folders import private_directory, why_not_writable
from torch_memory_saver._services import debug_folder, layer, preload, releases, requested_recordings, variables
from torch_memory_saver._simulate.elf import read_library
from torch_memory_saver._text import suggestion
from torch_memory_saver.observe._doctor.check import Check, Finding, fail, ok, run_child, skip, torch_facts, warn
from torch_memory_saver.observe.memory.release import read_seconds

__all__ = ["CHECKS"]

#: The ends of the names of pip's records.
_RECORD = ".dist-info"
#: Between a version that others pin and the version of this package (TMS_PINNED_VERSION of setup.py).
_LOCAL = "+ours."
_TRUE = ("1", "true", "yes")
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
#: The function that the preload library stands before.
_INTERPOSED = "cudaMalloc"
_PREFIX = "TMS_"
#: Programs that need the simulated GPU: PyTorch, and the driver alone.
_ASK_TORCH = "import torch; print(torch.cuda.get_device_name(0))"
_ASK_DRIVER = "import ctypes; raise SystemExit(ctypes.CDLL('libcuda.so.1').cuInit(0))"
_LEVEL = "TMS_LOG_LEVEL"
#: Has the core read its variables, which it logs about, and make the first call that a malformed limit is an error of.
_READ_SETTINGS = """
from torch_memory_saver import _core
from torch_memory_saver.errors import TorchMemorySaverError
_core.counters()
try:
    _core.pause((), None)
except TorchMemorySaverError as error:
    import sys
    print(error, file=sys.stderr)
"""
#: Matches a message of the core about a variable. The sentence begins with the name of the variable.
_COMPLAINT = re.compile(r"\b(TMS_\w+(?:='| and TMS_).*?)\.?$", re.MULTILINE)
#: Functions that check the form of a value, by the name of the variable. Python reads these variables.
_FORMS: Mapping[str, Callable[[str], bool]] = {
    "TMS_DEBUG": lambda text: not requested_recordings(text)[1],
    "TMS_RELEASE_CACHED": lambda text: text.lower() == "pause" or read_seconds(text) is not None,
}
_DEBUG, _DEBUG_FOLDER = "TMS_DEBUG", "TMS_DEBUG_DIR"
_METRICS, _PAGES, _LOCKS = "TMS_METRICS_FILE", "TMS_SHARED_PAGE", "TMS_LOCK_DIR"
#: Folder of the processes. Tests substitute another folder.
_PROCESSES = Path("/proc")
_DRIVERS, _RUNTIMES = ("libcuda.so",), ("libcudart.so", "libcudart-")


def _pip_records() -> list[Path]:
    """Return the folders with pip's records of packages of this name, beside this package. A source tree has none."""
    return sorted(preload.library_path().parent.glob(f"torch_memory_saver-*{_RECORD}"))


def _recorded_version(record: Path) -> str:
    return record.name.removesuffix(_RECORD).partition("-")[2]


def _other_records() -> list[Path]:
    """Return pip's records of other versions in the folders of ``sys.path``."""
    found = [path for entry in sys.path for path in sorted(Path(entry).glob(f"torch_memory_saver-*{_RECORD}"))]
    return [path for path in found if _recorded_version(path).rpartition(_LOCAL)[2] != __version__]


def package() -> Finding:
    lines = [str(Path(simulate.__file__).parent), _core.library_path]
    missing = [path for path in (preload.library_path(), simulate.simulator_path()) if not path.is_file()]
    if missing:
        return fail(f"there is no {missing[0]}", "install torch_memory_saver again", lines)
    own = [path for path in _pip_records() if _recorded_version(path).rpartition(_LOCAL)[2] == __version__]
    others = [path for path in _pip_records() if path not in own] + preload.libraries_of_another_package()
    elsewhere = [] if others else _other_records()
    if others or elsewhere:
        return warn(
            "files of another torch_memory_saver, such as the C++ package, lie "
            + ("beside this one" if others else "in another folder of sys.path"),
            "run pip uninstall torch_memory_saver until it finds none, delete what is left of these files, and install this "
            "package again",
            [*lines, *map(str, others or elsewhere)],
        )
    known_as = [f", which pip knows as {_recorded_version(path)}" for path in own if _LOCAL in path.name]
    return ok(f"torch_memory_saver {__version__}{''.join(known_as)}", lines)


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
    if releases.is_too_old(facts.version):
        return fail(f"{found}: too old", "install PyTorch 2.8 or later")
    if releases.is_untested(facts.version):
        tested = ".".join(map(str, releases.NEWEST_TESTED))
        return warn(f"{found}: newer than {tested}, the newest tested release", "run the tests of your program with it")
    return ok(found)


def simulated_gpu() -> Finding:
    """Check whether programs run under `simulate`: with PyTorch, if a CUDA build of it is installed."""
    if _startup.SIMULATED in os.environ:
        return ok("this process runs on it")
    facts = torch_facts()
    with_torch = bool(facts.cuda) or (facts.problem is not None and not facts.missing)
    text = _ASK_TORCH if with_torch else _ASK_DRIVER
    output, _, problem = run_child(*command_options("simulate", "--", "python", *program_options(text)))
    if problem is not None:
        return fail(f"a program does not run on it: {problem}", "report this as a bug, with the output of doctor")
    if with_torch:
        return ok(f"PyTorch runs on it, under simulate: {output.strip()}")
    return ok("programs run on it, under simulate; PyTorch's CUDA build would as well")


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
    """Return whether it is this package's library, or a copy of it."""
    ours = preload.library_path()
    try:
        return os.path.samefile(entry, ours) or filecmp.cmp(entry, ours, shallow=False)
    except OSError:
        return False


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
        return fail(f"{hooks[0]} was not loaded into this process", "start Python again with this LD_PRELOAD", lines)
    earlier = [entry for entry in entries[: entries.index(hooks[0])] if _stands_before_us(entry)]
    if earlier:
        return warn(f"{earlier[0]} comes first, and has {_INTERPOSED} as well", "put the hook library first", lines)
    return ok(f"the hook library of this package ({__version__}) is loaded", lines)


def hook_mode() -> Finding:
    mode = preload.mode_in_force()
    if os.environ.get("TMS_INIT_ENABLE", "").lower() in _TRUE and not _core.preloaded:
        return warn(
            f"{mode}; TMS_INIT_ENABLE has no effect without the hook library in LD_PRELOAD",
            "start the program by torch-memory-saver run --preload, or unset TMS_INIT_ENABLE",
        )
    return ok(mode)


def _libraries_by_process() -> Iterator[tuple[str, set[str]]]:
    """Yield each process whose mapped files can be read, as "PID (name)", and the names of these files."""
    for folder in sorted(_PROCESSES.glob("[0-9]*"), key=lambda folder: int(folder.name)):
        try:
            lines = (folder / "maps").read_text(errors="replace").splitlines()
            name = (folder / "comm").read_text(errors="replace").strip()
        except OSError:  # it has ended, or belongs to another user
            continue
        yield f"{folder.name} ({name})", {line.rpartition("/")[2] for line in lines}


def preloaded_programs() -> Finding:
    """Look for processes with the hook library that call the driver without a shared CUDA runtime."""
    count, found = 0, []
    for process, names in _libraries_by_process():
        if not any(map(_is_hook_library, names)):
            continue
        count += 1
        has_driver, has_runtime = (any(name.startswith(kind) for name in names) for kind in (_DRIVERS, _RUNTIMES))
        if has_driver and not has_runtime:
            found.append(process)
    if found:
        who = f"process {found[0]} has" if len(found) == 1 else f"{len(found)} processes have"
        return warn(
            f"{who} no shared libcudart, so the hook library manages nothing there",
            "link the program with the shared CUDA runtime, by nvcc -cudart shared",
            found if len(found) > 1 else (),
        )
    return ok(f"{count} running, none with a CUDA runtime that is linked statically" if count else "none is running")


def allocator() -> Finding:
    given = {name: os.environ[name] for name in _ALLOCATOR_VARIABLES if os.environ.get(name)}
    lines = [f"{name}={value}" for name, value in given.items()]
    if any("backend:cudamallocasync" in value.lower().replace(" ", "") for value in given.values()):
        return fail("PyTorch's cudaMallocAsync allocator has no memory pools", "take backend out of the variable", lines)
    return ok("on" if layer.expandable_segments_on(os.environ) else "off", lines)


def _given() -> dict[str, str]:
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIX)}


def _complaints_of_core() -> list[str]:
    """Return the core's messages about the values that it reads."""
    quiet = os.environ.get(_LEVEL, "").lower() in ("silent", "error")
    variables = {_LEVEL: "warning"} if quiet else {}
    _, errors, problem = run_child(*program_options(_READ_SETTINGS), **variables)
    return [*_COMPLAINT.findall(errors), *([f"the values that the core reads are unknown: {problem}"] if problem else [])]


def settings() -> Finding:
    given = _given()
    lines = [f"{name}={value}" for name, value in given.items()]
    wrong = [
        f"{name} is unknown{suggestion(name, variables.known_variables())}" for name in variables.unknown_variables(given)
    ]
    allowed = {variable.name: variable.allowed for variable in variables.PYTHON_VARIABLES}
    for name, is_right in _FORMS.items():
        value = given.get(name, "").strip()
        if value and not is_right(value):
            wrong.append(f"{name}='{value}' is ignored (allowed: {allowed[name]})")
    if given.get(_LOCKS) and not os.path.isabs(given[_LOCKS]):
        wrong.append(f"{_LOCKS}='{given[_LOCKS]}' is refused by resume(exclusive=True): it must be an absolute path")
    wrong += _complaints_of_core() if given else []
    if len(wrong) == 1:
        return warn(wrong[0], "correct or unset it", lines)
    if wrong:
        return warn(f"{len(wrong)} mistakes", "correct or unset these variables", [*wrong, *lines])
    return ok(f"{len(given)} set" if given else "none set", lines)


def _nearest(folder: Path) -> Path:
    """Return the folder, or the nearest existing folder above it, in which the folder would be created."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())


def _why_not_for_pages(folder: Path) -> str | None:
    """Return why no shared page can be created in a folder, or None. The core creates that folder, but not the folders
    above it."""
    try:
        with private_directory(folder) as found:
            return why_not_writable(found.path)
    except FileNotFoundError:
        return why_not_writable(folder.parent)
    except OSError as error:
        return error.strerror


def output_folders() -> Finding:
    given = _given()
    folders = {}
    if requested_recordings(given.get(_DEBUG, ""))[0]:
        folders[_DEBUG_FOLDER] = Path(debug_folder())
    if given.get(_METRICS):
        folders[_METRICS] = Path(given[_METRICS]).absolute().parent
    if given.get(_PAGES, "").startswith("/"):
        folders[_PAGES] = Path(given[_PAGES])
    if not folders:
        return skip("no variable names a folder to write to", "set TMS_DEBUG=events to have events written")
    lines = [f"{name}: {folder}" for name, folder in folders.items()]
    for name, folder in folders.items():
        problem = _why_not_for_pages(folder) if name == _PAGES else why_not_writable(_nearest(folder))
        if problem is not None:
            return fail(f"{name}: {folder} cannot be written to: {problem}", "choose another folder", lines)
    return ok("can be written to", lines)


CHECKS = (
    Check("package", package),
    Check("Python", python),
    Check("PyTorch", pytorch),
    Check("simulated GPU", simulated_gpu),
    Check("libcudart", runtime),
    Check("LD_PRELOAD", preloaded),
    Check("hook mode", hook_mode),
    Check("preloaded programs", preloaded_programs),
    Check("expandable segments", allocator),
    Check("NVTX ranges", nvtx),
    Check("settings", settings),
    Check("output folders", output_folders),
)
