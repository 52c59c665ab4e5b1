"""The bytes by which PyTorch describes shared memory to the process that imports it.

A managed allocation is described as PyTorch describes a segment of its own allocator's expandable segments, which an
importer maps itself. The description begins with a version, and an importer rejects versions that it does not know. What
PyTorch 2.6, 2.8, 2.11 and 2.15 write was compared; version 3 came with 2.13 (NVIDIA-NeMo/RL pull request 4080):

===============  ====================================================================================
version          after the letter ``e``
===============  ====================================================================================
1 (2.6)          process id (32 bits), padding, bytes of a handle, number of handles (64 bits each),
                 then one file descriptor (32 bits) of the exporting process for each handle
2 (2.8, 2.11)    the same
3 (2.15)         with the type of the handles (32 bits, 1: a file descriptor) and padding before them
===============  ====================================================================================

Each importer reads lower versions of its own layout, so 1 stands for 1 and 2. An importer finds what it has mapped by the
bytes of the description. So a nonce follows the descriptor, which importers do not read: the same bytes for the same
physical memory, and other bytes for any other.
"""

from __future__ import annotations

import os
import re
import struct

from torch_memory_saver import _core
from torch_memory_saver.errors import InvalidArgumentError, InvalidStateError

__all__ = ["check_importer", "describe", "format_of_importer", "format_of_own_description"]

_KIND = b"e"
_HANDLES = 1
_FILE_DESCRIPTOR = 1
#: The layouts after the letter, by the version that a description names: struct formats without the descriptor.
_LAYOUTS = {1: "<i4xQQ", 3: "<i4xQQi4x"}
#: The format that an importer of PyTorch from that release on reads.
_SINCE = (((2, 13), 3), ((2, 6), 1))
_RELEASE = re.compile(r"(\d+)\.(\d+)(?:[.+a-z].*)?")
#: Of this process. Process ids are used again, so they do not tell the descriptions of two processes apart for ever.
_nonce = os.urandom(8)


def format_of_own_description(description: bytes) -> int:
    """The format in which the PyTorch that wrote `description` describes segments.

    Raises:
        InvalidStateError: Its version is not known.
    """
    version = description[0]
    if version in (1, 2):
        return 1
    if version in _LAYOUTS:
        return version
    raise InvalidStateError(
        f"share: this PyTorch describes shared memory by version {version} of its format, and this release of "
        f"torch_memory_saver knows versions 1 to {max(_LAYOUTS)}. Update torch_memory_saver, or send tensor.cpu()",
        operation="share",
    )


def check_importer(release: object) -> str | None:
    """None, or the release of an importer's PyTorch such as "2.11".

    Raises:
        InvalidArgumentError: Not such a release, or one that cannot import managed memory.
    """
    if release is not None:
        format_of_importer(release)
    return None if release is None else str(release)


def format_of_importer(release: object) -> int:
    """The format that an importer with that release of PyTorch reads.

    Raises:
        InvalidArgumentError: Not a release, or one before 2.6, the oldest that was tested.
    """
    match = _RELEASE.fullmatch(release) if isinstance(release, str) else None
    if match is None:
        raise InvalidArgumentError(f'share_for must be None or a release of PyTorch such as "2.11", not {release!r}')
    number = int(match[1]), int(match[2])
    for since, layout in _SINCE:
        if number >= since:
            return layout
    raise InvalidArgumentError(f"share_for: managed memory can be sent to PyTorch 2.6 and later, not to {release}")


def describe(layout: int, exported: _core.Export) -> bytes:
    """The description of exported memory, in one of the formats."""
    fields: tuple[int, ...] = (os.getpid(), exported.bytes, _HANDLES)
    if layout >= 3:
        fields += (_FILE_DESCRIPTOR,)
    header = struct.pack(_LAYOUTS[layout], *fields)
    descriptor = struct.pack("<i", exported.descriptor)
    return bytes([layout]) + _KIND + header + descriptor + _nonce + struct.pack("<Q", exported.generation)
