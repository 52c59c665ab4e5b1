"""Ends with tensors in a module's globals, in a state and in a way that its arguments name: exit_state.py STATE ENDING.

`control` does without torch_memory_saver: its output is PyTorch's own. Prints nothing itself.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import sys
import threading
from pathlib import Path
from typing import Any

import torch

MIB = 1 << 20
STATE, ENDING = sys.argv[1:]
KEPT: list[Any] = []  # lives until the interpreter takes its modules apart


def tensor(value: int = 1) -> torch.Tensor:
    return torch.full((4 * MIB,), value, dtype=torch.uint8, device="cuda")


def hold() -> None:
    """Work on the device that never ends."""
    import torch_memory_saver

    path = Path(torch_memory_saver.__file__).with_name("_simulated_cuda.so")
    simulator = ctypes.CDLL(str(path))
    simulator.tms_sim_launch_add.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint8, ctypes.c_int)
    torch.cuda.synchronize()
    assert simulator.tms_sim_launch_add(None, KEPT[0].data_ptr(), MIB, 1, 1) == 0
    KEPT.append(simulator)


def in_child(function: Any) -> None:
    process = multiprocessing.get_context("fork").Process(target=function)
    process.start()
    process.join()
    assert process.exitcode == 0, process.exitcode


def use_after_fork() -> None:
    import torch_memory_saver
    from torch_memory_saver import errors
    from torch_memory_saver import torch_memory_saver as saver

    assert saver.stats().tags["weights"].allocations > 0
    KEPT[-1].__exit__(None, None, None)
    torch_memory_saver.empty_cache()
    graph = torch.cuda.CUDAGraph.__new__(torch.cuda.CUDAGraph)
    for call in (
        saver.pause,
        saver.resume,
        saver.enable_peer_access,
        lambda: saver.region(tag="weights").__enter__(),
        lambda: saver.cuda_graph(graph),
        lambda: saver.get_cpu_backup(KEPT[0]),
    ):
        try:
            call()
        except errors.ForkedProcessError:
            continue
        raise AssertionError(call)


def reach(state: str) -> None:
    if state == "control":
        KEPT.append(tensor())
        return
    from torch_memory_saver import torch_memory_saver as saver

    with saver.region(tag="weights", enable_cpu_backup=True):
        KEPT.append(tensor())
    with saver.region(tag="kv_cache", enable_disk_backup=True):
        KEPT.append(tensor())
    torch.cuda.synchronize()
    if state == "paused":
        saver.pause()
        KEPT.append(saver.get_cpu_backup(KEPT[0], zero_copy=True))
    elif state == "inside_region":
        region = saver.region(tag="weights")
        region.__enter__()
        KEPT.extend([region, tensor()])
    elif state == "inside_paused_region":
        region = saver.region(tag="weights")
        region.__enter__()
        saver.pause("weights")
        KEPT.extend([region, tensor()])
    elif state == "inside_disable":
        for make in (lambda: saver.region(tag="weights"), saver.disable):
            manager = make()
            manager.__enter__()
            KEPT.extend([manager, tensor()])
    elif state == "thread_in_region":
        inside = threading.Event()

        def work() -> None:
            with saver.region(tag="weights"):
                KEPT.append(tensor())
                inside.set()
                threading.Event().wait()

        threading.Thread(target=work, daemon=True).start()
        inside.wait()
    elif state == "pause_on_another_thread":
        hold()
        threading.Thread(target=saver.pause, daemon=True).start()
        KEPT[-1].tms_sim_wait_until_synchronizing()
    elif state == "graph":
        source, graph = tensor(), torch.cuda.CUDAGraph()
        with saver.cuda_graph(graph, tag="graph", enable_cpu_backup=True):
            result = source + 1
        saver.pause("graph")
        KEPT.extend([source, graph, result])
    elif state == "forked":
        saver.pause(("kv_cache", "weights"))
        region = saver.region(tag="weights")
        region.__enter__()
        KEPT.append(region)
        in_child(use_after_fork)
        region.__exit__(None, None, None)
        saver.resume()
        assert [int(kept.max()) for kept in KEPT[:2]] == [1, 1]
    else:
        assert state == "active", state


def end(how: str) -> None:
    if how == "exception":
        raise KeyError("missing")
    if how == "_exit":
        os._exit(4)
    if how != "fall_off":
        sys.exit(3 if how == "exit_3" else "the program's own words")


reach(STATE)
end(ENDING)
