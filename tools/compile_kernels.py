"""Compiles csrc/kernels/*.cu and benchmarks/*.cu to PTX, with the oldest NVRTC of CUDA 12, so that every driver of CUDA 12
and 13 can load it.

    python tools/compile_kernels.py           # writes the .ptx beside each source
    python tools/compile_kernels.py --check   # fails if a file is out of date

NVRTC is a library of the package nvidia-cuda-nvrtc-cu12, of exactly the release in REQUIREMENT. It needs no GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from importlib import metadata
from pathlib import Path

REQUIREMENT = "nvidia-cuda-nvrtc-cu12==12.0.140"
ROOT = Path(__file__).resolve().parents[1]
#: Folders with kernels.
KERNELS = (ROOT / "csrc" / "kernels", ROOT / "benchmarks")
#: Headers that kernels share with their callers.
HEADERS = ROOT / "csrc" / "include"
#: With relocatable code a global is visible in the PTX, so that cuModuleGetGlobal finds it.
OPTIONS = (b"--gpu-architecture=compute_70", b"--std=c++14", b"--relocatable-device-code=true")


class CompilationError(Exception):
    """NVRTC has failed, with the log as the text."""


def load_nvrtc() -> ctypes.CDLL:
    """Return NVRTC.

    Raises:
        CompilationError: The package is not installed, or is another release.
    """
    name, _, wanted = REQUIREMENT.partition("==")
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        raise CompilationError(f"NVRTC is not installed: pip install {REQUIREMENT}") from None
    if found.version != wanted:
        raise CompilationError(f"NVRTC {found.version} is installed, and would write other PTX: pip install {REQUIREMENT}")
    return ctypes.CDLL(str(found.locate_file("nvidia/cuda_nvrtc/lib/libnvrtc.so.12")))


def compile_kernel(nvrtc: ctypes.CDLL, source: Path) -> bytes:
    """Return the PTX of a source file, which may include the headers in HEADERS.

    Raises:
        CompilationError: NVRTC has refused the source, or warns.
    """
    headers = sorted(HEADERS.glob("*.h"))
    texts = (ctypes.c_char_p * len(headers))(*[each.read_bytes() for each in headers])
    names = (ctypes.c_char_p * len(headers))(*[each.name.encode() for each in headers])
    program = ctypes.c_void_p()
    result = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), source.read_bytes(), source.name.encode(), len(headers), texts, names
    )
    if result != 0:
        raise CompilationError(f"nvrtcCreateProgram failed with {result}")
    result = nvrtc.nvrtcCompileProgram(program, len(OPTIONS), (ctypes.c_char_p * len(OPTIONS))(*OPTIONS))
    log = _text(nvrtc, program, "ProgramLog").decode().strip("\0\n")
    if result != 0 or log:
        raise CompilationError(f"{source.name}: {log or result}")
    return _text(nvrtc, program, "PTX").rstrip(b"\0")


def _text(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, name: str) -> bytes:
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{name}Size")(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{name}")(program, text)
    return text.raw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, and fail if a file is out of date")
    options = parser.parse_args()
    try:
        nvrtc = load_nvrtc()
        for source in sorted(path for folder in KERNELS for path in folder.glob("*.cu")):
            target, ptx = source.with_suffix(".ptx"), compile_kernel(nvrtc, source)
            if not options.check:
                target.write_bytes(ptx)
            elif not target.exists() or target.read_bytes() != ptx:
                sys.exit(f"{target.name} is out of date: run python tools/compile_kernels.py")
    except CompilationError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
