"""What the build makes: where the libraries lie, what they need and export, and how cuda.h is found."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

from torch_memory_saver import _core

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = Path(_core.__file__).parent
LIBRARIES = {
    "core": PACKAGE / "_core.abi3.so",
    "preload": PACKAGE.parent / "torch_memory_saver_hook_mode_preload.abi3.so",
    "simulator": PACKAGE / "_simulated_cuda.so",
}
#: What every Linux has. No libpython, no CUDA library, no C++ runtime.
SYSTEM_LIBRARIES = {"libc.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1"}
SYSTEM_LIBRARIES |= {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}

needs_readelf = pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf (binutils)")
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler named cc")
needs_source_tree = pytest.mark.skipif(not (REPOSITORY / "setup.py").is_file(), reason="needs the source tree")


def readelf(option: str, library: Path) -> str:
    command = ["readelf", "--wide", option, str(library)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def dynamic_symbols(library: Path) -> dict[bool, set[str]]:
    """The names in the dynamic symbol table: those defined (True) and those that others must define (False)."""
    names: dict[bool, set[str]] = {True: set(), False: set()}
    for line in readelf("--dyn-syms", library).splitlines():
        fields = line.split()
        if len(fields) >= 8 and fields[0].rstrip(":").isdigit():
            names[fields[6] != "UND"].add(fields[7].partition("@")[0])
    return names


def plain(symbol: str) -> str:
    """The C library's function that a fortified call (``__read_chk``, ``__open_2``) checks and makes; others as they are."""
    fortified = re.fullmatch(r"__(\w+)_(?:chk|2)", symbol)
    return fortified[1] if fortified else symbol


def declared_exports() -> set[str]:
    """What csrc/tms.h marks as exported."""
    text = (REPOSITORY / "csrc" / "tms.h").read_text()
    return set(re.findall(r"^TMS_EXPORT [^(;]*?\**(\w+)\(", text, re.MULTILINE))


# The libraries.


def test_libraries_lie_where_programs_look_for_them() -> None:
    assert [str(path) for path in LIBRARIES.values() if not path.is_file()] == []


@needs_readelf
@pytest.mark.parametrize("name", LIBRARIES)
def test_libraries_need_the_c_library_only(name: str) -> None:
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", readelf("--dynamic", LIBRARIES[name])))
    assert "libc.so.6" in needed
    assert needed - SYSTEM_LIBRARIES == set()


#: Every way of the C library and of Python's to end the process, and to write to stdout.
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
    assert {"snprintf", "write"} <= wanted  # the names are those of functions, and there are some
    assert wanted & (ENDS_THE_PROCESS | WRITES_TO_STDOUT) == set()


#: What the C library has no function for.
SYSTEM_CALLS = {"SYS_mbind", "__NR_io_uring_setup", "__NR_io_uring_enter"}


@needs_source_tree
def test_the_system_calls_made_by_number_are_known() -> None:
    """`syscall` could end the process as well; the symbol table does not tell."""
    called: set[str] = set()
    for path in (REPOSITORY / "csrc").rglob("*.c"):
        if path.parent.name != "simulator":
            called.update(re.findall(r"(?<![\w>.])syscall\(\s*([\w]+)", path.read_text()))
    assert called == SYSTEM_CALLS


@needs_source_tree
def test_signals_are_only_asked_for_and_never_sent() -> None:
    """`kill` with the signal 0 asks whether a process lives."""
    calls: list[str] = []
    for path in (REPOSITORY / "csrc").rglob("*.c"):
        calls += re.findall(r"(?<![\w>.])kill\([^;]*?, (\w+)\)", path.read_text())
    assert calls
    assert set(calls) == {"0"}


@needs_source_tree
def test_the_only_plain_write_is_that_of_the_log_to_stderr() -> None:
    calls = {}
    for path in (REPOSITORY / "csrc").rglob("*.c"):
        if path.parent.name != "simulator":
            found = re.findall(r"(?<![\w>.])write\(([^,;]*),", path.read_text())
            if found:
                calls[path.name] = found
    assert calls == {"log.c": ["STDERR_FILENO"]}


