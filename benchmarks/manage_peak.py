"""The peak of device memory while pairs of weights are joined and managed.

Each layer is loaded as two tensors, which become one parameter. A thread samples the memory in use (cudaMemGetInfo).

- `ordinary`: The weights are not managed.
- `region`: The weights are loaded and joined inside a region.
- `line`: The weights are loaded and joined as in `region`, with `torch_memory_saver.empty_cache()` after each layer.
- `manage`: The weights are loaded outside regions, with `torch.cuda.empty_cache()` after each layer. Then `manage()` moves
  them. `peak_gib` is the peak during that call, and `load_peak_gib` is the peak before it.

    python benchmarks/manage_peak.py                   # all modes, each in a process of its own, as a table in Markdown
    python benchmarks/manage_peak.py --mode manage     # one mode, in this process, as JSON
    python -m torch_memory_saver simulate -- python benchmarks/manage_peak.py --small
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import subprocess
import sys
import threading
import time
from typing import Any

import torch

from torch_memory_saver import torch_memory_saver as saver

MIB, GIB = 1 << 20, 1 << 30
MODES = ("ordinary", "region", "line", "manage")
COLUMNS = ("mode", "weights GiB", "load peak GiB", "`manage()` peak GiB", "end GiB", "seconds", "`manage()` ms")
#: The width of the weights, and the number of layers. A layer has 16 * width ** 2 bytes.
SIZES, SMALL = (4096, 40), (1024, 6)


class Samples:
    """Samples of the device memory in use, in bytes more than at the start. A thread takes them until `stop()`."""

    def __init__(self) -> None:
        self._start = 0
        self._start = self.used()
        self._taken: list[int] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._take, daemon=True)
        self._thread.start()

    def used(self) -> int:
        """Return the bytes in use now."""
        free, total = torch.cuda.mem_get_info()
        return int(total - free) - self._start

    def take_peak(self) -> int:
        """Return the largest sample since the last call, or since the start."""
        taken, self._taken = self._taken, []
        return max(taken, default=0)

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _take(self) -> None:
        torch.cuda.set_device(0)
        while not self._stopped.is_set():
            used = self.used()
            self._taken.append(used)
            self._stopped.wait(0.0005)


def load(mode: str, width: int, layers: int) -> torch.nn.ParameterList:
    """Load the weights of all layers, and join each pair."""
    empty = {"line": saver.empty_cache, "manage": torch.cuda.empty_cache}.get(mode)
    shape = 4 * width, width
    parts = [[torch.full(shape, float(i), device="cuda", dtype=torch.bfloat16) for _ in range(2)] for i in range(layers)]
    model = torch.nn.ParameterList()
    for pair in parts:
        model.append(torch.nn.Parameter(torch.cat(pair)))
        pair.clear()
        if empty:
            empty()
    return model


def measure(mode: str, width: int, layers: int) -> dict[str, Any]:
    """Load the weights in this process, and return what was measured."""
    torch.empty(1, device="cuda")
    torch.cuda.synchronize()
    samples = Samples()
    start = time.perf_counter()
    extra = {}
    if mode in ("ordinary", "manage"):
        model = load(mode, width, layers)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        time.sleep(0.01)
        if mode == "manage":
            extra = {"load_peak_gib": samples.take_peak() / GIB, "before_gib": samples.used() / GIB}
            called = time.perf_counter()
            handle = saver.manage(model, tag="weights", backup="host")
            torch.cuda.synchronize()
            extra |= {"moved_gib": handle.moved_bytes / GIB, "manage_ms": (time.perf_counter() - called) * 1e3}
    else:
        with saver.region(tag="weights", backup="host"):
            model = load(mode, width, layers)
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    samples.stop()
    sizes = [parameter.numel() * parameter.element_size() for parameter in model.parameters()]
    torch.cuda.empty_cache()
    result = {"mode": mode, "live_gib": sum(sizes) / GIB, "largest_mib": max(sizes) / MIB}
    result |= {"peak_gib": samples.take_peak() / GIB, "after_gib": samples.used() / GIB, "seconds": seconds}
    return result | extra


def start_worker(mode: str, small: bool) -> dict[str, Any]:
    """Measure a mode in a process of its own. Exits with a message if the process fails."""
    command = [sys.executable, os.path.abspath(__file__), "--mode", mode, *(["--small"] if small else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"FAILED: {shlex.join(command)} ended with status {done.returncode}")
    return dict(json.loads(done.stdout))


def row(result: dict[str, Any]) -> list[str]:
    """Return a row of the table. Without a call of `manage()`, the only peak is that of the load."""
    cells = result | {"call_peak_gib" if "manage_ms" in result else "load_peak_gib": result["peak_gib"]}
    names = "live_gib", "load_peak_gib", "call_peak_gib", "after_gib", "seconds", "manage_ms"
    return [result["mode"], *(f"{cells[name]:.2f}" if name in cells else "-" for name in names)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=MODES, help="measure this mode only and print JSON (default: all, a table)")
    parser.add_argument("--small", action="store_true", help="load small weights, for the simulated GPU")
    options = parser.parse_args()
    if options.mode:
        print(json.dumps(measure(options.mode, *(SMALL if options.small else SIZES))))
        return
    rows = (row(start_worker(mode, options.small)) for mode in MODES)
    for cells in itertools.chain([COLUMNS, ["---"] * len(COLUMNS)], rows):
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
