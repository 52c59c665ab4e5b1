"""One process of the benchmarks: measures one shape of one case and writes the results to a file.

It is started by path, with its job in JSON as the only argument. In the process that times the C++ package,
`torch_memory_saver` is that package, and this module is not part of it. So it first loads its own folder as a package of
another name.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import sys
import traceback
from pathlib import Path
from typing import Any

_PACKAGE = "torch_memory_saver_bench"


def _load_package() -> None:
    folder = Path(__file__).resolve().parent
    # Python has put the folder of this file into sys.path. Its modules must not be found as top-level ones.
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != folder]
    specification = importlib.util.spec_from_file_location(_PACKAGE, folder / "__init__.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[_PACKAGE] = module
    specification.loader.exec_module(module)


def _describe(device: Any) -> dict[str, Any]:
    """The device, its driver and PyTorch, for the results."""
    torch = sys.modules.get("torch")
    return {
        "device": device.name(),
        "device_bytes": device.memory()[1],
        "driver": _driver_version(),
        "torch": None if torch is None else str(torch.__version__),
    }


def _driver_version() -> str | None:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return found[0] if found else None


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Measures. Returns {"rows", "machine"}, or {"unavailable": reason}."""
    cases = importlib.import_module(f"{_PACKAGE}.cases")
    driver = importlib.import_module(f"{_PACKAGE}.driver")
    memory = importlib.import_module(f"{_PACKAGE}.memory")
    savers = importlib.import_module(f"{_PACKAGE}.savers")
    setting = importlib.import_module(f"{_PACKAGE}.setting")
    case = cases.find(job["case"])
    shape = case.shapes[job["shape"]].scaled(job["scale"])
    try:
        saver = savers.Ours() if job["peer"] is None else savers.Peer(job["peer"])
        count = driver.Device.count()
        if count < case.devices:
            raise savers.Unavailable(f"it needs {case.devices} GPUs, and there are {count}")
        allocator = memory.TorchAllocator() if job["allocator"] == "torch" else memory.RuntimeAllocator()
        devices = [driver.Device(ordinal) for ordinal in range(case.devices)]
        devices[0].make_current()
        rows = case.run(
            setting.Setting(
                saver, allocator, devices, job["scale"], job["repetitions"], job["directory"], job["peer"] is not None
            ),
            shape,
        )
    except savers.Unavailable as error:
        return {"unavailable": str(error)}
    return {"rows": [row.as_json() for row in rows], "machine": _describe(devices[0])}


def use_host_memory(size: int) -> None:
    """Uses `size` bytes of host memory, as the largest case does: some virtual machines get memory only on its first use."""
    driver = importlib.import_module(f"{_PACKAGE}.driver")
    driver.use_memory(size)


def main(argument: str) -> None:
    """Runs the job and writes {"rows", "machine"}, {"unavailable"} or {"failed"} to its file."""
    job = json.loads(argument)
    _load_package()
    try:
        if job["case"] is None:
            use_host_memory(job["host_bytes"])
            result: dict[str, Any] = {"rows": []}
        else:
            result = run(job)
    except Exception as error:  # any failure is reported, and the other processes run
        result = {"failed": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    Path(job["result"]).write_text(json.dumps(result), encoding="utf-8")
    if job.get("peer") is not None:
        # The result is written. Not every release of the peer survives the exit of the interpreter.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
