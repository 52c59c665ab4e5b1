"""Guards the libraries that the build makes: where they are, what they need and export, and that a process has one state."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from built import LIBRARIES, PACKAGE, REPOSITORY, needs_source_tree

#: The libraries of every Linux. No libpython, no CUDA library, no C++ runtime.
SYSTEM_LIBRARIES = {"libc.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1"}
SYSTEM_LIBRARIES |= {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}

needs_readelf = pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf (binutils)")
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler named cc")


def readelf(option: str, library: Path) -> str:
    command = ["readelf", "--wide", option, str(library)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def dynamic_symbols(library: Path) -> dict[bool, set[str]]:
    """The names in the dynamic symbol table: defined ones (True) and undefined ones (False)."""
    names: dict[bool, set[str]] = {True: set(), False: set()}
    for line in readelf("--dyn-syms", library).splitlines():
        fields = line.split()
        if len(fields) >= 8 and fields[0].rstrip(":").isdigit():
            names[fields[6] != "UND"].add(fields[7].partition("@")[0])
    return names


def plain(symbol: str) -> str:
    """The C library's function that a fortified call (``__read_chk``, ``__open_2``) checks and calls; others unchanged."""
    fortified = re.fullmatch(r"__(\w+)_(?:chk|2)", symbol)
    return fortified[1] if fortified else symbol


def declared_exports() -> set[str]:
    """The exports declared in csrc/include/tms.h."""
    text = (REPOSITORY / "csrc/include/tms.h").read_text()
    return set(re.findall(r"^TMS_EXPORT [^(;]*?\**(\w+)\(", text, re.MULTILINE))


# The libraries.


def test_libraries_are_where_programs_look_for_them() -> None:
    assert [str(path) for path in LIBRARIES.values() if not path.is_file()] == []


@needs_readelf
@pytest.mark.parametrize("name", LIBRARIES)
def test_libraries_need_the_c_library_only(name: str) -> None:
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", readelf("--dynamic", LIBRARIES[name])))
    assert "libc.so.6" in needed
    assert needed - SYSTEM_LIBRARIES == set()


@needs_readelf
@pytest.mark.parametrize("name", LIBRARIES)
def test_libraries_name_no_folder_to_look_for_others(name: str) -> None:
    """Python's own way to link an extension may have one: the folder of its library."""
    assert re.findall(r"\((RPATH|RUNPATH)\).*", readelf("--dynamic", LIBRARIES[name])) == []


#: Release of glibc for which the wheels of manylinux_2_28 are built (pyproject.toml).
OLDEST_GLIBC = (2, 28)
#: Functions that the headers of that release replace by others, which newer releases have as well (__xstat).
OF_OLDER_HEADERS = {"stat", "fstat", "lstat", "fstatat"}


def first_releases() -> dict[str, tuple[int, ...]]:
    """Every function of this machine's C library, with the oldest of its symbol versions."""
    mapped = re.search(r" (/\S*/libc\.so\.6)$", Path("/proc/self/maps").read_text(), re.MULTILINE)
    assert mapped is not None
    releases: dict[str, tuple[int, ...]] = {}
    for library in map(Path(mapped[1]).with_name, sorted(SYSTEM_LIBRARIES | {"libm.so.6"})):
        symbols = readelf("--dyn-syms", library) if library.is_file() else ""
        for name, release in re.findall(r"(\w+)@+GLIBC_([\d.]+)$", symbols, re.MULTILINE):
            found = tuple(map(int, release.split(".")))
            releases[name] = min(found, releases.get(name, found))
    return releases


@needs_readelf
@pytest.mark.parametrize("name", LIBRARIES)
def test_libraries_need_no_function_that_manylinux_lacks(name: str) -> None:
    """A build on a newer system asks for newer versions of the same functions. So functions are compared, not versions."""
    releases = first_releases()
    wanted = {symbol.removeprefix("__isoc23_") for symbol in dynamic_symbols(LIBRARIES[name])[False]} & set(releases)
    assert "pthread_create" in wanted and releases["memfd_create"] == (2, 27)
    assert {symbol for symbol in wanted - OF_OLDER_HEADERS if releases[symbol] > OLDEST_GLIBC} == set()


