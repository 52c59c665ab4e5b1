"""Builds the three native libraries; everything else about the package is in pyproject.toml.

- ``torch_memory_saver/_core.abi3.so``: the Python extension with the native core in it.
- ``torch_memory_saver_hook_mode_preload.abi3.so``, beside the package: the core and the interposers, for LD_PRELOAD.
- ``torch_memory_saver/_simulated_cuda.so``: the simulated GPU.

Every build also puts them beside the sources, so that Python started in a clone finds them. They need a C compiler, Python's
headers and ``cuda.h``; with the headers of nvtx3, profilers see pauses as NVTX ranges. They are linked with the C library
only: the CUDA driver is looked for when it is first needed.

A wheel has them without debug data. The libraries beside the sources keep it, and ``TMS_SYMBOLS=FOLDER`` writes that of the
wheel to a folder as well, in files that debuggers find by the build ID of a library.
``TMS_WERROR=1`` makes warnings errors. ``TMS_PINNED_VERSION=0.0.9`` gives the package a version that meets the pin
``torch_memory_saver==0.0.9`` (package_version).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from glob import glob
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path
from typing import Any

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.install_lib import install_lib

PACKAGE = "torch_memory_saver"

CORE = f"{PACKAGE}._core"
DECLARATIONS = f"{PACKAGE}/_core.pyi"
PRELOAD = "torch_memory_saver_hook_mode_preload"
SIMULATOR = f"{PACKAGE}._simulated_cuda"

#: Its own module, because each run of pytest imports it where the package is installed.
PYTEST_PLUGIN = f"{PACKAGE}_pytest"

#: Has the version of the package, which nothing else says.
VERSION_FILE = f"{PACKAGE}/_interface.py"
PINNED_VERSION = "TMS_PINNED_VERSION"
SYMBOLS = "TMS_SYMBOLS"

#: The layers of the native core, the lowest first (ARCHITECTURE.md). The extension and the preload libraries have them all.
CORE_LAYERS = ["csrc/base", "csrc/device", "csrc/backup", "csrc/core", "csrc/abi"]

#: The oldest Python whose limited API is used; the tag of the wheel says the same.
LIMITED_API = "0x030A0000"
WHEEL_TAG = "cp310"

COMPILE_FLAGS = ["-std=c11", "-O2", "-g", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra"]
#: An overflow of a buffer ends the process before it does more harm. fortify() adds the checks of the C library's calls.
COMPILE_FLAGS += ["-fstack-protector-strong"]
#: A library's calls of its own functions stay in it, although another loaded library may export the same names.
LINK_FLAGS = ["-pthread", "-Wl,-Bsymbolic-functions", "-Wl,--as-needed"]
#: The stack holds no code. All calls are resolved at loading, so that the table of their addresses is read-only from then
#: on. That holds for the preload library too: lazy binding would save 40 µs at the start of a process, which takes 600.
LINK_FLAGS += ["-Wl,-z,noexecstack", "-Wl,-z,relro", "-Wl,-z,now"]
#: Not every compiler asks for the ID that connects a library with its debug data.
LINK_FLAGS += ["-Wl,--build-id=sha1"]
#: What torch, atexit or another thread may still call must not be unmapped by a dlclose.
STAY_LOADED = ["-Wl,-z,nodelete"]
#: Every symbol must be found while linking. The Python extension cannot ask for that: the interpreter has Python's.
ALL_DEFINED = ["-Wl,--no-undefined"]


def cuda_include_candidates() -> Iterator[Path]:
    """Folders that may hold cuda.h or nvtx3, the most wanted first."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            yield Path(os.environ[variable], "include")
    nvcc = shutil.which("nvcc")
    if nvcc:
        # nvcc may be a link in a common folder. Packages of conda keep the headers in a folder of their own.
        for home in (Path(nvcc).parent.parent, Path(nvcc).resolve().parent.parent):
            yield home / "include"
            yield from sorted(home.glob("targets/*-linux/include"))
    yield Path("/usr/local/cuda/include")
    # The pip packages nvidia-cuda-runtime and nvidia-nvtx, which pyproject.toml names as build requirements.
    for entry in sys.path:
        yield from sorted(Path(entry or ".").glob("nvidia/*/include"), reverse=True)


