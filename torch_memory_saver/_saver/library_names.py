"""The names by which people know libraries that allocate device memory."""

from __future__ import annotations

import os

__all__ = ["known_name"]

#: By the beginning of the file's name, up to its first dot or hyphen.
_NAMES = {
    "libnccl": "NCCL",
    "libcublas": "cuBLAS",
    "libcublasLt": "cuBLAS",
    "libcudnn": "cuDNN",
    "libcufft": "cuFFT",
    "libcusolver": "cuSOLVER",
    "libcusparse": "cuSPARSE",
    "libcusparseLt": "cuSPARSELt",
    "libcudart": "CUDA runtime",
    "libnvshmem_host": "NVSHMEM",
}
#: A library of many files: libcudnn_ops, libcudnn_graph and so on.
_PREFIX, _WHOLE = "libcudnn_", "libcudnn"


def known_name(path: str) -> str:
    """The name of the library in that file, or "" where it has none but the file's. Several files may have one name."""
    stem = os.path.basename(path).partition(".")[0].partition("-")[0]
    return _NAMES.get(_WHOLE if stem.startswith(_PREFIX) else stem, "")
