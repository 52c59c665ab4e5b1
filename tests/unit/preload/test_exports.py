"""Guards the contents of the library file: exported names, libraries that it is linked with, and the text that users'
programs search for."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

EXPORT_MAP = Path(__file__).resolve().parents[3] / "csrc" / "preload" / "exports.map"

#: The C functions of COMPATIBILITY: programs look them up by name, through ctypes.
FOR_EXISTING_PROGRAMS = {
    "tms_set_interesting_region",
    "tms_get_interesting_region",
    "tms_set_current_tag",
    "tms_get_current_tag",
    "tms_set_enable_cpu_backup",
    "tms_get_enable_cpu_backup",
    "tms_set_cpu_backup_backend",
    "tms_get_cpu_backup_backend",
    "tms_set_enable_disk_backup",
    "tms_get_enable_disk_backup",
    "tms_set_disk_backup_dir",
    "tms_set_retain_cpu_backup",
    "tms_get_retain_cpu_backup",
    "set_memory_margin_bytes",
    "tms_pause",
    "tms_resume",
    "tms_get_cpu_backup_pointer",
    "tms_torch_malloc",
    "tms_torch_free",
    "tms_torch_ordinary_malloc",
    "tms_torch_default_free",
}

POINTER_BYTES = 8

ENVIRONMENT = [
    "TMS_INIT_ENABLE",
    "TMS_INIT_ENABLE_CPU_BACKUP",
    "TMS_INIT_ENABLE_DISK_BACKUP",
    "TMS_INIT_CPU_BACKUP_BACKEND",
    "TMS_RETAIN_CPU_BACKUP",
    "TMS_DISK_BACKUP_DIR",
    "TMS_DISK_BACKUP_CHUNK_MB",
]


def output_of(tool: str, *arguments: str | Path) -> str:
    path = shutil.which(tool)
    if path is None:
        pytest.skip(f"needs {tool}")
    return subprocess.run([path, *map(str, arguments)], capture_output=True, text=True, check=True).stdout


def test_exports_are_exactly_the_list(libraries: Any) -> None:
    text = re.sub(r"/\*.*?\*/", "", EXPORT_MAP.read_text(), flags=re.DOTALL)
    listed = set(re.findall(r"(\w+);", text.partition("local")[0]))
    exported = {line.split()[-1] for line in output_of("nm", "-D", "--defined-only", libraries.preload).splitlines()}
    assert exported == listed
    assert exported >= FOR_EXISTING_PROGRAMS
    assert exported >= {"cudaMalloc", "cudaFree", "cudaDeviceEnablePeerAccess", "tms_get_api"}
    hooks = r"cuda(Malloc|Free|DeviceEnablePeerAccess|IpcGetMemHandle|Stream(Begin|End)Capture|StreamDestroy|DeviceReset)"
    hooks += r"|cudaGetDriverEntryPoint(ByVersion)?$"
    hooks += r"|cuMem(Alloc|Free|Create$|Release$|RetainAllocationHandle$|Map$|Unmap$)"
    assert all(re.match(hooks, name) for name in exported if name.startswith("cu"))


def test_linked_with_the_c_library_only(libraries: Any) -> None:
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", output_of("readelf", "-d", libraries.preload))
    assert needed
    assert [name for name in needed if not re.match(r"(libc|libdl|libpthread|librt|ld-linux[\w-]*)\.so\.\d+$", name)] == []


def test_no_code_runs_when_it_is_loaded(libraries: Any) -> None:
    """Nothing but the one initialiser, and the one finaliser, that the compiler puts into every library."""
    sections = output_of("readelf", "-W", "-S", libraries.preload)
    sizes = re.findall(r" \.(?:init_array|fini_array|ctors|dtors)\s+\S+\s+\S+\s+\S+\s+(\S+)", sections)
    assert all(int(size, 16) <= POINTER_BYTES for size in sizes)


def test_file_holds_the_names_that_users_look_for(libraries: Any) -> None:
    content = libraries.preload.read_bytes()
    for name in ENVIRONMENT:
        assert name.encode() + b"\0" in content, name


def test_file_is_where_users_look_for_it(libraries: Any) -> None:
    assert libraries.preload.name == "torch_memory_saver_hook_mode_preload.abi3.so"
    assert libraries.preload.parent == libraries.simulator.parent.parent
