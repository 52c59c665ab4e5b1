"""Read from the file of a shared library what it needs and defines, without binutils and without loading it.

Only 64-bit little-endian libraries of Linux are supported. A library may have a gigabyte: the file is mapped into memory,
and only the dynamic linker's tables are read.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch_memory_saver.errors import InvalidArgumentError

__all__ = ["SharedLibrary", "Symbol", "read_library"]

_MAGIC = b"\x7fELF"
_CLASS_64 = 2
_LITTLE_ENDIAN = 1

_FILE_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_DYNAMIC = struct.Struct("<qQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_VERSION_NEED = struct.Struct("<HHIII")
_VERSION_NEED_ENTRY = struct.Struct("<IHHII")
_VERSION_DEFINITION = struct.Struct("<HHHHIII")
_VERSION_DEFINITION_ENTRY = struct.Struct("<II")
_VERSION_INDEX = struct.Struct("<H")

# Section types.
_SHT_DYNAMIC = 6
_SHT_DYNSYM = 11
_SHT_GNU_VERDEF = 0x6FFFFFFD
_SHT_GNU_VERNEED = 0x6FFFFFFE
_SHT_GNU_VERSYM = 0x6FFFFFFF

# Tags of the dynamic section.
_DT_NULL, _DT_NEEDED, _DT_SONAME, _DT_RPATH, _DT_RUNPATH = 0, 1, 14, 15, 29

_UNDEFINED_SECTION = 0
_BIND_LOCAL, _BIND_WEAK = 0, 2
#: The bit of a version index that is masked out marks a version that is not the default one.
_VERSION_INDEX_MASK = 0x7FFF


@dataclass(frozen=True)
class Symbol:
    """One symbol that the dynamic symbol table of a library contains.

    Attributes:
        name: The name as the linker sees it, which is mangled for C++.
        defined: Whether the library defines the symbol. Otherwise the library needs it.
        weak: Whether the symbol is weak. A needed symbol that is weak may be missing.
        version: The version node that it is defined in or needed from; "" if there is none.
        library: For a needed symbol with a version, the soname that it is needed from; otherwise "".
    """

    name: str
    defined: bool
    weak: bool
    version: str
    library: str


@dataclass(frozen=True)
class SharedLibrary:
    """The declarations of one file for the dynamic linker.

    Attributes:
        soname: DT_SONAME of the file; "" if it has none.
        needed: Sonames of the libraries that the file is linked with, in order.
        rpath: Folders in which the needed libraries are searched before LD_LIBRARY_PATH, with $ORIGIN replaced. They are
            the folders of DT_RPATH, which is ignored if there is a DT_RUNPATH.
        symbols: Symbols of the dynamic symbol table that are not local and whose names passed the filter.
    """

    path: Path
    soname: str
    needed: tuple[str, ...]
    rpath: tuple[Path, ...]
    symbols: tuple[Symbol, ...]


@dataclass(frozen=True)
class _Section:
    kind: int
    offset: int
    size: int
    link: int
    count: int


class _Reader:
    """The tables of one file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        identity = data[: len(_MAGIC) + 2]
        if identity != _MAGIC + bytes([_CLASS_64, _LITTLE_ENDIAN]):
            raise ValueError("it is not a 64-bit little-endian ELF file")
        header = _FILE_HEADER.unpack_from(data, 0)
        table, entry_size, entries = header[6], header[11], header[12]
        self.sections = [self._section(table + index * entry_size) for index in range(entries)]

    def _section(self, offset: int) -> _Section:
        fields = _SECTION.unpack_from(self.data, offset)
        return _Section(kind=fields[1], offset=fields[4], size=fields[5], link=fields[6], count=fields[7])

    def find(self, kind: int) -> _Section | None:
        return next((section for section in self.sections if section.kind == kind), None)

    def text(self, strings: _Section, offset: int) -> bytes:
        start = strings.offset + offset
        return self.data[start : self.data.find(b"\0", start)]

    def dynamic(self) -> Iterator[tuple[int, str]]:
        """Return the tags whose value is a string, each with that string."""
        section = self.find(_SHT_DYNAMIC)
        if section is None:
            raise ValueError("it has no dynamic section")
        strings = self.sections[section.link]
        for offset in range(section.offset, section.offset + section.size, _DYNAMIC.size):
            tag, value = _DYNAMIC.unpack_from(self.data, offset)
            if tag == _DT_NULL:
                return
            if tag in (_DT_NEEDED, _DT_SONAME, _DT_RPATH, _DT_RUNPATH):
                yield tag, self.text(strings, value).decode()

    def versions(self) -> dict[int, tuple[str, str]]:
        """Return, by version index, the version's name and the soname that it is needed from ("" for the library's own)."""
        return dict([*self._needed_versions(), *self._defined_versions()])

    def _needed_versions(self) -> Iterator[tuple[int, tuple[str, str]]]:
        section = self.find(_SHT_GNU_VERNEED)
        if section is None:
            return
        strings = self.sections[section.link]
        offset = section.offset
        for _ in range(section.count):
            _, entries, file, first, following = _VERSION_NEED.unpack_from(self.data, offset)
            library = self.text(strings, file).decode()
            entry = offset + first
            for _ in range(entries):
                _, _, index, name, step = _VERSION_NEED_ENTRY.unpack_from(self.data, entry)
                yield index & _VERSION_INDEX_MASK, (self.text(strings, name).decode(), library)
                entry += step
            if not following:
                return
            offset += following

    def _defined_versions(self) -> Iterator[tuple[int, tuple[str, str]]]:
        section = self.find(_SHT_GNU_VERDEF)
        if section is None:
            return
        strings = self.sections[section.link]
        offset = section.offset
        for position in range(section.count):
            _, _, index, _, _, first, following = _VERSION_DEFINITION.unpack_from(self.data, offset)
            name, _ = _VERSION_DEFINITION_ENTRY.unpack_from(self.data, offset + first)
            # The first entry names the library itself and is not a version of its symbols.
            if position > 0:
                yield index & _VERSION_INDEX_MASK, (self.text(strings, name).decode(), "")
            if not following:
                return
            offset += following

    def symbols(self, prefixes: tuple[bytes, ...] | None) -> Iterator[Symbol]:
        table = self.find(_SHT_DYNSYM)
        if table is None:
            return
        strings = self.sections[table.link]
        indices = self.find(_SHT_GNU_VERSYM)
        versions = self.versions()
        raw = self.data[table.offset : table.offset + table.size]
        for position, (name, info, _, section, _, _) in enumerate(_SYMBOL.iter_unpack(raw)):
            bind = info >> 4
            start = strings.offset + name
            if bind == _BIND_LOCAL or not name:
                continue
            if prefixes is not None and not self.data[start : start + _MAX_PREFIX].startswith(prefixes):
                continue
            index = 0
            if indices is not None:
                (index,) = _VERSION_INDEX.unpack_from(self.data, indices.offset + position * _VERSION_INDEX.size)
            version, library = versions.get(index & _VERSION_INDEX_MASK, ("", ""))
            yield Symbol(
                self.text(strings, name).decode(),
                defined=section != _UNDEFINED_SECTION,
                weak=bind == _BIND_WEAK,
                version=version,
                library=library,
            )


