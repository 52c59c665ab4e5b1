"""Records what a GPU does: runs every behaviour of the table and writes the observations.

    python tools/record_gpu.py --output tests/conformance/recorded_h200.json

It needs the standard library only. With the simulated GPU's library in TMS_CUDA_DRIVER the same command records the
simulated GPU. A behaviour that changes its process runs in a process of its own, several at a time. The others run one after
another in one process, so that no other process changes what cuMemGetInfo returns.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

BEHAVIOURS = Path(__file__).resolve().parents[1] / "tests" / "conformance"
sys.path.insert(0, str(BEHAVIOURS))

from gpu import TABLE, Behaviour, Gpu, Observations  # noqa: E402

WORKERS = 6
TIMEOUT_SECONDS = 60


def load() -> dict[str, Behaviour]:
    for path in sorted(BEHAVIOURS.glob("on_*.py")):
        importlib.import_module(path.stem)
    return TABLE


def run_here(names: list[str]) -> None:
    """Runs behaviours in a child process. Prints one line of JSON for each. Stops early if one left the device in error."""
    load()
    gpu = Gpu()
    for name in names:
        chosen = TABLE[name]
        if not chosen.own_process:
            gpu.start()
        try:
            seen: Observations = chosen.function(gpu)
        except Exception as error:  # what cannot be observed is part of the record
            seen = {"failed": f"{type(error).__name__}: {error}"}
        print(json.dumps({"name": name, "seen": seen}), flush=True)
        if not chosen.own_process:
            if gpu.call("cuCtxSynchronize") != "SUCCESS":
                break
            gpu.call("cudaGetLastError")
    # The runtimes' exit handlers are skipped: they would wait for work that some behaviours leave on the device.
    sys.stdout.flush()
    os._exit(0)


def run_child(names: list[str], say: bool) -> dict[str, Observations]:
    """Runs behaviours in one child process after another until each has a result. Returns the observations by name."""
    results: dict[str, Observations] = {}
    left = list(names)
    while left:
        command = [sys.executable, __file__, "--child", *left]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert child.stdout is not None and child.stderr is not None
        errors: list[str] = []
        drain = threading.Thread(target=lambda stream=child.stderr, lines=errors: lines.extend(stream), daemon=True)
        drain.start()
        before = len(left)
        while True:
            timer = threading.Timer(TIMEOUT_SECONDS, child.kill)
            timer.start()
            line = child.stdout.readline()
            timer.cancel()
            if not line:
                break
            answer = json.loads(line)
            results[answer["name"]] = answer["seen"]
            left.remove(answer["name"])
        status = child.wait()
        drain.join(timeout=5)
        if status != 0 and left:
            how = signal.Signals(-status).name if status < 0 else f"exit {status}: {''.join(errors)[-300:]}"
            results[left.pop(0)] = {"died": how}
        elif len(left) == before:
            results[left.pop(0)] = {"died": "said nothing"}
        if say and errors:
            print(f"stderr of {names[0]}...: {''.join(errors)[-2000:]}", file=sys.stderr)
    return results


def machine() -> dict[str, Any]:
    """Describes the device and the driver. Runs in a child process."""
    gpu = Gpu()
    gpu.must("cuInit", 0)
    version, runtime, count = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    name = (ctypes.c_char * 100)()
    gpu.must("cuDriverGetVersion", version)
    gpu.call("cudaRuntimeGetVersion", runtime)
    gpu.must("cuDeviceGetCount", count)
    gpu.must("cuDeviceGetName", name, 100, 0)
    told = "unknown"
    if not gpu.simulated:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        with contextlib.suppress(OSError, subprocess.SubprocessError, IndexError):
            told = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.split()[0]
    return {
        "device": name.value.decode(),
        "devices": count.value,
        "driver": told,
        "driver_cuda_version": version.value,
        "runtime_version": runtime.value,
    }


def run_all(only: list[str], say: bool) -> dict[str, Any]:
    table = load()
    described = json.loads(
        subprocess.run([sys.executable, __file__, "--machine"], stdout=subprocess.PIPE, text=True, check=True).stdout
    )
    chosen = [b for b in table.values() if b.devices <= described["devices"] and (not only or b.name in only)]
    shared: dict[str, list[str]] = {}
    for b in chosen:
        if not b.own_process:
            shared.setdefault(b.name.split(".")[0], []).append(b.name)
    results: dict[str, Observations] = {}
    for names in shared.values():
        results.update(run_child(names, say))
    with ThreadPoolExecutor(WORKERS) as pool:
        for result in pool.map(lambda b: run_child([b.name], say), [b for b in chosen if b.own_process]):
            results.update(result)
    return {"machine": described, "behaviours": {b.name: results[b.name] for b in chosen}}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, help="the file to write (default: standard output)")
    parser.add_argument("--device-name", help="the device's name in the record (default: as the driver reports)")
    parser.add_argument("--driver-version", help="the driver's version in the record (default: as nvidia-smi reports)")
    parser.add_argument("--date", default=datetime.datetime.now(datetime.timezone.utc).date().isoformat())
    parser.add_argument("--only", nargs="*", default=[], metavar="BEHAVIOUR")
    parser.add_argument("--verbose", action="store_true", help="show what the processes wrote to standard error")
    parser.add_argument("--child", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--machine", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--table", action="store_true", help="print the behaviours and how many devices each needs, and run none"
    )
    options = parser.parse_args()
    if options.child is not None:
        run_here(options.child)
    if options.table:
        print(json.dumps({b.name: b.devices for b in load().values()}))
        return 0
    if options.machine:
        print(json.dumps(machine()))
        return 0
    record = run_all(options.only, options.verbose)
    described = record["machine"]
    described["device"] = options.device_name or described["device"]
    described["driver"] = options.driver_version or described["driver"]
    described["date"] = options.date
    text = json.dumps(record, indent=1) + "\n"
    if options.output:
        options.output.write_text(text, encoding="utf-8")
    else:
        print(text, end="")
    odd = {n: s for n, s in record["behaviours"].items() if "died" in s or "failed" in s}
    print(f"{len(record['behaviours'])} behaviours recorded on {described['device']}", file=sys.stderr)
    for name, seen in odd.items():
        print(f"  not observed: {name}: {seen}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