def find_cuda_include() -> str:
    """The folder with cuda.h. Exits with one sentence if there is none."""
    for folder in cuda_include_candidates():
        if (folder / "cuda.h").is_file():
            return str(folder)
    raise SystemExit(
        "error: cuda.h was not found: set CUDA_HOME to a CUDA toolkit (12 or newer), or 'pip install nvidia-cuda-runtime' "
        "into the environment that builds this package; a GPU or a CUDA driver is not needed."
    )


def find_nvtx_include() -> str | None:
    """The folder with the headers of NVTX, or None: without them the package has no NVTX ranges."""
    folders = (folder for folder in cuda_include_candidates() if Path(folder, "nvtx3", "nvToolsExt.h").is_file())
    return next(map(str, folders), None)


def include_options() -> list[str]:
    """The compiler's options for the headers of CUDA. System folders, so that nothing in them gives a warning."""
    folders = dict.fromkeys(filter(None, (find_cuda_include(), find_nvtx_include())))
    return [option for folder in folders for option in ("-isystem", folder)]


def fortify(compiler: list[str]) -> list[str]:
    """The options for checked calls of the C library, at the highest level that this compiler and C library know: a level
    that they do not know is a warning. They need optimisation. Distributions and CFLAGS may have defined the macro."""
    options = ["-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=3"]
    command = [*compiler, "-O2", *options, "-Werror", "-E", "-o", os.devnull, "-x", "c", "-"]
    known = subprocess.run(command, input="#include <stdlib.h>", text=True, stderr=subprocess.DEVNULL).returncode == 0
    return options if known else ["-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2"]


def without_run_paths(command: Sequence[str]) -> list[str]:
    """The linker's command without run paths. A Python that was built for its own folder links extensions with the path of
    its library, where the loader of every machine that installs the wheel would look for the C library first."""
    words: list[str] = []
    for word in shlex.split(shlex.join(command).replace("-Xlinker ", "-Wl,")):
        words += [f"-Wl,{part}" for part in word.split(",")[1:]] if word.startswith("-Wl,") else [word]
    kept: list[str] = []
    following = iter(words)
    for word in following:
        if re.fullmatch(r"-Wl,(--?rpath|-R)", word):
            next(following, None)
        elif not re.match(r"-Wl,(--?rpath=|-R.)", word):
            kept.append(word)
    return kept


def strip(library: Path) -> None:
    """Removes the debug data of a library, and writes it to the folder TMS_SYMBOLS if that is set. The names of functions
    stay, for profilers and for the stacks of debuggers."""
    objcopy = shutil.which("objcopy")
    if objcopy is None:
        print(f"warning: {library.name} keeps its debug data, because objcopy (binutils) was not found", file=sys.stderr)
        return
    if os.environ.get(SYMBOLS):
        identity = build_id(library)
        folder = Path(os.environ[SYMBOLS], ".build-id", identity[:2])
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run([objcopy, "--only-keep-debug", library, folder / f"{identity[2:]}.debug"], check=True)
    subprocess.run([objcopy, "--strip-debug", library], check=True)


def build_id(library: Path) -> str:
    """The ID in the note of the linker: sizes of the note's name and of the ID, the type 3, the name, the ID."""
    _, _, following = library.read_bytes().partition(struct.pack("=3I", 4, 20, 3) + b"GNU\0")
    return following[:20].hex()


def interface() -> int:
    """The number of the interface between the Python files and the library, which the package compares at import: a checksum
    of what declares the library's functions. Exits with one sentence if that does not fit the C code."""
    text = Path(DECLARATIONS).read_text(encoding="utf-8")
    if text != run_path("tools/core_stub.py")["stub"]():
        raise SystemExit(f"error: {DECLARATIONS} does not declare what csrc/include has: run 'make stub'.")
    return zlib.crc32(text.encode())


def sources(*folders: str) -> list[str]:
    return sorted(path for folder in folders for path in glob(f"{folder}/**/*.c", recursive=True))