@needs_readelf
@pytest.mark.parametrize("name", LIBRARIES)
def test_libraries_are_hardened_where_they_are_mapped(name: str) -> None:
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
    hooks = set(re.findall(r"^\s+X\((\w+),", (REPOSITORY / "csrc/preload/hooks.h").read_text(), re.MULTILINE))
    assert {"cudaMalloc", "cudaFree", "cudaStreamBeginCapture"} <= hooks
    assert dynamic_symbols(LIBRARIES["preload"])[True] == declared_exports() | hooks


@needs_readelf
def test_simulator_exports_calls_and_controls_only() -> None:
    exported = dynamic_symbols(LIBRARIES["simulator"])[True]
    assert {"cuInit", "cuMemCreate", "cudaMalloc", "tms_sim_reset"} <= exported
    assert {name for name in exported if not name.startswith(("cu", "__cuda", "nvml", "tms_sim_"))} == set()


@needs_readelf
@pytest.mark.parametrize("name", ["preload", "simulator"])
def test_libraries_that_are_no_extensions_ask_nothing_of_python_or_cuda(name: str) -> None:
    wanted = dynamic_symbols(LIBRARIES[name])[False]
    assert {symbol for symbol in wanted if symbol.startswith(("Py", "_Py", "cu"))} == set()


def test_preload_library_has_the_bytes_that_launchers_look_for() -> None:
    assert b"TMS_INIT_ENABLE_DISK_BACKUP" in LIBRARIES["preload"].read_bytes()


# One state a process.

IMPORT = "from torch_memory_saver import _core; print(_core.preloaded, _core.library_path)"


def import_with_preload(library: Path | str, directory: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"LD_PRELOAD": str(library)}
    environment["PYTHONPATH"] = os.pathsep.join([str(PACKAGE.parent), *filter(None, [environment.get("PYTHONPATH")])])
    command = [sys.executable, "-c", IMPORT]
    return subprocess.run(command, env=environment, cwd=directory, capture_output=True, text=True, timeout=120)


def test_module_uses_the_preload_library_s_state() -> None:
    library = LIBRARIES["preload"]
    done = import_with_preload(library)
    assert (done.returncode, done.stdout) == (0, f"True {library.resolve()}\n"), done.stderr


def test_path_is_absolute_where_the_loader_was_given_a_relative_one() -> None:
    library = LIBRARIES["preload"]
    done = import_with_preload(f"./{library.name}", directory=library.parent)
    assert (done.returncode, done.stdout) == (0, f"True {library.resolve()}\n"), done.stderr


@needs_compiler
@pytest.mark.parametrize(
    ("source", "offer"),
    [
        ("void *tms_get_api(unsigned version) { (void)version; return 0; }", "no version that this package knows"),
        (
            "static unsigned table[1024] = {7, sizeof(table)};\n"
            "void *tms_get_api(unsigned version) { (void)version; return table; }",
            "version 7 with 4096 bytes",
        ),
        (
            "static unsigned table[2] = {2, 8};\nvoid *tms_get_api(unsigned version) { (void)version; return table; }",
            "version 2 with 8 bytes",
        ),
    ],
)
def test_preload_library_of_another_release_is_refused(source: str, offer: str, tmp_path: Path) -> None:
    library = tmp_path / "other_release.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)], input=source, text=True, check=True)
    done = import_with_preload(library)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: the library {library}, loaded into this process")
    assert offer in last
    assert "LD_PRELOAD" in last


# cuda.h.


