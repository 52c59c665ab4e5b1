"""The functions of cuDNN's stub that return its version, which is the one that PyTorch was built for.

PyTorch compares it with the version that it was compiled with, and programs print it. Ordinary programs ask no other library
for its version.
"""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["answers"]

_REQUIRED = re.compile(r"^Requires-Dist: nvidia-cudnn-cu\d+\s*\(?==\s*(\d+)\.(\d+)\.(\d+)", re.MULTILINE)
_CUDA = re.compile(r"(\d+)\.(\d+)")

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


def answers(package: Path, cuda: str) -> dict[str, str]:
    """The C source of each function of cuDNN that returns a version, by its name; empty if the version is unknown.

    Args:
        package: The folder of the installed PyTorch.
        cuda: The CUDA version that PyTorch was built with, such as "13.0".
    """
    version, runtime = _required(package), _CUDA.match(cuda)
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


def _required(package: Path) -> tuple[int, int, int] | None:
    """The version of cuDNN that the installed PyTorch requires; None if its metadata does not name one."""
    for metadata in sorted(package.parent.glob("torch-*.dist-info/METADATA")):
        found = _REQUIRED.search(metadata.read_text(errors="replace"))
        if found is not None:
            return int(found[1]), int(found[2]), int(found[3])
    return None