@needs_source_tree
def test_wheels_are_built_for_that_manylinux() -> None:
    images = re.findall(
        r'^manylinux-(\w+)-image = "manylinux_(\d+)_(\d+)"$', (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE
    )
    assert images == [(processor, *map(str, OLDEST_GLIBC)) for processor in ("x86_64", "aarch64")]


#: All functions of the C library and of Python that end the process, or write to stdout.
ENDS_THE_PROCESS = {"exit", "_exit", "_Exit", "quick_exit", "abort", "raise", "tgkill", "pthread_kill"}
ENDS_THE_PROCESS |= {"__assert_fail", "__assert_perror_fail", "err", "errx", "error", "Py_Exit", "Py_FatalError"}
ENDS_THE_PROCESS |= {"_Py_FatalErrorFunc", "_Py_FatalErrorFormat", "pthread_exit", "execve", "execv", "execvp", "longjmp"}
WRITES_TO_STDOUT = {"stdout", "printf", "vprintf", "puts", "putchar", "putchar_unlocked"}
WRITES_TO_STDOUT |= {"putc", "fputc", "fputs", "fwrite", "fprintf", "vfprintf"}
WRITES_TO_STDOUT |= {"dprintf", "vdprintf", "psignal", "PySys_WriteStdout", "PySys_FormatStdout", "PyObject_Print"}


@needs_readelf
@pytest.mark.parametrize("name", ["core", "preload"])
def test_libraries_cannot_end_the_process_or_write_to_stdout(name: str) -> None:
    wanted = {plain(symbol) for symbol in dynamic_symbols(LIBRARIES[name])[False]}
    assert {"snprintf", "write"} <= wanted  # the names are those of functions, and the list is not empty
    assert wanted & (ENDS_THE_PROCESS | WRITES_TO_STDOUT) == set()


#: System calls without a function of the C library.
SYSTEM_CALLS = {"SYS_gettid", "SYS_mbind", "__NR_io_uring_setup", "__NR_io_uring_enter"}


@needs_source_tree
def test_the_system_calls_made_by_number_are_known() -> None:
    """`syscall` could end the process as well, which the symbol table does not show."""
    called: set[str] = set()
    for path in (REPOSITORY / "csrc").rglob("*.c"):
        if "simulator" not in path.parts:
            called.update(re.findall(r"(?<![\w>.])syscall\(\s*([\w]+)", path.read_text()))
    assert called == SYSTEM_CALLS


@needs_source_tree
def test_signals_are_only_queried_and_never_sent() -> None:
    """`kill` with the signal 0 queries whether a process is alive."""
    calls: list[str] = []
    for path in (REPOSITORY / "csrc").rglob("*.c"):
        calls += re.findall(r"(?<![\w>.])kill\([^;]*?, (\w+)\)", path.read_text())
    assert calls
    assert set(calls) == {"0"}


@needs_source_tree
def test_the_only_plain_write_is_that_of_the_log_to_stderr() -> None:
    calls = {}
    for path in (REPOSITORY / "csrc").rglob("*.c"):
        if "simulator" not in path.parts:
            found = re.findall(r"(?<![\w>.])write\(([^,;]*),", path.read_text())
            if found:
                calls[path.name] = found
    assert calls == {"log.c": ["STDERR_FILENO"]}


@needs_readelf
@pytest.mark.parametrize("name", LIBRARIES)
def test_mappings_of_libraries_are_hardened(name: str) -> None:
    """No code on the stack, none that the loader writes to, and a table of calls that is read-only after loading."""
    segments = {
        fields[0]: fields for fields in map(str.split, readelf("--segments", LIBRARIES[name]).splitlines()) if fields
    }
    assert segments["GNU_STACK"][6] == "RW"
    assert segments["GNU_RELRO"][6] == "R"
    dynamic = readelf("--dynamic", LIBRARIES[name])
    assert re.search(r"\(FLAGS_1\) .*\bNOW\b", dynamic)
    assert "TEXTREL" not in dynamic


@needs_readelf
@pytest.mark.parametrize("name", LIBRARIES)
def test_libraries_check_their_stack_and_their_calls_of_the_c_library(name: str) -> None:
    wanted = dynamic_symbols(LIBRARIES[name])[False]
    assert "__stack_chk_fail" in wanted
    assert "__snprintf_chk" in wanted


@needs_readelf
@pytest.mark.parametrize("name", ["core", "preload"])
def test_libraries_with_callbacks_are_never_unmapped(name: str) -> None:
    assert "NODELETE" in readelf("--dynamic", LIBRARIES[name])


@needs_readelf
@needs_source_tree
def test_core_exports_the_c_interface_and_its_start() -> None:
    assert len(declared_exports()) >= 20
    assert dynamic_symbols(LIBRARIES["core"])[True] == declared_exports() | {"PyInit__core"}


@needs_readelf
@needs_source_tree
def test_preload_library_exports_the_c_interface_and_the_hooks() -> None:
    text = (REPOSITORY / "csrc/preload/resolve.h").read_text()
    text = re.sub(r"#define TMS_HANDLE_CALLS.*?\n\n", "", text, flags=re.DOTALL)  # called, and not interposed
    hooks = set(re.findall(r"^\s+X\((\w+),", text, re.MULTILINE))
    assert {"cudaMalloc", "cudaFree", "cudaStreamBeginCapture"} <= hooks
    assert dynamic_symbols(LIBRARIES["preload"])[True] == declared_exports() | hooks


@needs_readelf
def test_simulator_exports_calls_and_controls_only() -> None:
    exported = dynamic_symbols(LIBRARIES["simulator"])[True]
    assert {"cuInit", "cuMemCreate", "cudaMalloc", "tms_sim_reset"} <= exported
    assert {name for name in exported if not name.startswith(("cu", "__cuda", "nvml", "nccl", "tms_sim_"))} == set()


@needs_readelf
@pytest.mark.parametrize("name", ["preload", "simulator"])
def test_libraries_that_are_no_extensions_ask_nothing_of_python_or_cuda(name: str) -> None:
    wanted = dynamic_symbols(LIBRARIES[name])[False]
    assert {symbol for symbol in wanted if symbol.startswith(("Py", "_Py", "cu"))} == set()


def test_preload_library_has_the_bytes_that_launchers_look_for() -> None:
    assert b"TMS_INIT_ENABLE_DISK_BACKUP" in LIBRARIES["preload"].read_bytes()


# One state a process.

IMPORT = "from torch_memory_saver import _core; print(_core.preloaded, _core.library_path)"


def import_with_preload(
    library: Path | str, directory: Path | None = None, text: str = IMPORT
) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"LD_PRELOAD": str(library)}
    environment["PYTHONPATH"] = os.pathsep.join([str(PACKAGE.parent), *filter(None, [environment.get("PYTHONPATH")])])
    command = [sys.executable, "-c", text]
    return subprocess.run(command, env=environment, cwd=directory, capture_output=True, text=True, timeout=120)