@pytest.fixture
def setup_script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """setup.py as a module, on a machine where nothing is in PATH and no toolkit is named."""
    path = REPOSITORY / "setup.py"
    if not path.is_file():
        pytest.skip("needs the source tree")
    pytest.importorskip("setuptools", reason="needs setuptools")
    specification = importlib.util.spec_from_file_location("tms_setup", path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    for variable in ("CUDA_HOME", "CUDA_PATH", "PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(sys, "path", [])
    return module


def make_toolkit(home: Path, include: str = "include") -> Path:
    header = home / include / "cuda.h"
    header.parent.mkdir(parents=True)
    header.touch()
    return header.parent


def make_nvcc(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "nvcc").touch(mode=0o755)
    return folder


def test_cuda_h_is_taken_from_the_most_wanted_place(
    setup_script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from_pip = make_toolkit(tmp_path / "site-packages" / "nvidia" / "cu13")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site-packages")])
    candidates = [str(path) for path in setup_script.cuda_include_candidates()]
    assert candidates == ["/usr/local/cuda/include", str(from_pip)]

    beside_nvcc = make_toolkit(tmp_path / "toolkit")
    monkeypatch.setenv("PATH", str(make_nvcc(tmp_path / "toolkit" / "bin")))
    assert setup_script.find_cuda_include() == str(beside_nvcc)

    from_path = make_toolkit(tmp_path / "cuda_path")
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "cuda_path"))
    assert setup_script.find_cuda_include() == str(from_path)

    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "without"))
    assert setup_script.find_cuda_include() == str(from_path)
    from_home = make_toolkit(tmp_path / "cuda_home")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda_home"))
    assert setup_script.find_cuda_include() == str(from_home)