#: Bytes of a name that are compared with the prefixes. No prefix may be longer.
_MAX_PREFIX = 64


def read_library(path: Path, prefixes: tuple[str, ...] | None = None) -> SharedLibrary:
    """Read a shared library's file.

    Args:
        path: The file.
        prefixes: If given, only symbols whose names begin with one of them are read, because a library of PyTorch has a
            hundred thousand. An empty tuple: no symbols are read.

    Raises:
        InvalidArgumentError: The file is not a shared library of this kind of machine, or is damaged.
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        try:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                reader = _Reader(path, data)
                tags = list(reader.dynamic())
                wanted = None if prefixes is None else tuple(prefix.encode() for prefix in prefixes)
                symbols = () if wanted == () else tuple(reader.symbols(wanted))
        except (ValueError, IndexError, UnicodeDecodeError, struct.error) as error:
            raise InvalidArgumentError(f"{path} cannot be read as a shared library: {error}") from error
    has_runpath = any(tag == _DT_RUNPATH for tag, _ in tags)
    return SharedLibrary(
        path=path,
        soname=next((value for tag, value in tags if tag == _DT_SONAME), ""),
        needed=tuple(value for tag, value in tags if tag == _DT_NEEDED),
        rpath=() if has_runpath else tuple(_folders(path, [value for tag, value in tags if tag == _DT_RPATH])),
        symbols=symbols,
    )


def _folders(path: Path, values: list[str]) -> Iterator[Path]:
    """Return the folders in the search paths `values` of the library at `path`."""
    origin = str(path.resolve().parent)
    for value in values:
        for entry in filter(None, value.split(":")):
            yield Path(entry.replace("${ORIGIN}", origin).replace("$ORIGIN", origin))
