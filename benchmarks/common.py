"""What the benchmarks share: the compiled yardstick, statistics, and the table or JSON that comes out."""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MIB = 1 << 20
GIB = 1 << 30
HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent
sys.path.append(str(REPOSITORY))
import setup  # noqa: E402  the build knows where cuda.h is


def arguments(description: str | None, repetitions: int) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--repetitions", type=int, default=repetitions, help="measurements of each figure (default %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    return parser


# -- the yardstick -----------------------------------------------------------------------------------------------------


@functools.cache
def yardstick() -> ctypes.CDLL:
    """bare_driver.c, compiled now with the C compiler of $CC (default gcc)."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "bare_driver.so"
        command = [os.environ.get("CC", "gcc"), "-std=c11", "-D_GNU_SOURCE", "-O2", "-fPIC", "-shared"]
        command += [
            f"-I{REPOSITORY / 'csrc'}",
            f"-I{setup.find_cuda_include()}",
            str(HERE / "bare_driver.c"),
            "-o",
            str(library),
            "-ldl",
        ]
        subprocess.run(command, check=True)
        loaded = ctypes.CDLL(str(library))
    loaded.bare_open.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_void_p]
    loaded.bare_make.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
    pair = [ctypes.c_size_t, ctypes.c_size_t, ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_uint64)]
    loaded.bare_allocate_and_free.argtypes = loaded.core_allocate_and_free.argtypes = pair
    return loaded


def succeeded(result: int, what: str) -> None:
    if result != 0:
        raise SystemExit(f"{what} failed with {result}")


def open_yardstick(device: int = 0) -> ctypes.CDLL:
    """The yardstick, with the device's primary context current and the core's function table at hand."""
    from torch_memory_saver import _core

    library = yardstick()
    driver = os.environ.get("TMS_CUDA_DRIVER", "libcuda.so.1")
    get_api = ctypes.cast(ctypes.CDLL(_core.library_path).tms_get_api, ctypes.c_void_p)
    succeeded(library.bare_open(driver.encode(), device, get_api), "loading the CUDA driver")
    return library


# -- results -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Samples:
    """Repeated measurements of one thing, in one unit."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> str:
        return f"{min(self.values):.4g} .. {max(self.values):.4g}"

    def as_json(self) -> dict[str, Any]:
        return {"median": self.median, "min": min(self.values), "max": max(self.values), "values": list(self.values)}


def samples(values: Sequence[float]) -> Samples:
    return Samples(tuple(values))


def ratio(ours: Samples, bare: Samples) -> float:
    """Of the medians."""
    return ours.median / bare.median


def paired_ratio(ours: Samples, bare: Samples) -> Samples:
    """Of each repetition: both sides of one met the same state of the driver."""
    return samples([mine / theirs for mine, theirs in zip(ours.values, bare.values, strict=True)])


@dataclass
class Table:
    """Rows for people, and the same as JSON for programs."""

    title: str
    columns: tuple[str, ...]
    notes: str = ""
    rows: list[tuple[str, ...]] = field(default_factory=list)
    data: list[dict[str, Any]] = field(default_factory=list)

    def add(self, cells: Sequence[str], **data: Any) -> None:
        self.rows.append(tuple(cells))
        self.data.append({key: value.as_json() if isinstance(value, Samples) else value for key, value in data.items()})

    def show(self, as_json: bool) -> None:
        if as_json:
            print(json.dumps({"title": self.title, "device": device_name(), "rows": self.data}))
            return
        widths = [max(len(row[index]) for row in [self.columns, *self.rows]) for index in range(len(self.columns))]
        print(f"{self.title} ({device_name()})\n")
        for row in [self.columns, tuple("-" * width for width in widths), *self.rows]:
            cells = [
                cell.ljust(width) if index == 0 else cell.rjust(width)
                for index, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            print("  " + "  ".join(cells).rstrip())
        if self.notes:
            print(f"\n{self.notes}")
        print(flush=True)


def device_name() -> str:
    if os.environ.get("TMS_CUDA_DRIVER"):
        return "simulated GPU: the figures mean nothing"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    done = subprocess.run(
        ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader", "--id=0"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown device"
