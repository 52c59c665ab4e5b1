"""Guards identity_of(): what changes an identity, and what does not."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torch_memory_saver import __version__
from torch_memory_saver.errors import InvalidArgumentError, TorchUnavailableError
from torch_memory_saver.node_store import identity_of


@pytest.fixture(autouse=True)
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A PyTorch that sees two GPUs."""
    cuda = SimpleNamespace(device_count=lambda: 2, get_device_capability=lambda index: (9, 0))
    fake = SimpleNamespace(__version__="2.11.0", cuda=cuda)
    monkeypatch.setitem(sys.modules, "torch", fake)
    return fake


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "Qwen2-7B"
    folder.mkdir()
    found = [folder / "one.safetensors", folder / "two.safetensors"]
    for path in found:
        path.write_bytes(b"weights")
    return found


def test_equal_facts_have_one_identity(files: list[Path], tmp_path: Path) -> None:
    first = identity_of(files, rank=0, quantisation=None)
    assert identity_of(reversed(files), quantisation=None, rank=0) == first
    assert identity_of([str(path) for path in [*files, files[0]]], rank=0, quantisation=None) == first
    (tmp_path / "link").symlink_to(files[0].parent)
    assert identity_of([tmp_path / "link" / path.name for path in files], rank=0, quantisation=None) == first
    files[0].read_bytes()
    assert identity_of(files, rank=0, quantisation=None) == first


def test_an_identity_has_a_word_for_each_fact(files: list[Path]) -> None:
    sizes = {"sizes": [1, None, True], "text": "a b", "long": "x" * 65, "dtype": "bfloat16", "rank": 0}
    found = re.sub("@[0-9a-f]{16}( |$)", r"@HASH\1", identity_of(files, **sizes))
    assert found == (
        f"files=Qwen2-7B@HASH torch=2.11.0 torch_memory_saver={__version__} gpus=9.0 dtype=bfloat16 long=@HASH rank=0 "
        "sizes=[1,null,true] text=@HASH"
    )


def test_everything_that_changes_weights_changes_it(files: list[Path], torch: Any) -> None:
    seen = {identity_of(files), identity_of(files, rank=0), identity_of(files, rank=1), identity_of(files[:1])}
    other = files[0].with_name("other")
    other.write_bytes(b"Weights")
    found = os.stat(files[0])
    os.utime(other, ns=(found.st_atime_ns, found.st_mtime_ns))
    os.replace(other, files[0])  # the same size and time, another inode
    seen.add(identity_of(files))
    os.utime(files[0], ns=(1, 1))
    seen.add(identity_of(files))
    files[0].write_bytes(b"more weights")
    os.utime(files[0], ns=(1, 1))
    seen.add(identity_of(files))
    torch.__version__ = "2.12.0"
    seen.add(identity_of(files))
    torch.cuda.get_device_capability = lambda index: (10, 0)
    seen.add(identity_of(files))
    assert len(seen) == 9


@pytest.mark.parametrize(("files_of", "facts"), [([], {}), (["here"], {"a": object()}), (["here"], {"a": float("nan")})])
def test_arguments_that_cannot_be(files_of: list[str], facts: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "here").write_bytes(b"")
    with pytest.raises(InvalidArgumentError, match="identity_of"):
        identity_of([tmp_path / name for name in files_of], **facts)


def test_the_fact_that_cannot_be_is_named() -> None:
    with pytest.raises(InvalidArgumentError, match=r"the fact dtype is no JSON value: .* such as str\(dtype\)$"):
        identity_of([__file__], rank=0, dtype=object())


def test_a_folder_is_refused(files: list[Path]) -> None:
    """Its state does not change when a file in it is replaced."""
    with pytest.raises(InvalidArgumentError, match="pass its weight files"):
        identity_of([files[0].parent])


@pytest.mark.parametrize("kind", [str, Path, os.fsencode])
def test_one_path_is_not_a_list(kind: Callable[[str], Any]) -> None:
    with pytest.raises(InvalidArgumentError, match="a list of weight files"):
        identity_of(kind(__file__))


def test_without_pytorch_the_error_says_so(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(TorchUnavailableError, match="needs PyTorch"):
        identity_of(files)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"identity_of\(\): No such file or directory: '.*/missing'"):
        identity_of([tmp_path / "missing"])


def test_a_pattern_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"patterns are not expanded: pass paths, such as those of glob.glob\(\)"):
        identity_of([tmp_path / "*.safetensors"])
