"""identity_of(): describe in a text from what weights were made."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable
from typing import Any

from torch_memory_saver._interface import __version__
from torch_memory_saver._services import import_torch
from torch_memory_saver.errors import InvalidArgumentError

__all__ = ["identity_of"]

_DIGITS = 16
#: A value that is shown. Others are hashed, so that an identity is one line of words.
_SHOWN = re.compile(r"[!-&(-~]{1,64}")


def identity_of(files: Iterable[str | os.PathLike[str]], **facts: Any) -> str:
    """Return an identity for :func:`publish` and :func:`adopt`, computed from weight files and from facts.

    The real path, the size, the time of the last change and the inode of each file count, but not its contents. So a
    checkpoint that is replaced under the same path has another identity. The versions of PyTorch and of this package, and
    the architectures of the GPUs that this process sees, count as well.

    Pass everything else on which the tensors of this process depend: the rank in each parallel group and the size of the
    group, the dtype, the quantisation and the options of its kernels.

    Args:
        files: Paths of the weight files, in any order.
        **facts: Further facts, as JSON values.

    Returns:
        One line of words such as ``files=qwen@5c79a1f2 torch=2.11.0 gpus=9.0 rank=0``: the name of the folder of the first
        file with a hash of the files, the versions, the GPUs, and a word for each fact. Long values are hashed. A miss
        names the words that differ.

    Raises:
        InvalidArgumentError: `files` is one path, is empty or names something else than a file, such as the folder of a
            checkpoint, or a fact is no JSON value.
        OSError: A file does not exist or cannot be reached.
        TorchUnavailableError: PyTorch cannot be imported.
    """
    if isinstance(files, (str, bytes, os.PathLike)):
        raise _invalid(f"pass a list of weight files, not one path ({os.fspath(files)!r})")
    paths = sorted({os.path.realpath(path) for path in files})
    if not paths:
        raise _invalid("needs at least one weight file")
    torch = import_torch()
    states = _hash_of(json.dumps([[path, *_state_of(path)] for path in paths]))
    capabilities = sorted({torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())})
    known = {
        "files": f"{os.path.basename(os.path.dirname(paths[0]))}@{states}",
        "torch": str(torch.__version__),
        "torch_memory_saver": __version__,
        "gpus": ",".join(f"{major}.{minor}" for major, minor in capabilities),
    }
    words = [*known.items(), *sorted(facts.items())]
    return " ".join(f"{_shown(name)}={_shown(_fact(name, value))}" for name, value in words)


def _hash_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def _shown(text: str) -> str:
    return text if _SHOWN.fullmatch(text) else f"@{_hash_of(text)}"


def _state_of(path: str) -> tuple[int, int, int]:
    try:
        found = os.stat(path)
    except OSError as error:
        error.strerror = f"identity_of(): {error.strerror}"
        if any(character in path for character in "*?["):
            error.strerror += " (patterns are not expanded: pass paths, such as those of glob.glob())"
        raise
    if not stat.S_ISREG(found.st_mode):  # that of a folder does not change with its files
        raise _invalid(f"'{path}' is no file: of a folder pass its weight files")
    return found.st_size, found.st_mtime_ns, found.st_ino


def _fact(name: str, value: Any) -> str:
    try:
        text = json.dumps(value, sort_keys=True, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise _invalid(f"the fact {name} is no JSON value: {error}. Pass a text, such as str({name})") from error
    return text[1:-1] if isinstance(value, str) else text


def _invalid(what: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"identity_of(): {what}", operation="identity_of")
