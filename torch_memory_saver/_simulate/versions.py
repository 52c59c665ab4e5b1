"""What the stub of cuDNN answers to questions about its version: the one that PyTorch was built for.

PyTorch compares it with what it was compiled with, and programs print it. No other library is asked by ordinary programs.
"""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["answers"]

_REQUIRED = re.compile(r"^Requires-Dist: nvidia-cudnn-cu\d+\s*\(?==\s*(\d+)\.(\d+)\.(\d+)", re.MULTILINE)
_CUDA = re.compile(r"(\d+)\.(\d+)")

#: What it is asked for is 0, 1 or 2: the major, minor or patch version.
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
    """Functions of cuDNN that have an answer -> their C text.

    Args:
        package: The folder of the installed torch.
        cuda: The CUDA version it was built with.
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
    """The version that the installed torch requires; None if its metadata does not say."""
    for metadata in sorted(package.parent.glob("torch-*.dist-info/METADATA")):
        found = _REQUIRED.search(metadata.read_text(errors="replace"))
        if found is not None:
            return int(found[1]), int(found[2]), int(found[3])
    return None
