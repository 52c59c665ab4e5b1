"""Records what the driver answers to checkpoints of a process with managed memory: `python tools/record_checkpoint.py`.

A child process has managed weights and a managed KV cache, or memory with handles that cannot be exported. It is locked,
checkpointed, restored and unlocked (cuCheckpointProcess*) from this process, and from itself, before and after a pause. The
answers are printed as JSON: the driver's results, the states, the time of each call, and the memory of the GPU and of the
child. It needs a GPU and a driver with these functions (550 or later).
"""

from __future__ import annotations

import ctypes
import json
import os
import queue
import subprocess
import sys
import threading
import time
from typing import Any

MIB = 1 << 20
WEIGHTS, KV_CACHE = 512 * MIB, 2048 * MIB
LOCK_MILLISECONDS = 10_000
ANSWER_SECONDS = 60
STATES = ("running", "locked", "checkpointed", "failed")

CHILD = r"""
import ctypes, json, os, sys, threading, time
import torch
from torch_memory_saver import torch_memory_saver as saver
sys.path.insert(0, os.path.dirname(os.environ["RECORDER"]))
from record_checkpoint import KV_CACHE, MIB, WEIGHTS, Checkpoints, plain_memory

kind = sys.argv[1]
if kind == "plain":
    weights = plain_memory(WEIGHTS)
else:
    with saver.region("weights", backup="host"):
        weights = torch.arange(WEIGHTS // 4, dtype=torch.int32, device="cuda")
    with saver.region("kv_cache"):
        kv_cache = torch.zeros(KV_CACHE, dtype=torch.uint8, device="cuda")
expected = weights.sum(dtype=torch.int64).item()
torch.cuda.synchronize()
print("ready", flush=True)
for line in sys.stdin:
    command = line.strip()
    answer = "ok"
    if command == "pause":
        answer = saver.pause().bytes
    elif command == "resume":
        answer = saver.resume().bytes
    elif command == "check":
        answer = weights.sum(dtype=torch.int64).item() == expected
    elif command == "self":
        answer = []
        def steps():
            answer.extend(Checkpoints(os.getpid()).cycle())
        thread = threading.Thread(target=steps)
        thread.start()
        thread.join()
    print(json.dumps(answer), flush=True)
"""


class Checkpoints:
    """The driver's calls for one process."""

    def __init__(self, pid: int) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._driver.cuInit(0)
        self._pid = pid

    def call(self, name: str, *head: int) -> dict[str, Any]:
        arguments = (ctypes.c_uint * 16)(*head)  # larger than any of the structures, which are zero but for the first field
        began = time.monotonic()
        function = getattr(self._driver, f"cuCheckpointProcess{name}", None)
        if function is None:
            return {"call": name, "result": "the driver has no such function"}
        result = function(self._pid, ctypes.byref(arguments))
        text = ctypes.c_char_p()
        self._driver.cuGetErrorName(result, ctypes.byref(text))
        seconds = round(time.monotonic() - began, 3)
        return {"call": name, "result": (text.value or b"").decode(), "seconds": seconds, "state": self.state()}

    def state(self) -> str:
        state = ctypes.c_int(-1)
        result = self._driver.cuCheckpointProcessGetState(self._pid, ctypes.byref(state))
        return STATES[state.value] if result == 0 else f"error {result}"

    def cycle(self) -> list[dict[str, Any]]:
        answers = [self.call("Lock", LOCK_MILLISECONDS), self.call("Checkpoint")]
        answers += [{"memory": memory(self._pid)}, self.call("Restore"), self.call("Unlock")]
        return answers


def plain_memory(size: int) -> Any:
    """A tensor in memory whose handle cannot be exported."""
    import torch

    torch.cuda.init()
    torch.zeros(1, device="cuda")
    driver = ctypes.CDLL("libcuda.so.1")
    properties = (ctypes.c_uint * 12)(1, 0, 1, 0)  # pinned, no handle types, on a device, number 0
    handle, address = ctypes.c_ulonglong(), ctypes.c_ulonglong()
    access = (ctypes.c_uint * 3)(1, 0, 3)
    for result in (
        driver.cuMemCreate(ctypes.byref(handle), ctypes.c_size_t(size), ctypes.byref(properties), ctypes.c_ulonglong(0)),
        driver.cuMemAddressReserve(
            ctypes.byref(address), ctypes.c_size_t(size), ctypes.c_size_t(0), ctypes.c_ulonglong(0), ctypes.c_ulonglong(0)
        ),
        driver.cuMemMap(address, ctypes.c_size_t(size), ctypes.c_size_t(0), handle, ctypes.c_ulonglong(0)),
        driver.cuMemSetAccess(address, ctypes.c_size_t(size), ctypes.byref(access), ctypes.c_size_t(1)),
    ):
        assert result == 0, result
    holder = type(
        "Memory",
        (),
        {
            "__cuda_array_interface__": {
                "shape": (size // 4,),
                "typestr": "<i4",
                "data": (address.value, False),
                "version": 3,
            }
        },
    )()
    tensor = torch.as_tensor(holder, device="cuda")
    tensor.copy_(torch.arange(size // 4, dtype=torch.int32, device="cuda"))
    return tensor


def memory(pid: int) -> dict[str, int]:
    """MiB in use on the GPU, and resident memory of a process."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    used = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {"gpu_mib": int(used[0]) if used else -1, "host_mib": resident // MIB}


class Child:
    def __init__(self, kind: str) -> None:
        environment = dict(os.environ, RECORDER=os.path.abspath(__file__))
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([sys.executable, "-c", CHILD, kind], env=environment, **pipes)
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self._lines.get(timeout=ANSWER_SECONDS)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.strip())
        self._lines.put("")

    def ask(self, command: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        try:
            line = self._lines.get(timeout=ANSWER_SECONDS)
        except queue.Empty:
            return f"no answer within {ANSWER_SECONDS} seconds"
        return json.loads(line) if line else f"the process has ended with status {self.process.wait()}"


def record(kind: str) -> list[Any]:
    child = Child(kind)
    pid = child.process.pid
    steps: list[Any] = [{"begin": memory(pid)}]
    try:
        steps.append({"from another process": Checkpoints(pid).cycle(), "contents": child.ask("check")})
        if kind == "managed":
            steps.append({"pause": child.ask("pause"), "memory": memory(pid)})
            steps.append({"paused, from another process": Checkpoints(pid).cycle(), "resume": child.ask("resume")})
            steps.append({"contents": child.ask("check")})
        steps.append({"from the process itself": child.ask("self")})
    finally:
        child.process.kill()
        child.process.wait()
    return steps


if __name__ == "__main__":
    print(json.dumps({kind: record(kind) for kind in ("managed", "plain")}, indent=1))
