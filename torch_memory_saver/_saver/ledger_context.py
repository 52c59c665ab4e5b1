"""Measures the device memory of a context, by what a child process takes that does nothing but make one.

Only where the caller of the ledger asks for it: it starts a process, takes memory for a moment, and other processes that
allocate meanwhile falsify it.
"""

from __future__ import annotations

import os
import subprocess
import sys

from torch_memory_saver import _core
from torch_memory_saver.errors import DriverError

__all__ = ["measure_context_bytes"]

#: Makes the primary context of the device with the ordinal argv[2], by the driver argv[1], and keeps it until stdin ends.
_CHILD = """
import ctypes, sys
driver, device, context = ctypes.CDLL(sys.argv[1]), ctypes.c_int(), ctypes.c_void_p()
for call, *arguments in (
    (driver.cuInit, 0),
    (driver.cuDeviceGet, ctypes.byref(device), int(sys.argv[2])),
    (driver.cuDevicePrimaryCtxRetain, ctypes.byref(context), device),
):
    result = call(*arguments)
    if result:
        sys.exit(f"{call.__name__} failed with {result}")
print("made", flush=True)
sys.stdin.read()
"""
#: Options of Python: no sitecustomize, which may import this package and write files.
_NOTHING_ELSE = ("-I", "-S")
_DRIVER = "libcuda.so.1"


def measure_context_bytes(device: int, uuid: str) -> int:
    """The bytes that a context takes on a device.

    Args:
        device: CUDA ordinal, of a device in use.
        uuid: The device's, such as "GPU-5d5ba0d6-..."; "" if it is not known.

    Raises:
        DriverError: The child cannot make a context.
    """
    environment, ordinal = dict(os.environ), device
    if uuid:  # the program may have changed the variable since it began to use CUDA
        environment["CUDA_VISIBLE_DEVICES"], ordinal = uuid, 0
    library = os.environ.get("TMS_CUDA_DRIVER") or _DRIVER
    before = _core.device_memory(device).free
    with subprocess.Popen(
        [sys.executable, *_NOTHING_ELSE, "-c", _CHILD, library, str(ordinal)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:  # whose input ends with the block, and so the child
        assert child.stdout is not None
        made = child.stdout.readline()
        after = _core.device_memory(device).free
        _, errors = child.communicate()
    if not made:
        reason = errors.strip().rpartition("\n")[2] or f"it ended with status {child.returncode}"
        raise DriverError(
            f"the context of device {device} could not be measured, because the child process made none: {reason}",
            operation="ledger",
        )
    return max(0, before - after)
