"""Guards the compiled kernels: their PTX is what the oldest NVRTC of CUDA 12 makes of the sources, and the assemblers of
CUDA 12 and 13 accept it, without local memory, for the oldest GPU and for newer ones."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
if not (REPOSITORY / "csrc").is_dir():
    pytest.skip("needs the sources: there is no csrc/", allow_module_level=True)

KERNELS = [*sorted((REPOSITORY / "csrc" / "kernels").glob("*.cu")), *sorted((REPOSITORY / "benchmarks").glob("*.cu"))]
#: Packages with ptxas, and the GPUs that each is tried for: sm_<number>. The one of CUDA 13 does not know sm_70.
ASSEMBLERS = {
    "nvidia-cuda-nvcc-cu12": ("nvidia/cuda_nvcc/bin/ptxas", (70, 80, 90, 100)),
    "nvidia-cuda-nvcc": ("nvidia/cu13/bin/ptxas", (80, 90, 100)),
}


def _tool() -> ModuleType:
    specification = importlib.util.spec_from_file_location("compile_kernels", REPOSITORY / "tools" / "compile_kernels.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def _installed(package: str) -> metadata.Distribution:
    try:
        return metadata.distribution(package)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed: pip install --no-deps with the packages of the extra 'kernels'")


def test_there_are_kernels() -> None:
    assert [path.name for path in KERNELS] == ["fingerprint.cu", "device_read.cu"]


@pytest.mark.parametrize("source", KERNELS, ids=lambda path: path.stem)
def test_the_ptx_is_what_the_source_compiles_to(source: Path) -> None:
    tool = _tool()
    _installed(tool.REQUIREMENT.partition("==")[0])
    ptx = tool.compile_kernel(tool.load_nvrtc(), source)
    assert source.with_suffix(".ptx").read_bytes() == ptx, "run: python tools/compile_kernels.py"
    assert b"\n.version 8.0\n.target sm_70\n" in ptx
    if source.stem == "fingerprint":
        assert b"\n.visible .global .align 16 .b8 tms_fingerprint_key[" in ptx, "cuModuleGetGlobal may not find the key"


@pytest.mark.parametrize("source", KERNELS, ids=lambda path: path.stem)
@pytest.mark.parametrize("package", ASSEMBLERS)
def test_the_assemblers_accept_it_without_local_memory(source: Path, package: str, tmp_path: Path) -> None:
    name, architectures = ASSEMBLERS[package]
    assembler = _installed(package).locate_file(name)
    for number in architectures:
        command = [
            str(assembler),
            f"-arch=sm_{number}",
            "-v",
            str(source.with_suffix(".ptx")),
            "-o",
            str(tmp_path / "cubin"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert re.findall(r"(\d+) bytes (stack frame|spill stores|spill loads)", done.stdout + done.stderr) == [
            ("0", "stack frame"),
            ("0", "spill stores"),
            ("0", "spill loads"),
        ], f"sm_{number}: {done.stderr}"
