"""The installed PyTorch as the dynamic linker sees it: where it is, which CUDA libraries and functions it needs.

torch is not imported: without a GPU or its CUDA packages that would fail.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch_memory_saver._simulate import versions
from torch_memory_saver._simulate.elf import SharedLibrary, read_library
from torch_memory_saver.errors import TorchUnavailableError

__all__ = ["DRIVER_SONAME", "TorchBuild", "Wanted", "find_torch", "read_wanted"]

DRIVER_SONAME = "libcuda.so.1"

#: NVIDIA's libraries: libcudart, libcublas and so on (but not libcurl), libnccl, libnvrtc, libnvshmem_host, libnvToolsExt.
_NVIDIA_LIBRARY = re.compile(r"lib(?:cu(?!rl)|nv|nccl)")
#: What the names of these libraries' functions begin with.
_PREFIXES = ("cu", "__cuda", "nccl", "nv", "__nv")
#: The names of a library's functions begin with the library's name, but for these. The driver's go on with a capital.
_FUNCTIONS = {
    "cuda": re.compile(r"cu(?=[A-Z])"),
    "cudart": re.compile(r"cuda|__cuda"),
    "cufile": re.compile(r"cuFile"),
    "nvToolsExt": re.compile(r"nvtx"),
    "nvshmem_host": re.compile(r"nvshmem"),
}

_VERSION_FILE = "version.py"
_VERSION_LINE = re.compile(r"^__version__\s*(?::[^=]*)?=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)
_CUDA_LINE = re.compile(r"^cuda\s*(?::[^=]*)?=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)


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
        """Its shared libraries, in order of their names."""
        return sorted(path for path in self.folder.iterdir() if path.name.endswith(".so") and path.is_file())

    def found_by_rpath(self, sonames: Iterable[str]) -> list[str]:
        """Those of the libraries of which torch finds a real one by its RPATH, before LD_LIBRARY_PATH is looked at."""
        folders = {folder for path in self.libraries() for folder in read_library(path, prefixes=()).rpath}
        return sorted(soname for soname in sonames if any((folder / soname).exists() for folder in folders))


@dataclass(frozen=True)
class Wanted:
    """A CUDA library that torch needs.

    Attributes:
        soname: Such as "libcublas.so.13".
        functions: Name of each function that torch takes from it -> the version node it is in, or "".
        answers: Those of them that do something -> their C text.
    """

    soname: str
    functions: dict[str, str]
    answers: Mapping[str, str] = field(default_factory=dict)


def find_torch() -> TorchBuild | None:
    """The PyTorch that this interpreter would import, or None if it has none.

    Raises:
        TorchUnavailableError: It is not a build for CUDA, or its folders do not look as expected.
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
            f"the PyTorch in {package} ({version[1]}) is built without CUDA, and only the CUDA build can use a GPU, also a "
            "simulated one. Install the CUDA build, without NVIDIA's packages, which are not needed: "
            f"pip install --force-reinstall --no-deps torch=={public} (the plain wheel on PyPI, not one of a CPU index)",
            operation="simulate",
        )
    folder = package / "lib"
    if not folder.is_dir():
        raise TorchUnavailableError(f"the PyTorch in {package} has no folder {folder.name}", operation="simulate")
    return TorchBuild(version[1], cuda[1], folder)


def read_wanted(build: TorchBuild, provided: Iterable[str]) -> list[Wanted]:
    """The CUDA libraries that torch's libraries need, with the functions that they take from each; in order of their names.

    Args:
        build: The installed torch.
        provided: The functions that the simulated GPU has. Functions of the driver that it lacks are added to another
            library of those that need them, because the driver is the simulated GPU itself.
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
    answers = versions.answers(build.folder.parent, build.cuda)
    return [Wanted(soname, functions[soname], answers) for soname in sorted(functions)]


def _collect(
    library: SharedLibrary, functions: dict[str, dict[str, str]], internal: set[str], provided: frozenset[str]
) -> None:
    """Notes the functions that one library needs under the library that has them."""
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
    """The library that a function without a version belongs to, by its name: the one whose prefix is the longest."""
    best: tuple[int, str] | None = None
    for soname in sonames:
        base = soname.removeprefix("lib").partition(".")[0]
        match = _FUNCTIONS.get(base, re.compile(re.escape(base))).match(name)
        if match is not None and (best is None or match.end() > best[0]):
            best = (match.end(), soname)
    return None if best is None else best[1]
