"""Leaves the interpreter in a given state of torch_memory_saver, with a given exit status, and without output.

    python exit_state.py STATE STATUS

`control` does the same work without torch_memory_saver: what it prints is torch's own.
"""

from __future__ import annotations

import sys
import threading

import torch

MIB = 1 << 20
KEPT: list[object] = []  # lives until the interpreter takes its modules apart


def tensor() -> torch.Tensor:
    return torch.full((16 * MIB,), 1, dtype=torch.uint8, device="cuda")


def main(state: str) -> None:
    if state == "control":
        KEPT.append(tensor())
        return
    from torch_memory_saver import torch_memory_saver as saver

    with saver.region(tag="weights", enable_cpu_backup=True):
        KEPT.append(tensor())
    with saver.region(tag="kv_cache"):
        KEPT.append(tensor())
    torch.cuda.synchronize()
    if state == "active":
        return
    if state == "paused":
        saver.pause()
        KEPT.append(saver.get_cpu_backup(KEPT[0], zero_copy=True))  # type: ignore[arg-type]
        return
    if state == "inside_region":
        region = saver.region(tag="weights")
        region.__enter__()
        KEPT.extend([region, tensor()])
        return
    if state == "inside_paused_region":
        region = saver.region(tag="weights")
        region.__enter__()
        saver.pause("weights")
        KEPT.extend([region, tensor()])
        return
    if state == "thread_in_region":
        inside = threading.Event()

        def work() -> None:
            with saver.region(tag="weights"):
                KEPT.append(tensor())
                inside.set()
                threading.Event().wait()

        threading.Thread(target=work, daemon=True).start()
        assert inside.wait(60)
        return
    if state == "graph":
        graph = torch.cuda.CUDAGraph()
        with saver.cuda_graph(graph, tag="cuda_graph"):
            KEPT.append(tensor())
        graph.replay()
        KEPT.append(graph)
        saver.pause("cuda_graph")
        return
    if state == "work_in_flight":
        torch.cuda._sleep(200_000_000)
        return
    raise SystemExit(f"no such state: {state}")


main(sys.argv[1])
print("ready", flush=True)
sys.exit(int(sys.argv[2]))