def native(name: str, *folders: str, link_flags: list[str]) -> Extension:
    """A library of the C files in `folders`; the last one has its exports. All are compiled with the same options, so that
    those of more than one library can be compiled once."""
    warnings_are_errors = ["-Werror"] if os.environ.get("TMS_WERROR") == "1" else []
    exports = f"{folders[-1]}/exports.map"
    return Extension(
        name,
        sources=sources(*folders),
        include_dirs=["csrc"],
        depends=[
            "setup.py",
            DECLARATIONS,
            exports,
            *sorted(glob("csrc/**/*.h", recursive=True) + glob("csrc/include/*.def") + glob("csrc/kernels/*.ptx")),
        ],
        define_macros=[("_GNU_SOURCE", None), ("Py_LIMITED_API", LIMITED_API), ("TMS_INTERFACE", str(interface()))],
        extra_compile_args=[*COMPILE_FLAGS, *warnings_are_errors],
        extra_link_args=[*LINK_FLAGS, *link_flags, f"-Wl,--version-script={exports}"],
        libraries=["dl", "rt"],
        py_limited_api=name != SIMULATOR,
    )


class BuildLibraries(build_ext):
    """Builds libraries of which only one is a Python extension."""

    def finalize_options(self) -> None:
        super().finalize_options()
        # One library after the other: they share objects, whose files are compiled at the same time.
        self.parallel = None

    def run(self) -> None:
        super().run()  # which copies them itself with --inplace and for an editable install
        if not self.inplace:
            self.copy_extensions_to_source()

    def copy_extensions_to_source(self) -> None:
        """Writes them aside and renames them: processes keep what they have loaded, and none meets a part of a library."""
        for extension in self.extensions:
            place = Path(self.get_ext_filename(extension.name))
            aside = place.with_name(f".{os.getpid()}.{place.name}")
            try:
                shutil.copy(Path(self.build_lib, place), aside)
                os.replace(aside, place)
            finally:
                aside.unlink(missing_ok=True)

    def build_extensions(self) -> None:
        """With the headers of CUDA, which only compiling needs, and with no run path of Python's or of the environment."""
        os.environ.pop("LD_RUN_PATH", None)
        self.compiler.linker_so = without_run_paths(self.compiler.linker_so)
        options = [*include_options(), *fortify(self.compiler.compiler_so)]
        for extension in self.extensions:
            extension.extra_compile_args += options
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            self.compile_at_the_same_time(pool)
            super().build_extensions()

    def compile_at_the_same_time(self, pool: ThreadPoolExecutor) -> None:
        """setuptools compiles the files of a library one after the other, and those of the core again for each library."""
        compile_file, compile_files = self.compiler._compile, self.compiler.compile
        begun: dict[str, Future[None]] = {}

        def begin(*arguments: Any) -> None:
            what = repr(arguments)
            if what not in begun:
                begun[what] = pool.submit(compile_file, *arguments)

        def compile_all(*arguments: Any, **options: Any) -> list[str]:
            objects: list[str] = compile_files(*arguments, **options)
            for work in begun.values():
                work.result()
            return objects

        self.compiler._compile, self.compiler.compile = begin, compile_all

    def get_ext_filename(self, fullname: str) -> str:
        """The simulator is no extension of any Python, so its name carries no Python's suffix."""
        *folders, name = fullname.split(".")
        if name == SIMULATOR.rpartition(".")[2]:
            return os.path.join(*folders, f"{name}.so")
        return str(super().get_ext_filename(fullname))

    def get_libraries(self, ext: Extension) -> list[str]:
        """Never libpython: the interpreter that loads the extension has it, and the others do not need it."""
        return list(ext.libraries)

    def get_export_symbols(self, ext: Extension) -> list[str]:
        """The export maps say what is exported; the others have no PyInit function."""
        return []


class InstallLibraries(install_lib):
    """Makes the contents of a wheel, from what was built."""

    def install(self) -> list[str]:
        installed: list[str] = super().install()
        for path in map(Path, installed):
            if path.suffix == ".so":
                strip(path)
        return installed


