"""Guards the reader of shared libraries, on our own and on small ones that are compiled here."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_build import compile_library, needs_compiler

import torch_memory_saver
from torch_memory_saver import simulate
from torch_memory_saver._engine import preload
from torch_memory_saver._simulate.elf import Symbol, read_library
from torch_memory_saver.errors import InvalidArgumentError

PACKAGE = Path(torch_memory_saver.__file__).parent


def by_name(symbols: tuple[Symbol, ...]) -> dict[str, Symbol]:
    return {symbol.name: symbol for symbol in symbols}


def test_the_simulated_gpu() -> None:
    library = read_library(simulate.simulator_path())
    symbols = by_name(library.symbols)
    assert symbols["cuMemCreate"].defined
    assert symbols["tms_sim_reset"].defined
    assert "libc.so.6" in library.needed
    assert not symbols["mmap"].defined
    assert symbols["mmap"].library == "libc.so.6"
    assert symbols["mmap"].version.startswith("GLIBC_")
    assert not symbols["mmap"].weak


def test_the_preload_library() -> None:
    library = read_library(preload.library_path())
    assert by_name(library.symbols)["cudaMalloc"].defined
    assert not any(soname.startswith("libcuda") for soname in library.needed)


def test_only_symbols_with_a_prefix_are_read() -> None:
    whole = read_library(simulate.simulator_path())
    part = read_library(simulate.simulator_path(), ("cuMem", "cudaMem"))
    assert {symbol for symbol in whole.symbols if symbol.name.startswith(("cuMem", "cudaMem"))} == set(part.symbols)
    assert part.symbols
    assert read_library(simulate.simulator_path(), ()).symbols == ()


@needs_compiler
def test_versions_weak_symbols_and_names(tmp_path: Path) -> None:
    compile_library(tmp_path / "libprovider.so.7", "int provided(void) { return 1; } int plain;", node="PROVIDER_7.0")
    source = (
        "int provided(void); __attribute__((weak)) int maybe(void); int use(void) { return maybe ? maybe() : provided(); }"
    )
    flags = [f"-L{tmp_path}", "-l:libprovider.so.7", "-Wl,--disable-new-dtags,-rpath,$ORIGIN/../a:/b:${ORIGIN}"]
    path = compile_library(tmp_path / "libuser.so", source, flags=flags)

    provider = read_library(tmp_path / "libprovider.so.7")
    assert provider.soname == "libprovider.so.7"
    assert provider.rpath == ()
    assert by_name(provider.symbols)["provided"] == Symbol("provided", True, False, "PROVIDER_7.0", "")
    assert by_name(provider.symbols)["plain"].version == "PROVIDER_7.0"

    user = read_library(path)
    assert user.path == path
    assert user.soname == "libuser.so"
    assert user.needed[0] == "libprovider.so.7"
    origin = path.resolve().parent
    assert user.rpath == (Path(f"{origin}/../a"), Path("/b"), origin)
    symbols = by_name(user.symbols)
    assert symbols["provided"] == Symbol("provided", False, False, "PROVIDER_7.0", "libprovider.so.7")
    assert symbols["maybe"] == Symbol("maybe", False, True, "", "")
    assert symbols["use"] == Symbol("use", True, False, "", "")


@needs_compiler
def test_a_runpath_is_no_rpath(tmp_path: Path) -> None:
    path = compile_library(tmp_path / "libx.so", "int x;", flags=["-Wl,--enable-new-dtags,-rpath,/somewhere"])
    assert read_library(path).rpath == ()


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"#!/bin/sh\n" * 100, b"\x7fELF\x01\x01" + b"\0" * 200])
def test_a_file_that_is_no_library_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "libx.so"
    path.write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=r"libx\.so cannot be read as a shared library"):
        read_library(path)


def test_a_library_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    whole = simulate.simulator_path().read_bytes()
    path = tmp_path / "libx.so"
    for part in range(1, 16):
        path.write_bytes(whole[: len(whole) * part // 16])
        with pytest.raises(InvalidArgumentError, match="cannot be read"):
            read_library(path)


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_library(tmp_path / "none.so")