def test_module_uses_the_preload_library_s_state() -> None:
    library = LIBRARIES["preload"]
    done = import_with_preload(library)
    assert (done.returncode, done.stdout) == (0, f"True {library.resolve()}\n"), done.stderr


def test_path_is_absolute_if_the_loader_got_a_relative_one() -> None:
    library = LIBRARIES["preload"]
    done = import_with_preload(f"./{library.name}", directory=library.parent)
    assert (done.returncode, done.stdout) == (0, f"True {library.resolve()}\n"), done.stderr


def test_a_relative_path_stays_that_of_the_loaded_library(tmp_path: Path) -> None:
    """PyTorch loads its allocator from the path, so a file of that name in the new working directory must not be found."""
    library = LIBRARIES["preload"]
    foreign = tmp_path / library.name
    foreign.write_bytes(library.read_bytes())
    done = import_with_preload(f"./{library.name}", library.parent, f"import os; os.chdir({str(tmp_path)!r}); {IMPORT}")
    assert (done.returncode, done.stdout) == (0, f"True {library.resolve()}\n"), done.stderr


def test_a_relative_path_of_a_removed_library_is_an_error(tmp_path: Path) -> None:
    library = tmp_path / LIBRARIES["preload"].name
    library.write_bytes(LIBRARIES["preload"].read_bytes())
    done = import_with_preload(f"./{library.name}", tmp_path, f"import os; os.remove({str(library)!r}); {IMPORT}")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: the file of the loaded library ./{library.name} is not found: it was removed")
    assert last.endswith("Set LD_PRELOAD to the absolute path of the library.")


@needs_compiler
def test_preload_library_of_another_release_is_refused(tmp_path: Path) -> None:
    source = "void *tms_get_api(unsigned interface) { (void)interface; return 0; }"
    library = tmp_path / "other_release.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)], input=source, text=True, check=True)
    done = import_with_preload(library)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: the library {library}, loaded into this process")
    assert "belongs to another build of torch_memory_saver" in last
    assert "LD_PRELOAD" in last
