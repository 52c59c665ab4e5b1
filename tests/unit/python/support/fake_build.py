"""Small shared libraries, compiled by the tests of `simulate`: an installed PyTorch as the dynamic linker sees it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc, to compile small libraries")

VERSION = "2.11.0+cu130"
#: The return value of the stand-ins for NVIDIA's real libraries.
REAL = 4242

#: soname -> version node ("" for none), functions. No simulated GPU has cuFancy, cudaFancy and so on.
LIBRARIES: dict[str, tuple[str, list[str]]] = {
    "libcudart.so.13": ("libcudart.so.13", ["cudaMalloc", "cudaFree", "cudaFancy"]),
    "libnccl.so.2": ("", ["ncclFancy", "ncclFancyErrorString"]),
    "libcufile.so.0": ("", ["cuFileFancy"]),
    "libnvshmem_host.so.3": ("NVSHMEM", ["nvshmem_malloc"]),
    "libcuda.so.1": ("", ["cuInit", "cuFancy"]),
    "libcurand.so.10": ("", []),
    "libcurl.so.4": ("", ["curl_fancy"]),
}

#: torch's own library: functions that call those of the others.
TORCH = """
#include <stddef.h>
int cudaMalloc(void **, size_t); int cudaFree(void *); int cudaFancy(int); int ncclFancy(void); int cuFileFancy(void);
const char *ncclFancyErrorString(int); void *nvshmem_malloc(size_t); int cuInit(unsigned); int cuFancy(void);
int curl_fancy(void);
__attribute__((weak)) int cudaOptional(void);
int cudaOfItsOwn(void) { return 1; }
int call_malloc_and_free(void) {
    void *address = NULL;
    int result = cudaMalloc(&address, 4096);
    return result ? result : address ? cudaFree(address) : -1;
}
int call_fancy(void) { return cudaFancy(3); }
int call_nccl(void) { return ncclFancy(); }
const char *call_text(void) { return ncclFancyErrorString(1); }
int call_file(void) { return cuFileFancy(); }
void *call_pointer(void) { return nvshmem_malloc(1); }
int call_driver(void) { return cuInit(0); }
int call_fancy_driver(void) { return cuFancy(); }
int call_optional(void) { return cudaOptional ? cudaOptional() : -1; }
int call_curl(void) { return curl_fancy(); }
"""


def compile_library(path: Path, source: str, *, node: str = "", flags: Sequence[str] = ()) -> Path:
    """Compiles C text to the shared library `path`, whose symbols are in the version node `node`, if given."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = path.with_suffix(".c")
    text.write_text(source)
    command = ["gcc", "-shared", "-fPIC", "-w", "-o", str(path), str(text), f"-Wl,-soname,{path.name}", *flags]
    if node:
        script = path.with_suffix(".map")
        script.write_text(f"{node} {{ global: *; }};\n")
        command.append(f"-Wl,--version-script={script}")
    subprocess.run(command, check=True)
    return path


def compile_real_libraries(folder: Path) -> None:
    """What torch is linked with: libraries whose functions return REAL. They are needed to link the fake torch only."""
    for soname, (node, functions) in LIBRARIES.items():
        source = "".join(f"long {name}(void) {{ return {REAL}; }}\n" for name in functions) or "int unused;"
        compile_library(folder / soname, source, node=node)


def make_torch(site: Path, *, cuda: str | None = "13.0", rpath: str = "") -> Path:
    """An importable folder `torch` in `site`, with libraries; returns the path of its libtorch_cuda.so. Importing it fails.

    With `rpath`, its libraries are searched for there first, as in PyTorch's wheels.
    """
    package = site / "torch"
    (package / "lib").mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('this must not be imported')\n")
    (package / "version.py").write_text(
        f"from typing import Optional\n__version__ = '{VERSION}'\ncuda: Optional[str] = {cuda!r}\nhip = None\n"
    )
    real = site / "real"
    compile_real_libraries(real)
    linked = [f"-L{real}", "-Wl,--no-as-needed", *(f"-l:{soname}" for soname in LIBRARIES)]
    search = [f"-Wl,--disable-new-dtags,-rpath,{rpath}"] if rpath else []
    return compile_library(package / "lib" / "libtorch_cuda.so", TORCH, flags=[*linked, *search])
