"""Records what a GPU does: runs every behaviour of the table and writes the observations.

    python tools/record_gpu.py --output tests/conformance/driver/recorded_h100.json
    python tools/record_gpu.py --suite pytorch --output tests/conformance/pytorch/recorded_h100.json

The suite of the driver needs the standard library only, the other one PyTorch. On the simulated GPU the same command
records the simulated GPU: for the driver with its library in TMS_CUDA_DRIVER, for PyTorch under simulate. A behaviour that
changes its process runs in a process of its own, several at a time. The others run one after another in one process, so that
no other process changes what cuMemGetInfo returns.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
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

from table import SUITES, TABLE, Observations, Subject, load  # noqa: E402

#: Processes at a time.
WORKERS = min(6, os.cpu_count() or 1)
TIMEOUT_SECONDS = 60
#: The most characters of a value that stands on one line of the record.
ONE_LINE = 100


def run_here(suite: str, names: list[str]) -> None:
    """Runs behaviours in a child process. Prints one line of JSON for each. Stops early if one left the device in error."""
    subject_of = load(suite)
    shared: Subject | None = None
    for name in names:
        if TABLE[name].own_process:
            run_forked(name, subject_of)
            continue
        shared = shared or subject_of()
        shared.start()
        observe(name, shared)
        if not shared.is_usable():
            break
    # The runtimes' exit handlers are skipped: they would wait for work that some behaviours leave on the device.
    os._exit(0)


def run_forked(name: str, subject_of: type[Subject]) -> None:
    """Runs a behaviour in a child of this process, which has imported PyTorch and made no call of CUDA."""
    child = os.fork()
    if child == 0:
        observe(name, subject_of())
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status != 0:
        how = signal.Signals(-status).name if status < 0 else f"exit {status}"
        print(json.dumps({"name": name, "seen": {"died": how}}), flush=True)


def observe(name: str, subject: Subject) -> None:
    try:
        seen: Observations = TABLE[name].function(subject)
    except Exception as error:  # what cannot be observed is part of the record
        seen = {"failed": f"{type(error).__name__}: {error}"}
    print(json.dumps({"name": name, "seen": seen}), flush=True)


def run_child(suite: str, names: list[str], say: bool) -> dict[str, Observations]:
    """Runs behaviours in one child process after another until each has a result. Returns the observations by name."""
    results: dict[str, Observations] = {}
    left = list(names)
    while left:
        command = [sys.executable, __file__, "--suite", suite, "--child", *left]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
        assert child.stdout is not None and child.stderr is not None
        errors: list[str] = []
        drain = threading.Thread(target=lambda stream=child.stderr, lines=errors: lines.extend(stream), daemon=True)
        drain.start()
        before = len(left)
        while True:
            timer = threading.Timer(TIMEOUT_SECONDS, os.killpg, (child.pid, signal.SIGKILL))
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
    gpu: Any = load("driver")()
    gpu.must("cuInit", 0)
    version, runtime, count = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    name = (ctypes.c_char * 100)()
    gpu.must("cuDriverGetVersion", version)
    gpu.call("cudaRuntimeGetVersion", runtime)
    gpu.must("cuDeviceGetCount", count)
    gpu.must("cuDeviceGetName", name, 100, 0)
    driver = "unknown"
    if not gpu.simulated:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        with contextlib.suppress(OSError, subprocess.SubprocessError, IndexError):
            driver = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.split()[0]
    return {
        "device": name.value.decode(),
        "devices": count.value,
        "driver": driver,
        "driver_cuda_version": version.value,
        "runtime_version": runtime.value,
    }


def run_all(suite: str, only: list[str], say: bool) -> dict[str, Any]:
    load(suite)
    described = json.loads(
        subprocess.run([sys.executable, __file__, "--machine"], stdout=subprocess.PIPE, text=True, check=True).stdout
    )
    chosen = [b for b in TABLE.values() if b.devices <= described["devices"] and (not only or b.name in only)]
    shared: dict[str, list[str]] = {}
    for b in chosen:
        if not b.own_process:
            shared.setdefault(b.name.split(".")[0], []).append(b.name)
    results: dict[str, Observations] = {}
    for names in shared.values():
        results.update(run_child(suite, names, say))
    alone = [b.name for b in chosen if b.own_process]
    with ThreadPoolExecutor(WORKERS) as pool:
        for result in pool.map(lambda first: run_child(suite, alone[first::WORKERS], say), range(WORKERS)):
            results.update(result)
    return {"machine": described, "behaviours": {b.name: results[b.name] for b in chosen}}


def in_lines(value: Any, indent: int = 0) -> str:
    """Return JSON in which each value that is short stands on one line."""
    text = json.dumps(value)
    if len(text) <= ONE_LINE or not isinstance(value, (dict, list)):
        return text
    inner = " " * (indent + 1)
    if isinstance(value, dict):
        rows = [f"{inner}{json.dumps(name)}: {in_lines(each, indent + 1)}" for name, each in value.items()]
        begin, end = "{", "}"
    else:
        rows = [inner + in_lines(each, indent + 1) for each in value]
        begin, end = "[", "]"
    return "\n".join([begin, ",\n".join(rows), " " * indent + end])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--suite", choices=SUITES, default="driver")
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
        run_here(options.suite, options.child)
    if options.table:
        load(options.suite)
        print(json.dumps({b.name: b.devices for b in TABLE.values()}))
        return 0
    if options.machine:
        print(json.dumps(machine()))
        return 0
    record = run_all(options.suite, options.only, options.verbose)
    described = record["machine"]
    described["device"] = options.device_name or described["device"]
    described["driver"] = options.driver_version or described["driver"]
    described["date"] = options.date
    text = in_lines(record) + "\n"
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