def test_cuda_h_is_found_where_a_link_to_nvcc_points(
    setup_script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    include = make_toolkit(tmp_path / "toolkit", "targets/x86_64-linux/include")
    compiler = make_nvcc(tmp_path / "toolkit" / "bin") / "nvcc"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").symlink_to(compiler)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert setup_script.find_cuda_include() == str(include)


def test_cuda_h_not_found_is_one_sentence(setup_script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_script, "cuda_include_candidates", lambda: iter([]))
    with pytest.raises(SystemExit) as end:
        setup_script.find_cuda_include()
    message = str(end.value)
    assert message.startswith("error: cuda.h was not found: set CUDA_HOME")
    assert "pip install nvidia-cuda-runtime" in message
    assert "\n" not in message


def test_free_threaded_python_is_refused_in_one_sentence(setup_script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[bool] = []
    monkeypatch.setattr(setup_script, "setup", lambda **_: ran.append(True))
    monkeypatch.setattr(setup_script.sysconfig, "get_config_var", {"Py_GIL_DISABLED": 1}.get)
    with pytest.raises(SystemExit) as end:
        setup_script.main()
    message = str(end.value)
    assert message.startswith("error: free-threaded builds of Python are not supported")
    assert "\n" not in message
    assert ran == []
    monkeypatch.setattr(setup_script.sysconfig, "get_config_var", {"Py_GIL_DISABLED": 0}.get)
    setup_script.main()
    assert ran == [True]


# Compiling.


#: A compiler that writes down what it compiles, and makes empty files of everything but `FAILS`.
COMPILER = """#!/bin/sh
for argument; do
    case "$argument" in *.c) echo "$argument" >>"$LOG"; [ "${argument##*/}" != "$FAILS" ] || exit 1 ;; esac
    [ "$before" != -o ] || : >"$argument"
    before=$argument
done
"""


@needs_source_tree
@pytest.mark.parametrize("command", ["dist_info", "bdist_wheel"])
def test_a_setuptools_that_cannot_make_wheels_is_one_sentence(
    setup_script: ModuleType, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    there = {"setuptools.command.bdist_wheel": False, "wheel": False}
    monkeypatch.setattr(setup_script, "find_spec", lambda name: object() if there[name] else None)
    monkeypatch.setattr(setup_script, "version", lambda name: "65.5.0")
    with pytest.raises(SystemExit) as end:
        setup_script.require_wheel(["setup.py", command, "--output-dir", "x"])
    text = str(end.value)
    assert "setuptools 65.5.0 needs the package wheel" in text
    assert "pip install wheel" in text
    assert "\n" not in text
    setup_script.require_wheel(["setup.py", "-q", "build_ext", "--inplace"])
    for name in there:
        there[name] = True
        setup_script.require_wheel(["setup.py", command])
        there[name] = False


@needs_source_tree
def test_each_file_is_compiled_once(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", reason="needs setuptools")
    compiler, log = tmp_path / "compiler", tmp_path / "log"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    make_toolkit(tmp_path / "cuda")
    folders = ("--build-temp", str(tmp_path / "objects"), "--build-lib", str(tmp_path / "libraries"))
    command = [sys.executable, "setup.py", "-q", "build_ext", "--force", *folders]
    environment = os.environ | {
        "CC": str(compiler),
        "LDSHARED": str(compiler),
        "LOG": str(log),
        "CUDA_HOME": str(tmp_path / "cuda"),
    }
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = [str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "csrc").rglob("*.c")]
    assert sorted(log.read_text().split()) == sorted(expected)
    made = {path.name for path in (tmp_path / "libraries").rglob("*.so")}
    assert made == {path.name for path in LIBRARIES.values()}
    failed = subprocess.run(
        command, cwd=REPOSITORY, env=environment | {"FAILS": "saver.c"}, capture_output=True, text=True, check=False
    )
    assert failed.returncode != 0
    assert "failed" in failed.stderr


@pytest.mark.parametrize(
    ("compiler", "level"),
    [
        ('case "$*" in *_FORTIFY_SOURCE=3*) exit 1 ;; esac', "2"),
        ("exit 0", "3"),
    ],
)
def test_calls_are_fortified_as_far_as_the_compiler_knows(
    setup_script: ModuleType, tmp_path: Path, compiler: str, level: str
) -> None:
    path = tmp_path / "compiler"
    path.write_text(f"#!/bin/sh\n{compiler}\n")
    path.chmod(0o755)
    assert setup_script.fortify([str(path)]) == ["-U_FORTIFY_SOURCE", f"-D_FORTIFY_SOURCE={level}"]


@needs_source_tree
@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("variant", ["plain", "asan", "tsan", "coverage"])
def test_what_the_c_tests_are_built_of_is_not_fortified(variant: str) -> None:
    command = ["make", "--dry-run", "--always-make", "ctest-build", f"VARIANT={variant}", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    compiled = [line for line in done.stdout.splitlines() if " -c csrc/" in line]
    assert len(compiled) >= len(list((REPOSITORY / "csrc").glob("*.c")))
    assert [line for line in compiled if "-U_FORTIFY_SOURCE" not in line or "-D_FORTIFY_SOURCE" in line] == []


# The distribution.


@needs_source_tree
def test_version_has_one_source() -> None:
    import torch_memory_saver

    declared = re.search(r'^version = "(.*)"$', (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE)
    assert declared is not None
    try:
        installed = importlib.metadata.version("torch_memory_saver")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package is not installed: its libraries were built in the source tree")
    assert installed == declared[1]
    assert torch_memory_saver.__version__ == declared[1]


@needs_source_tree
def test_source_distribution_holds_what_building_and_testing_need(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", reason="needs setuptools")
    tree = tmp_path / "tree"
    ignored = shutil.ignore_patterns(".*_cache", ".git", ".venv", ".hypothesis", "build", "dist", "*.egg-info")
    shutil.copytree(REPOSITORY, tree, ignore=ignored)
    command = [sys.executable, "setup.py", "-q", "sdist", "--formats=gztar", "--dist-dir", str(tmp_path / "dist")]
    subprocess.run(command, cwd=tree, check=True, capture_output=True, timeout=120)
    (archive,) = (tmp_path / "dist").iterdir()
    with tarfile.open(archive) as opened:
        packed = {name.partition("/")[2] for name in opened.getnames()}
    endings = (".c", ".h", ".map", ".py", ".pyi", ".md", ".toml", ".in", ".json", ".txt")
    present = {str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file() and path.name.endswith(endings)}
    present = {path for path in present if not path.startswith(".") and ".egg-info" not in path}
    assert len(present) > 50
    assert present - packed == set()
    assert {"LICENSE", "Makefile", ".ci/run", ".clang-format", ".clang-tidy"} <= packed
    assert {name for name in packed if name.endswith((".so", ".o", ".pyc"))} == set()
