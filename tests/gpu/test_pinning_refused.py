"""Guards that contents are restored from host memory that the driver refuses to pin."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from gpu_programs import Program, run_programs

#: A driver that cannot pin. Functions that it does not define come from the library that it is linked with, the machine's
#: driver.
SHIM = r"""
#include <dlfcn.h>
#include <stddef.h>

typedef int batch_t(void *targets, void *sources, size_t *sizes, size_t count, void *attributes, size_t *first,
                    size_t attribute_count, void *stream);
static int refused, batches;

int cuMemHostRegister_v2(void *memory, size_t bytes, unsigned flags) {
    enum { OUT_OF_MEMORY = 2 };
    __atomic_add_fetch(&refused, 1, __ATOMIC_RELAXED);
    return OUT_OF_MEMORY;
}

int cuMemcpyBatchAsync_v2(void *targets, void *sources, size_t *sizes, size_t count, void *attributes, size_t *first,
                          size_t attribute_count, void *stream) {
    enum { NOT_SUPPORTED = 801 };
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    batch_t *batch = driver ? (batch_t *)dlsym(driver, "cuMemcpyBatchAsync_v2") : NULL;
    __atomic_add_fetch(&batches, 1, __ATOMIC_RELAXED);
    return batch ? batch(targets, sources, sizes, count, attributes, first, attribute_count, stream) : NOT_SUPPORTED;
}

int tms_shim_refused(void) { return refused; }
int tms_shim_batches(void) { return batches; }
"""


def build_shim(folder: Path) -> Path:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler, to make a driver that refuses to pin")
    # For linking, in place of the driver: at run time its name finds the machine's.
    library, shim = folder / "link" / "libcuda.so.1", folder / "shim.so"
    library.parent.mkdir()
    common = [*compiler.split(), "-shared", "-fPIC", "-w", "-x", "c", "-"]
    subprocess.run([*common, "-o", str(library), "-Wl,-soname,libcuda.so.1"], input="", text=True, check=True, timeout=60)
    linked = ["-Wl,--no-as-needed", f"-L{library.parent}", "-l:libcuda.so.1", "-ldl"]
    subprocess.run([*common, "-o", str(shim), *linked], input=SHIM, text=True, check=True, timeout=60)
    return shim


@pytest.mark.outer
@pytest.mark.parametrize("preload", [False, True], ids=["torch", "preload"])
def test_parts_of_segments_come_back_without_pinned_memory(preload: bool, tmp_path: Path) -> None:
    environment = (("TMS_CUDA_DRIVER", str(build_shim(tmp_path))),)
    (done,) = run_programs([Program("pinning_refused.py", environment=environment, preload=preload)])
    assert done.check().output == "same bytes\n"
    assert done.error.count("cuMemHostRegister failed with CUDA_ERROR_OUT_OF_MEMORY") == 1, done.error
