"""The first CUDA call of the process is cudaMalloc, by the preloaded library; no torch. TMS_INIT_ENABLE=1 manages it.

    python first_call.py local|global

The runtime is opened with RTLD_LOCAL, as Python packages do, or with RTLD_GLOBAL.
"""

from __future__ import annotations

import ctypes
import glob
import os
import sys
import sysconfig

SIZE = 64 << 20
SLACK = 4 << 20  # what the driver may allocate or release for itself meanwhile
OUT_OF_MEMORY = 2
DEVICE_TO_HOST = 2


def runtime_path() -> str:
    if os.path.basename(os.environ.get("TMS_CUDA_DRIVER", "")) == "_simulated_cuda.so":
        return os.environ["TMS_CUDA_DRIVER"]  # the simulated GPU's own
    patterns = [
        os.path.join(sysconfig.get_paths()["purelib"], "nvidia", "*", "lib", "libcudart.so.*"),
        *(os.path.join(folder, "nvidia", "*", "lib", "libcudart.so.*") for folder in sys.path if folder),
        "/usr/local/cuda*/lib64/libcudart.so.*",
        "/usr/local/cuda*/targets/*/lib/libcudart.so.*",
    ]
    for pattern in patterns:
        found = sorted(glob.glob(pattern))
        if found:
            return found[0]
    raise SystemExit("no libcudart found")


def check(what: bool, message: str) -> None:
    if not what:
        raise SystemExit(f"failed: {message}")


mode = ctypes.RTLD_GLOBAL if sys.argv[1] == "global" else ctypes.RTLD_LOCAL
runtime = ctypes.CDLL(runtime_path(), mode=mode)
preloaded = ctypes.CDLL(None)
preloaded.tms_pause.argtypes = preloaded.tms_resume.argtypes = [ctypes.c_char_p]


def free_bytes() -> int:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    check(runtime.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total)) == 0, "cudaMemGetInfo")
    return free.value


address = ctypes.c_void_p()
check(preloaded.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(SIZE)) == 0, "the first cudaMalloc")
check(bool(address.value) and int(address.value or 0) % (2 << 20) == 0, "an address of ours")
check(runtime.cudaMemset(address, 0x5C, ctypes.c_size_t(SIZE)) == 0, "cudaMemset")
check(runtime.cudaDeviceSynchronize() == 0, "cudaDeviceSynchronize")
before = free_bytes()
check(preloaded.tms_pause(None) == 0, "tms_pause")
check(abs(free_bytes() - before - SIZE) <= SLACK, f"pause gave back {free_bytes() - before} bytes")
check(preloaded.tms_resume(None) == 0, "tms_resume")
check(abs(free_bytes() - before) <= SLACK, "resume took the memory")
host = (ctypes.c_ubyte * 4096)()
check(runtime.cudaMemcpy(host, address, ctypes.c_size_t(4096), DEVICE_TO_HOST) == 0, "cudaMemcpy")
check(bytes(host) == b"\x5c" * 4096, "contents came back")
check(preloaded.cudaFree(address) == 0, "cudaFree")
check(abs(free_bytes() - before - SIZE) <= SLACK, "cudaFree gave the memory back")
huge = ctypes.c_void_p()
check(preloaded.cudaMalloc(ctypes.byref(huge), ctypes.c_size_t(1 << 45)) == OUT_OF_MEMORY, "an absurd size")
check(preloaded.cudaMalloc(ctypes.byref(huge), ctypes.c_size_t(0)) == 0, "size 0")
check(preloaded.cudaFree(None) == 0, "cudaFree(NULL)")
print("ok")
