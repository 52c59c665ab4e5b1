"""The interface of the doctor's checks, their findings, and the facts that several checks need: the driver's devices, and
PyTorch.

The driver and PyTorch are queried once, each by a process of its own. So a crash, a hang or a failed import is something to
report, and the doctor makes no CUDA context in its own process.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch_memory_saver._cli.child_python import program_options
from torch_memory_saver._services import driver_library
from torch_memory_saver.errors import DriverUnavailableError

__all__ = [
    "Check",
    "Device",
    "DriverFacts",
    "Finding",
    "Status",
    "TorchFacts",
    "ask_child",
    "driver_facts",
    "fail",
    "ok",
    "run_child",
    "skip",
    "torch_facts",
    "warn",
]

#: Making a context on each of eight devices takes seconds, importing torch from a slow file system a minute.
_PATIENCE_S = 180
#: The number of last words that are shown of a failed process's errors.
_LAST_WORDS = 20
_DRIVER_PROBE = Path(os.path.abspath(__file__)).with_name("driver_probe.py")
_TORCH_PROBE = """
import json, sys
try:
    import torch
    found = {"problem": None, "version": str(torch.__version__)}
    found |= {"cuda": torch.version.cuda, "hip": getattr(torch.version, "hip", None)}
    lines = open("/proc/self/maps", errors="replace").read().splitlines()
    paths = {line.split(None, 5)[5] for line in lines if "libcudart" in line}
    found["runtimes"] = sorted(path for path in paths if ".so" in path)
except ModuleNotFoundError as error:
    found = {"problem": str(error), "missing": error.name == "torch"}
except BaseException as error:
    found = {"problem": f"{type(error).__name__}: {error}"}
print("\\n" + json.dumps(found), file=sys.__stdout__)
"""


class Status:
    """OK; WARN: something does not work in some cases, which are named; FAIL: it does not work; SKIP: it does not apply
    here, or it cannot be known because something else is missing."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


class Finding(NamedTuple):
    """The result of a check. The texts are one sentence each, without a full stop.

    Attributes:
        status: One of Status.
        found: The state that the check has found.
        advice: The action to take; "" only if the status is OK.
        details: Further lines, such as one for each GPU.
    """

    status: str
    found: str
    advice: str = ""
    details: tuple[str, ...] = ()


def ok(found: str, details: Sequence[str] = ()) -> Finding:
    return Finding(Status.OK, found, "", tuple(details))


def warn(found: str, advice: str, details: Sequence[str] = ()) -> Finding:
    return Finding(Status.WARN, found, advice, tuple(details))


def fail(found: str, advice: str, details: Sequence[str] = ()) -> Finding:
    return Finding(Status.FAIL, found, advice, tuple(details))


def skip(found: str, advice: str, details: Sequence[str] = ()) -> Finding:
    return Finding(Status.SKIP, found, advice, tuple(details))


class Check(NamedTuple):
    """One check of the doctor.

    Attributes:
        name: Name of the check. It must not change, because programs that read the doctor's JSON rely on it.
        look: Function that makes the check and changes nothing. An exception that it raises is shown as a failure of the
            check.
    """

    name: str
    look: Callable[[], Finding]


@dataclass(frozen=True)
class Device:
    """A GPU.

    Attributes:
        problem: The driver call that failed; None if there is none. The other values may be missing then.
        virtual_memory: Whether the driver has virtual memory management for it.
        exportable: Whether its memory can be sent to other processes.
        rdma: Whether memory that is mapped by virtual memory management can be registered for GPUDirect RDMA.
        dma_buf: Whether that works without the module nvidia_peermem.
        pci: Its address on the bus, as in /sys/bus/pci/devices.
        peers: The ordinals of the GPUs whose memory it can access.
    """

    ordinal: int
    problem: str | None = None
    name: str = "unknown"
    total_bytes: int = 0
    free_bytes: int = 0
    virtual_memory: bool = False
    exportable: bool = False
    rdma: bool = False
    dma_buf: bool = False
    granularity_bytes: int = 0
    pci: str = ""
    peers: Sequence[int] = ()


@dataclass(frozen=True)
class DriverFacts:
    """The driver.

    Attributes:
        problem: Why it cannot be used; None if it can. A machine without a device is no problem of the driver.
        loaded: Whether its library could be loaded.
        cuda_version: The latest CUDA version that it supports, such as 13000; None if unknown.
    """

    problem: str | None = None
    loaded: bool = True
    cuda_version: int | None = None
    devices: Sequence[Device] = ()


@dataclass(frozen=True)
class TorchFacts:
    """PyTorch.

    Attributes:
        problem: Why it cannot be imported; None if it can.
        missing: Whether it is not installed.
        cuda, hip: The versions of CUDA and ROCm that it is built for.
        runtimes: The paths of the CUDA runtimes that its import loads.
    """

    problem: str | None = None
    missing: bool = False
    version: str = ""
    cuda: str | None = None
    hip: str | None = None
    runtimes: Sequence[str] = ()


def run_child(*arguments: str, **variables: str) -> tuple[str, str, str | None]:
    """Run this Python. Return its output, its errors, and why it did not end well, or None."""
    try:
        child = subprocess.Popen(
            [sys.executable, *arguments],
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    except (OSError, ValueError) as error:
        return "", "", f"{sys.executable} could not be started: {error}"
    try:
        output, errors = child.communicate(timeout=_PATIENCE_S)
    except subprocess.TimeoutExpired:
        # A process inside a driver that hangs may not end even now, so it is not waited for.
        child.kill()
        return "", "", f"there was no answer within {_PATIENCE_S} seconds"
    reason = None
    if child.returncode < 0:
        reason = f"the process was ended by {_signal_name(-child.returncode)}"
    elif child.returncode > 0:
        reason = f"the process ended with status {child.returncode}: {' '.join(errors.split()[-_LAST_WORDS:])}"
    return output, errors, reason


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # one of the real-time signals
        return f"signal {number}"


def ask_child(*arguments: str) -> dict[str, Any]:
    """Return the JSON object with a "problem" that the program prints as a line; only a problem if there is none. Libraries
    and sitecustomize may print other lines before and after it, also JSON."""
    output, _, problem = run_child(*arguments)
    if problem is not None:
        return {"problem": problem}
    for line in reversed(output.splitlines()):
        try:
            answer = json.loads(line)
        except ValueError:
            continue
        if isinstance(answer, dict) and "problem" in answer:
            return answer
    return {"problem": "the answer cannot be read"}


@functools.cache
def driver_facts() -> DriverFacts:
    """Ask the driver. This makes a context on each device in another process."""
    try:
        answer = ask_child("-I", "-S", str(_DRIVER_PROBE), driver_library())
    except DriverUnavailableError as error:
        return DriverFacts(problem=str(error))
    devices = [Device(**row) for row in answer.pop("devices", [])]
    return DriverFacts(**answer, devices=devices)


@functools.cache
def torch_facts() -> TorchFacts:
    """Import PyTorch in another process."""
    answer = ask_child(*program_options(_TORCH_PROBE))
    if answer.get("problem"):
        answer["problem"] = " ".join(str(answer["problem"]).split())
    return TorchFacts(**answer)
