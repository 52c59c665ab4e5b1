"""Runs an engine with several memory backends, each in a process of its own, whose sleeps are measured in turns.

The caller gives the class of the engine (vllm_sleep.py, sglang_sleep.py). This module owns the processes, the order of the
cycles, the comparison of the tokens and the result. All engines that can sleep are alive at the same time, so each cycle
of one backend has a cycle of the others beside it. Between its cycles an engine is idle, and its memory is resident.

An engine that gives other tokens than it gave at its start, or than the other engines, makes :func:`compare` return 1. Times
are never judged.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import multiprocessing
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

__all__ = ["OURS", "Cycle", "Engine", "add_arguments", "compare", "timed"]

OURS = "torch_memory_saver"
GIB = 1 << 30
_HUGE_PAGES, _POPULATE = 14, 23  # MADV_HUGEPAGE, MADV_POPULATE_WRITE
_PIECE = GIB


@dataclass
class Cycle:
    """The result of one sleep of an engine and of its way back.

    Attributes:
        tokens: A digest of what the engine generated afterwards.
        figures: Milliseconds and GiB by name, which the table shows.
        details: More figures, for the JSON file only.
    """

    tokens: str
    figures: dict[str, float]
    details: dict[str, Any] = field(default_factory=dict)


class Engine(Protocol):
    """An engine in its own process.

    Attributes:
        about: Versions and sizes, for the JSON file.
    """

    about: dict[str, Any]

    def generate(self) -> str:
        """Return a digest of the tokens that the engine generates for fixed prompts."""

    def supports(self, case: str) -> bool:
        """Return whether the backend has what a case needs."""

    def cycle(self, case: str, index: int) -> Cycle:
        """Perform one cycle of a case. Afterwards the engine is as it was before."""

    def close(self) -> None:
        """End the processes of the engine."""


@dataclass(frozen=True)
class _Request:
    """One request to an engine's process: a method and its arguments."""

    method: str
    arguments: tuple[Any, ...] = ()


def timed(call: Callable[[], object]) -> float:
    """Return the milliseconds that a call takes."""
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e3


def add_arguments(parser: argparse.ArgumentParser, backends: Sequence[str], cases: Sequence[str]) -> None:
    """Add the arguments that :func:`compare` reads, with these defaults."""
    parser.add_argument("--backends", default=",".join(backends), help="in the order of their start (%(default)s)")
    parser.add_argument("--cases", default=",".join(cases), help="%(default)s")
    parser.add_argument("--cycles", type=int, default=10, help="of each case and backend (%(default)s)")
    parser.add_argument(
        "--warm-host", type=float, default=0.0, metavar="GIB", help="host memory to touch before the engines"
    )
    parser.add_argument("--json", type=Path, help="file to write every cycle to")


def compare(make: Callable[[str, argparse.Namespace], Engine], parsed: argparse.Namespace) -> int:
    """Run the engines, print the table, and return the exit status.

    Args:
        make: Called in the process of each engine with the name of the backend. It can be pickled.
        parsed: The parsed arguments.
    """
    _touch_host_memory(int(parsed.warm_host * GIB))
    workers = [_Worker(make, backend, parsed) for backend in parsed.backends.split(",")]
    rows = _cycles_in_turns(workers, parsed)
    for worker in workers:
        worker.close()
    mistakes = _mistakes(workers, rows)
    print(_table(rows))
    for mistake in mistakes:
        print(f"WRONG: {mistake}")
    print(f"{len(rows)} cycles, {len(mistakes)} mistakes", flush=True)
    if parsed.json:
        parsed.json.write_text(json.dumps(_as_json(workers, rows, mistakes, parsed), indent=1, default=str) + "\n", "utf-8")
    return 1 if mistakes else 0


# ---- the processes -----------------------------------------------------------------------------------------------------


class _Worker:
    """The process of one engine, seen from the parent.

    Attributes:
        tokens: Digest of the first generation.
        cases: The cases that its backend supports.
        failure: The first failure, with its traceback, or "". Nothing is asked after it.
    """

    def __init__(self, make: Callable[[str, argparse.Namespace], Engine], backend: str, parsed: argparse.Namespace) -> None:
        self.backend = backend
        self.failure = ""
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, backend, parsed))
        self._process.start()
        theirs.close()
        began = time.perf_counter()
        self.about = self.ask("about") or {}
        self.tokens = self.ask("generate")
        if not self.failure:
            print(f"{backend}: up after {time.perf_counter() - began:.1f} s, tokens {self.tokens}", flush=True)
        self.cases = [case for case in parsed.cases.split(",") if self.ask("supports", case)]
        if not self.cases:
            self.close()  # its memory is for the others

    def ask(self, method: str, *arguments: Any) -> Any:
        """Return the result of a method of the engine, or None after a failure."""
        if self.failure:
            return None
        try:
            self._connection.send(_Request(method, arguments))
            failure, result = self._connection.recv()
        except (EOFError, OSError) as error:
            failure, result = f"its process ended: {error!r}", None
        if failure:
            self.failure = f"{method}{arguments} failed: {failure}"
        return result

    def close(self) -> None:
        self._connection.close()
        self._process.join(30)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(
    connection: Connection, make: Callable[[str, argparse.Namespace], Engine], backend: str, parsed: argparse.Namespace
) -> None:
    """Run an engine and answer requests until the parent closes the connection."""
    os.dup2(2, 1)  # an engine's messages stay out of the table
    engine: Engine | None = None
    while True:
        try:
            request = connection.recv()
        except EOFError:
            break
        try:
            if engine is None:
                engine = make(backend, parsed)
            attribute = getattr(engine, request.method)
            result = attribute(*request.arguments) if callable(attribute) else attribute
            connection.send(("", result))
        except BaseException:
            connection.send((traceback.format_exc(), None))
    try:
        if engine is not None:
            engine.close()
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(0)  # engines do not always end by themselves


