"""Guards the fingerprint kernel: its source, compiled for the CPU, computes what the simulated GPU's function computes. On a
GPU tests/gpu/test_changed_contents.py compares the compiled kernel with the same function."""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from torch_memory_saver import simulate

REPOSITORY = Path(__file__).resolve().parents[3]
if not (REPOSITORY / "csrc").is_dir():
    pytest.skip("needs the sources: there is no csrc/", allow_module_level=True)

CHUNK = 512 << 10
#: Bytes of tms_fingerprint_key_t.
KEY_BYTES = (CHUNK // 16 + 3) * 16 + 4 * 9 * 8


class Chunk(ctypes.Structure):
    _fields_ = (("address", ctypes.c_uint64), ("bytes", ctypes.c_uint64))


Words = ctypes.c_uint32 * 4


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    library = tmp_path_factory.mktemp("kernel") / "kernel.so"
    source = Path(__file__).with_name("kernel_on_cpu.cpp")
    options = ["-O1", "-std=c++17", "-fPIC", "-shared", "-pthread", "-Wno-unknown-pragmas"]
    folders = ["-I", str(REPOSITORY / "csrc"), "-I", str(REPOSITORY / "csrc" / "include")]
    subprocess.run([compiler, *options, *folders, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def test_the_kernel_and_the_function_of_the_simulated_gpu_agree(kernel: ctypes.CDLL) -> None:
    simulator = ctypes.CDLL(str(simulate.simulator_path()))
    source = random.Random(1)
    key = ctypes.create_string_buffer(source.randbytes(KEY_BYTES), KEY_BYTES)
    sizes = [CHUNK] * 4 + [CHUNK - 16, CHUNK, CHUNK - 4096, CHUNK - 4112]  # groups of which most is read without conditions
    sizes += [CHUNK, 16, CHUNK - 16, 4096, 0, 48, CHUNK, 512, CHUNK // 2, 12_352]  # the last group is not full
    memory = ctypes.create_string_buffer(source.randbytes(sum(sizes) + 16), sum(sizes) + 16)
    address = -(-ctypes.addressof(memory) // 16) * 16
    chunks, results = (Chunk * len(sizes))(), (Words * len(sizes))()
    for chunk, size in zip(chunks, sizes, strict=True):
        chunk.address, chunk.bytes = address, size
        address += size
    kernel.launch(key, chunks, ctypes.c_uint32(len(sizes)), results)
    for chunk, result in zip(chunks, results, strict=True):
        expected = Words()
        simulator.tms_sim_fingerprint(key, ctypes.c_void_p(chunk.address), ctypes.c_uint64(chunk.bytes), expected)
        assert list(result) == list(expected), f"a chunk of {chunk.bytes} bytes"
    assert len({bytes(result) for result in results}) == len(sizes)
