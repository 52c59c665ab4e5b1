"""The times and the host memory of replicas that pause together, with backups of their own and with shared ones.

Each replica is a process with the same weights on the same GPU: blocks of 64 to 512 MiB, and some small ones. All of them do each
step at once. `host` and `shared` are measured in turns in the same processes. The figures of a step are those of the slowest
replica. It prints a table in Markdown, and one line of JSON with `--json`:

    python benchmarks/shared_backups.py --replicas 1,2,4 --gib 8
    python -m torch_memory_saver simulate --memory 4GiB -- python benchmarks/shared_backups.py --replicas 1,2 --gib 0.25 --rounds 2

    bytes        host memory that the backups take: of all replicas, divided by the weights of one
    first        the first pause: memory, copies and release. `shared` finds an empty folder
    unchanged    a pause of unchanged weights: `host` with host_memory="retain", `shared` with "release"
    at once      a resume directly after its pause
    resume       a resume once the objects are registered
    known        the first pause of one more process, whose weights the machine has already
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any

MIB = 1 << 20
#: Blocks of a layer of a model, MiB: attention and MLP; the rest is norms.
BLOCKS = (128, 64, 64, 256, 256)
SMALL = 8192


def _shapes(total: int) -> list[int]:
    """The sizes of the weights of one replica, bytes, about `total` of them."""
    sizes: list[int] = []
    scale = max(1, total // (4 << 30)) if total < 4 << 30 else 1
    while sum(sizes) < total:
        for block in BLOCKS:
            sizes.append(min(block * MIB // scale, total))
        sizes.append(SMALL)
        if total < 4 << 30 and sum(sizes) + sum(BLOCKS) * MIB > total:
            break
    return sizes


class Replica:
    """The work of one process; each method is a command, whose result goes back."""

    def __init__(self, total: int) -> None:
        import torch

        from torch_memory_saver import _core
        from torch_memory_saver import torch_memory_saver as saver

        self.torch, self.core, self.saver = torch, _core, saver
        self.total = total
        self.weights: list[Any] = []

    def make(self, kind: str, policy: str) -> int:
        generator = self.torch.Generator(device="cuda")
        with self.saver.region("weights", backup=kind, host_memory=policy):  # type: ignore[arg-type]
            for size in _shapes(self.total):
                self.weights.append(self.torch.empty(size // 8, dtype=self.torch.int64, device="cuda"))
        for number, tensor in enumerate(self.weights):
            generator.manual_seed(number)
            tensor.random_(generator=generator)
        self.torch.cuda.synchronize()
        return sum(tensor.nbytes for tensor in self.weights)

    def free(self) -> None:
        self.weights.clear()
        self.torch.cuda.empty_cache()
        self.saver.release_host_memory()

    def pause(self) -> tuple[float, int]:
        began = time.perf_counter()
        report = self.saver.pause("weights")
        return time.perf_counter() - began, report.copied_bytes

    def resume(self) -> float:
        began = time.perf_counter()
        self.saver.resume("weights")
        self.torch.cuda.synchronize()
        return time.perf_counter() - began

    def host_bytes(self) -> tuple[int, int]:
        counters = self.core.counters()
        return counters["host_backup_bytes"], counters["shared_backup_bytes"]

    def rest(self, seconds: float) -> None:
        time.sleep(seconds)

    def check(self) -> bool:
        generator = self.torch.Generator(device="cuda")
        for number, tensor in enumerate(self.weights):
            generator.manual_seed(number)
            if not self.torch.equal(tensor, self.torch.empty_like(tensor).random_(generator=generator)):
                return False
        return True


def _serve(connection: Connection, total: int) -> None:
    replica = Replica(total)
    connection.send(None)
    while (command := connection.recv()) is not None:
        name, *arguments = command
        connection.send(getattr(replica, name)(*arguments))


class Crowd:
    """Replicas that do each command together."""

    def __init__(self, number: int, total: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.ends: list[Connection] = []
        self.processes = []
        for _ in range(number):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, total), daemon=True)
            process.start()
            there.close()  # so that a process that ends is noticed
            self.ends.append(here)
            self.processes.append(process)
        for end in self.ends:
            end.recv()

    def do(self, *command: object) -> list[Any]:
        for end in self.ends:
            end.send(command)
        return [end.recv() for end in self.ends]

    def end(self) -> None:
        for end in self.ends:
            end.send(None)
        for process in self.processes:
            process.join()


def _folder_bytes() -> int:
    folder = os.path.join(os.environ["TMS_SHARED_DIR"], "objects")
    return sum(entry.stat().st_size for entry in os.scandir(folder)) if os.path.isdir(folder) else 0


def _measure(number: int, total: int, rounds: int, rest: float) -> dict[str, Any]:
    times: dict[str, dict[str, list[float]]] = {"host": {}, "shared": {}}
    taken: dict[str, float] = {}
    for _ in range(rounds):
        for kind in ("host", "shared"):
            here = times[kind]
            crowd = Crowd(number, total)
            size = crowd.do("make", kind, "retain" if kind == "host" else "release")[0]
            here.setdefault("first", []).append(max(seconds for seconds, _ in crowd.do("pause")))
            private = sum(own for own, _ in crowd.do("host_bytes"))
            taken[kind] = (private + (_folder_bytes() if kind == "shared" else 0)) / size
            here.setdefault("at once", []).append(max(crowd.do("resume")))
            here.setdefault("unchanged", []).append(max(seconds for seconds, _ in crowd.do("pause")))
            crowd.do("rest", rest)
            here.setdefault("resume", []).append(max(crowd.do("resume")))
            assert all(crowd.do("check")), f"{kind}: other contents after the resume"
            if kind == "shared":
                crowd.do("pause")
                late = Crowd(1, total)
                late.do("make", kind, "release")
                here.setdefault("known", []).append(late.do("pause")[0][0])
                late.end()
            crowd.end()
    return {"replicas": number, "bytes": size, "taken": taken, "times": times}


def _row(result: dict[str, Any], step: str) -> str:
    cells = []
    for kind in ("host", "shared"):
        found = result["times"][kind].get(step)
        cells.append(f"{1e3 * statistics.median(found):.0f} [{1e3 * min(found):.0f}, {1e3 * max(found):.0f}]" if found else "")
    both = [result["times"][kind].get(step) for kind in ("host", "shared")]
    ratio = ""
    if all(both):
        ratios = [shared / host for host, shared in zip(*both, strict=True)]
        ratio = f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"
    return f"| {result['replicas']} | {step}, ms | {cells[0]} | {cells[1]} | {ratio} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", default="1,2,4", help="numbers of processes (%(default)s)")
    parser.add_argument("--gib", type=float, default=8, help="weights of one replica (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of each kind (%(default)s)")
    parser.add_argument("--rest", type=float, default=3, help="seconds before the resume of registered objects (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print the times as well")
    parsed = parser.parse_args()
    os.environ["TMS_SHARED_DIR"] = tempfile.mkdtemp(prefix="tms-bench-", dir="/dev/shm")
    try:
        print("| replicas | step | host | shared | shared / host |\n| --- | --- | --- | --- | --- |")
        for number in map(int, parsed.replicas.split(",")):
            result = _measure(number, int(parsed.gib * (1 << 30)), parsed.rounds, parsed.rest)
            taken = result["taken"]
            print(f"| {number} | bytes | {taken['host']:.3f} | {taken['shared']:.3f} | {taken['shared'] / taken['host']:.3f} |")
            for step in ("first", "unchanged", "at once", "resume", "known"):
                print(_row(result, step), flush=True)
            if parsed.json:
                print(json.dumps(result), file=sys.stderr)
    finally:
        shutil.rmtree(os.environ["TMS_SHARED_DIR"])


if __name__ == "__main__":
    main()