def _cycles_in_turns(workers: Sequence[_Worker], parsed: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one row for each cycle. The backend that begins changes from cycle to cycle."""
    rows: list[dict[str, Any]] = []
    for case in parsed.cases.split(","):
        able = [worker for worker in workers if not worker.failure and case in worker.cases]
        for index in range(parsed.cycles):
            for turn in range(len(able)):
                worker = able[(index + turn) % len(able)]
                cycle = worker.ask("cycle", case, index)
                if cycle is not None:
                    rows.append({"case": case, "backend": worker.backend, "index": index, **asdict(cycle)})
        print(f"{case}: {', '.join(worker.backend for worker in able) or 'no backend has it'}", flush=True)
    return rows


def _touch_host_memory(size: int) -> None:
    """Have the system provide host memory once. Memory of a new virtual machine is slow the first time it is touched, which
    would count as time of the engine that sleeps first."""
    if not size:
        return
    memory = mmap.mmap(-1, size)
    view = (ctypes.c_char * size).from_buffer(memory)
    begin = ctypes.addressof(view)
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    advise(begin, size, _HUGE_PAGES)

    def populate(offset: int) -> int:
        return int(advise(begin + offset, min(_PIECE, size - offset), _POPULATE))

    began = time.perf_counter()
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
        results = list(threads.map(populate, range(0, size, _PIECE)))
    del view
    memory.close()
    failed = sum(1 for result in results if result)
    print(f"host memory: {size / GIB:.0f} GiB touched in {time.perf_counter() - began:.1f} s, {failed} failures", flush=True)


# ---- the result --------------------------------------------------------------------------------------------------------


def _mistakes(workers: Sequence[_Worker], rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a sentence for each failure, and for each generation whose tokens are wrong.

    Every engine begins with the same tokens, and generates them after each cycle. In cases whose name begins with "update"
    the weights were changed. Then the tokens differ from those of the start, and are the same with every backend.
    """
    mistakes = [f"{worker.backend}: {worker.failure}" for worker in workers if worker.failure]
    mistakes += [
        f"{worker.backend} begins with tokens {worker.tokens}, {workers[0].backend} with {workers[0].tokens}"
        for worker in workers[1:]
        if worker.tokens != workers[0].tokens
    ]
    updated: dict[tuple[str, int], str] = {}
    for row in rows:
        where = f"{row['backend']}, {row['case']}, cycle {row['index']}"
        first = workers[0].tokens
        if not row["case"].startswith("update"):
            if row["tokens"] != first:
                mistakes.append(f"{where}: tokens {row['tokens']}, not {first} as before")
            continue
        expected = updated.setdefault((row["case"], row["index"]), row["tokens"])
        if row["tokens"] != expected:
            mistakes.append(f"{where}: tokens {row['tokens']}, not {expected} as another backend")
        if row["tokens"] == first:
            mistakes.append(f"{where}: the tokens are those of before the update")
    return mistakes


def _figures(rows: Sequence[dict[str, Any]], case: str, backend: str) -> dict[str, list[float]]:
    """Return the values of each figure of a case and backend, in the order of the cycles. The first sleep of a backend in a
    case is a figure of its own."""
    values: dict[str, list[float]] = {}
    for row in rows:
        if row["case"] == case and row["backend"] == backend:
            for name, value in row["figures"].items():
                is_first = name == "sleep" and row["index"] == 0
                values.setdefault("first sleep" if is_first else name, []).append(value)
    return values


def _table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the medians [least, most] of each figure, a row for each case and figure, a column for each backend."""
    backends = list(dict.fromkeys(row["backend"] for row in rows))
    other = next((backend for backend in backends if backend != OURS), "")
    lines = [
        "| case | figure | " + " | ".join(backends) + f" | {OURS} / {other} |",
        "| --- | --- |" + " --- |" * (len(backends) + 1),
    ]
    for case in dict.fromkeys(row["case"] for row in rows):
        by_backend = {backend: _figures(rows, case, backend) for backend in backends}
        for name in dict.fromkeys(name for figures in by_backend.values() for name in figures):
            cells = [_cell(by_backend[backend].get(name, [])) for backend in backends]
            ours, theirs = (by_backend.get(backend, {}).get(name) for backend in (OURS, other))
            ratio = "" if not ours or not theirs else _ratio(ours, theirs)
            lines.append(f"| {case} | {name} | " + " | ".join(cells) + f" | {ratio} |")
    return "\n".join(lines)


def _cell(values: Sequence[float]) -> str:
    if not values:
        return ""
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{statistics.median(values):.2f} [{min(values):.2f}, {max(values):.2f}]"


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    divisor = statistics.median(theirs)
    return f"{statistics.median(ours) / divisor:.2f}" if divisor else ""


def _as_json(
    workers: Sequence[_Worker], rows: Sequence[dict[str, Any]], mistakes: Sequence[str], parsed: argparse.Namespace
) -> dict[str, Any]:
    return {
        "arguments": vars(parsed),
        "engines": {worker.backend: {"tokens": worker.tokens, **worker.about} for worker in workers},
        "mistakes": list(mistakes),
        "cycles": list(rows),
    }
