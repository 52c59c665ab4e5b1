"""The installed PyTorch as the dynamic linker sees it: where it is, and which CUDA libraries and functions it needs.

PyTorch is not imported, because that would fail without a GPU or its CUDA packages.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch_memory_saver._simulate.elf import SharedLibrary, read_library
from torch_memory_saver.errors import TorchUnavailableError

__all__ = ["DRIVER_SONAME", "TorchBuild", "Wanted", "check_release", "cudnn_versions", "find_torch", "read_wanted"]

DRIVER_SONAME = "libcuda.so.1"

#: NVIDIA's libraries: libcudart, libcublas and so on (but not libcurl), libnccl, libnvrtc, libnvshmem_host, libnvToolsExt.
_NVIDIA_LIBRARY = re.compile(r"lib(?:cu(?!rl)|nv|nccl)")
#: The prefixes of the functions of these libraries.
_PREFIXES = ("cu", "__cuda", "nccl", "nv", "__nv")
#: The functions of a library begin with the library's name, except for these libraries. After "cu" the driver's functions
#: have a capital letter.
_FUNCTIONS = {
    "cuda": re.compile(r"cu(?=[A-Z])"),
    "cudart": re.compile(r"cuda|__cuda"),
    "cufile": re.compile(r"cuFile"),
    "nvToolsExt": re.compile(r"nvtx"),
    "nvshmem_host": re.compile(r"nvshmem"),
}

#: The releases of PyTorch whose operators the simulated GPU knows: the first and the last.
_FIRST_RELEASE = (2, 8)
_LAST_RELEASE = (2, 15)
_RELEASE = re.compile(r"(\d+)\.(\d+)")

_VERSION_FILE = "version.py"
_VERSION_LINE = re.compile(r"^__version__\s*(?::[^=]*)?=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)
_CUDA_LINE = re.compile(r"^cuda\s*(?::[^=]*)?=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)

_REQUIRED_CUDNN = re.compile(r"^Requires-Dist: nvidia-cudnn-cu\d+\s*\(?==\s*(\d+)\.(\d+)\.(\d+)", re.MULTILINE)
_CUDA_VERSION = re.compile(r"(\d+)\.(\d+)")

#: `which` is 0, 1 or 2, for the major, minor or patch version.
_PROPERTY = """\
int cudnnGetProperty(int which, int *value) {{
    static const int parts[] = {{{0}, {1}, {2}}};
    if (which < 0 || which > 2 || !value) return {3};
    *value = parts[which];
    return 0;
}}
"""
_NUMBER = "unsigned long {0}(void) {{ return {1}; }}\n"


@dataclass(frozen=True)
class TorchBuild:
    """An installed PyTorch that was built with CUDA.

    Attributes:
        version: As in ``torch.__version__``.
        cuda: The CUDA version it was built with, such as "13.0".
        folder: The folder of its shared libraries.
    """

    version: str
    cuda: str
    folder: Path

    def libraries(self) -> list[Path]:
        """Return its shared libraries, sorted by name."""
        return sorted(path for path in self.folder.iterdir() if path.name.endswith(".so") and path.is_file())

    def found_by_rpath(self, sonames: Iterable[str]) -> list[str]:
        """Return the libraries among `sonames` that PyTorch finds by its RPATH, which is searched before LD_LIBRARY_PATH."""
        folders = {folder for path in self.libraries() for folder in read_library(path, prefixes=()).rpath}
        return sorted(soname for soname in sonames if any((folder / soname).exists() for folder in folders))


@dataclass(frozen=True)
class Wanted:
    """A CUDA library that PyTorch needs.

    Attributes:
        soname: Such as "libcublas.so.13".
        functions: The name of each function that PyTorch takes from it, and the version node of the function, or "".
        answers: The functions that do not fail, and the C source of each.
    """

    soname: str
    functions: dict[str, str]
    answers: Mapping[str, str] = field(default_factory=dict)


def check_release(version: str) -> None:
    """Check that the simulated GPU knows the operators of this release of PyTorch.

    Args:
        version: Value of ``torch.__version__``, such as "2.11.0+cu130".

    Raises:
        TorchUnavailableError: The release is not supported.
    """
    found = _RELEASE.match(version)
    if found is None or not _FIRST_RELEASE <= (int(found[1]), int(found[2])) <= _LAST_RELEASE:
        first, last = (".".join(map(str, release)) for release in (_FIRST_RELEASE, _LAST_RELEASE))
        raise TorchUnavailableError(
            f"the simulated GPU does not support PyTorch {version}: install one of the releases {first} to {last}",
            operation="simulate",
        )


def find_torch() -> TorchBuild | None:
    """Return the PyTorch that this interpreter would import, or None if it has none.

    Raises:
        TorchUnavailableError: It is not a build for CUDA, its release is not supported, or a file or a folder of it is
            missing.
    """
    try:
        specification = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        specification = None
    # A folder named torch without a module in it is not PyTorch.
    if specification is None or specification.origin is None:
        return None
    package = Path(specification.origin).parent
    try:
        text = (package / _VERSION_FILE).read_text()
    except OSError as error:
        raise TorchUnavailableError(f"{package} is not an installed PyTorch: {error}", operation="simulate") from error
    version = _VERSION_LINE.search(text)
    cuda = _CUDA_LINE.search(text)
    if version is None:
        raise TorchUnavailableError(f"{package / _VERSION_FILE} does not say which version it is", operation="simulate")
    if cuda is None:
        public = version[1].partition("+")[0]
        raise TorchUnavailableError(
            f"the PyTorch in {package} ({version[1]}) is built without CUDA, and only the CUDA build can use a GPU, even a "
            "simulated one. Install the CUDA build; NVIDIA's packages are not needed: "
            f"pip install --force-reinstall --no-deps torch=={public} (the plain wheel on PyPI, not one of a CPU index)",
            operation="simulate",
        )
    check_release(version[1])
    folder = package / "lib"
    if not folder.is_dir():
        raise TorchUnavailableError(f"the PyTorch in {package} has no folder {folder.name}", operation="simulate")
    return TorchBuild(version[1], cuda[1], folder)


def read_wanted(build: TorchBuild, provided: Iterable[str]) -> list[Wanted]:
    """Return the CUDA libraries that PyTorch's libraries need, sorted by name, with the functions that they take from each.

    Args:
        build: The installed PyTorch.
        provided: The functions that the simulated GPU has. The simulated GPU is the driver's library. So a driver function
            that it lacks is added to another CUDA library that the same library of PyTorch needs.
    """
    libraries = [read_library(path, _PREFIXES) for path in build.libraries()]
    own = {library.soname or library.path.name for library in libraries} | {path.name for path in build.folder.iterdir()}
    functions: dict[str, dict[str, str]] = {
        soname: {}
        for library in libraries
        for soname in library.needed
        if soname not in own and _NVIDIA_LIBRARY.match(soname)
    }
    internal = {symbol.name for library in libraries for symbol in library.symbols if symbol.defined}
    for library in libraries:
        _collect(library, functions, internal, frozenset(provided))
    functions.pop(DRIVER_SONAME, None)
    answers = cudnn_versions(build.folder.parent, build.cuda)
    return [Wanted(soname, functions[soname], answers) for soname in sorted(functions)]


def _collect(
    library: SharedLibrary, functions: dict[str, dict[str, str]], internal: set[str], provided: frozenset[str]
) -> None:
    """Add the functions that one library needs to the entries of the libraries that have them."""
    candidates = [soname for soname in library.needed if soname in functions]
    stand_in = next((soname for soname in candidates if soname != DRIVER_SONAME), None)
    for symbol in library.symbols:
        if symbol.defined or symbol.weak:
            continue
        if symbol.library:
            if symbol.library in functions:
                functions[symbol.library][symbol.name] = symbol.version
            continue
        if symbol.name in internal:
            continue
        owner = _owner(symbol.name, candidates)
        if owner == DRIVER_SONAME:
            owner = None if symbol.name in provided else stand_in
        if owner is not None:
            functions[owner].setdefault(symbol.name, "")


def _owner(name: str, sonames: Iterable[str]) -> str | None:
    """Return the library that a function without a version belongs to: the one whose prefix is the longest; None if none
    fits."""
    best: tuple[int, str] | None = None
    for soname in sonames:
        base = soname.removeprefix("lib").partition(".")[0]
        match = _FUNCTIONS.get(base, re.compile(re.escape(base))).match(name)
        if match is not None and (best is None or match.end() > best[0]):
            best = (match.end(), soname)
    return None if best is None else best[1]


def cudnn_versions(package: Path, cuda: str) -> dict[str, str]:
    """Return the C source of each function of cuDNN that returns a version, by its name; empty if the version is unknown.

    PyTorch compares the version with the one that it was compiled with, and programs print it. Ordinary programs ask no
    other library for its version.

    Args:
        package: The folder of the installed PyTorch.
        cuda: The CUDA version that PyTorch was built with, such as "13.0".
    """
    version, runtime = _required_cudnn(package), _CUDA_VERSION.match(cuda)
    if version is None or runtime is None:
        return {}
    major, minor, patch = version
    number = 10000 * major + 100 * minor + patch if major >= 9 else 1000 * major + 100 * minor + patch
    bad_parameter = 2000 if major >= 9 else 3
    return {
        "cudnnGetVersion": _NUMBER.format("cudnnGetVersion", number),
        "cudnnGetCudartVersion": _NUMBER.format("cudnnGetCudartVersion", 1000 * int(runtime[1]) + 10 * int(runtime[2])),
        "cudnnGetProperty": _PROPERTY.format(*version, bad_parameter),
    }


def _required_cudnn(package: Path) -> tuple[int, int, int] | None:
    """Return the version of cuDNN that the installed PyTorch requires; None if its metadata does not name one."""
    for metadata in sorted(package.parent.glob("torch-*.dist-info/METADATA")):
        found = _REQUIRED_CUDNN.search(metadata.read_text(errors="replace"))
        if found is not None:
            return int(found[1]), int(found[2]), int(found[3])
    return None