def package_version() -> str:
    """The version of the distribution: that of the Python files, or, with TMS_PINNED_VERSION, the pinned version with the
    former as its local part. For pip, the version 0.0.9+ours.1.0.0a1 meets the requirement ==0.0.9 and is newer than 0.0.9.
    Exits with one sentence if the variable is no release number."""
    found = re.search(r'^__version__ = "(.+)"$', Path(VERSION_FILE).read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise SystemExit(f"error: {VERSION_FILE} does not say __version__.")
    pinned = os.environ.get(PINNED_VERSION)
    if not pinned:
        return found[1]
    if not re.fullmatch(r"\d+(\.\d+)+(\.post\d+)?", pinned):
        raise SystemExit(
            f"error: {PINNED_VERSION}={pinned} is no release number: set it to the version that is pinned, as 0.0.9."
        )
    return f"{pinned}+ours.{found[1]}"


def refuse_free_threaded_python() -> None:
    """Exits with one sentence where Python has no stable ABI, which the extension and the tag of the wheel are made for."""
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise SystemExit(
            "error: free-threaded builds of Python are not supported, because they lack the stable ABI (abi3): install "
            "torch_memory_saver with a build of Python that has the GIL."
        )


def require_compiler(arguments: Sequence[str]) -> None:
    """Exits with one sentence where libraries are to be built and no C compiler works, before anything else is printed."""
    if not {"bdist_wheel", "build", "build_ext", "develop", "editable_wheel", "install"} & set(arguments):
        return
    command = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC"))
    command += [f"-I{sysconfig.get_path(kind)}" for kind in ("include", "platinclude")]
    command += ["-fsyntax-only", "-x", "c", "-"]
    program = "#include <stdlib.h>\n#include <Python.h>\n"
    try:
        done = subprocess.run(command, input=program, stderr=subprocess.PIPE, text=True)
        if done.returncode == 0:
            return
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        reason = f"{command[0]} says '{errors[0]}'" if errors else f"{command[0]} fails with the status {done.returncode}"
    except OSError as error:
        reason = f"the C compiler {command[0]} cannot be started ({error.strerror})"
    raise SystemExit(
        f"error: the libraries of {PACKAGE} cannot be compiled, because {reason}: install a C compiler and the headers of C "
        "and of Python (Debian: apt-get install gcc libc6-dev python3-dev; Fedora: dnf install gcc python3-devel), or set "
        "CC to the compiler that is to be used."
    )


def require_wheel(arguments: Sequence[str]) -> None:
    """Exits with one sentence where setuptools is to make a wheel, does not know how to (before 70.1), and lacks the package
    that does: it would say "invalid command 'bdist_wheel'". An isolated build has that package (pyproject.toml)."""
    if not {"bdist_wheel", "dist_info"} & set(arguments):
        return
    if find_spec("setuptools.command.bdist_wheel") is None and find_spec("wheel") is None:
        raise SystemExit(
            f"error: setuptools {version('setuptools')} needs the package wheel to build one: pip install wheel, or pip "
            "install 'setuptools>=70.1', and install torch_memory_saver again."
        )


def main() -> None:
    refuse_free_threaded_python()
    require_wheel(sys.argv)
    require_compiler(sys.argv)
    setup(
        version=package_version(),
        license="Apache-2.0",
        packages=find_packages(include=[PACKAGE, f"{PACKAGE}.*"]),
        py_modules=[PYTEST_PLUGIN],
        package_data={
            PACKAGE: ["py.typed", "*.pyi", "_site/*.py"],
            f"{PACKAGE}.observe.memory.comparison.html": ["*.html", "*.css", "*.js"],
            f"{PACKAGE}.observe.events.timeline.html": ["*.html", "*.css", "*.js"],
            f"{PACKAGE}.observe._html": ["*.css", "*.js"],
        },
        include_package_data=False,
        zip_safe=False,
        ext_modules=[
            native(CORE, *CORE_LAYERS, "csrc/python", link_flags=STAY_LOADED),
            native(PRELOAD, *CORE_LAYERS, "csrc/preload", link_flags=[*STAY_LOADED, *ALL_DEFINED]),
            native(SIMULATOR, "csrc/simulator", link_flags=ALL_DEFINED),
        ],
        cmdclass={"build_ext": BuildLibraries, "install_lib": InstallLibraries},
        options={"bdist_wheel": {"py_limited_api": WHEEL_TAG}},
    )


if __name__ == "__main__":
    main()
