"""The times and the host memory of replicas that pause together, with backups of their own and with shared ones.

Each replica is a process with the same weights on the same GPU: blocks of 64 to 256 MiB, and small ones. All of them do each
step at once; `host` and `shared` take turns in the same processes. The figure of a step is that of the slowest replica. It
prints a table in Markdown, and with `--json` one line of JSON for each number of replicas on stderr:

    python benchmarks/shared_backups.py --replicas 1,2,4,8 --gib 8
    python -m torch_memory_saver simulate --memory 4GiB -- python benchmarks/shared_backups.py --replicas 1,2 --gib 0.25

    bytes       host memory of the backups of all replicas, divided by the weights of one
    first       the first pause: memory, copies and release; `shared` finds an empty folder
    at once     a resume directly after it
    unchanged   a pause of unchanged weights, `host` with host_memory="retain", `shared` with "release"
    resume      a resume after a rest, in which objects are registered
    known       the first pause of weights that only the other replicas have paused
    adopt       publish and then adopt the same weights: the ring alone, and a check of all contents

`--parts` adds a table of what each step consists of, in milliseconds of the slowest replica: the phases of the call
(torch_memory_saver.observe.events), and of the copies of `shared` the time of its threads, divided by their number: `files`
(to write and allocate, or to read), `device` (to wait for copies of the GPU), and `others` (waits for objects that other
processes write, at the end of the call).

`--huge` mounts a tmpfs with huge pages for the folder, which needs root. Otherwise the folder lies in /dev/shm.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

MIB = 1 << 20
#: Blocks of a layer of a model, MiB: attention and MLP; the rest is norms.
BLOCKS = (128, 64, 64, 256, 256)
SMALL = 8192
#: The most threads that copy objects for one GPU (csrc/backup/shared/ring.h).
THREADS = min(16, os.cpu_count() or 1)
#: The counters of these threads and of the wait for other processes, by the names of their parts.
COUNTERS = {
    "files": ("shared_file_nanoseconds_total", THREADS),
    "device": ("shared_copy_nanoseconds_total", THREADS),
    "others": ("shared_wait_nanoseconds_total", 1),
}
STEPS = ("first", "at once", "unchanged", "resume", "known", "adopt")
PHASES = ("turn", "synchronize", "plan", "create", "map", "copy", "unmap", "discard")


def _shapes(total: int) -> list[int]:
    """The sizes of the weights of one replica, bytes, about `total` of them."""
    sizes: list[int] = []
    scale = max(1, (4 << 30) // total) if total < 4 << 30 else 1
    while sum(sizes) < total:
        for block in BLOCKS:
            sizes.append(min(block * MIB // scale, total))
        sizes.append(SMALL)
        if total < 4 << 30 and sum(sizes) + sum(BLOCKS) * MIB // scale > total:
            break
    return sizes


class Replica:
    """The work of one process; each method is a command, whose result goes back."""

    def __init__(self, total: int) -> None:
        import torch

        from torch_memory_saver import _core, node_store
        from torch_memory_saver import torch_memory_saver as saver
        from torch_memory_saver.observe import events

        self.torch, self.core, self.saver, self.store, self.events = torch, _core, saver, node_store, events
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

    def _measure(self, call: Callable[[], object]) -> tuple[float, dict[str, float]]:
        """Seconds of a call, and the milliseconds of its parts."""
        before, numbers = self.core.counters(), {event.call for event in self.events.events().events}
        began = time.perf_counter()
        call()
        self.torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        after = self.core.counters()
        parts = {name: (after[counter] - before[counter]) / threads / 1e6 for name, (counter, threads) in COUNTERS.items()}
        for event in self.events.events().events:
            if event.kind == "phase" and event.call not in numbers:
                took = event.busy_ns or event.ended_ns - event.began_ns
                parts[event.phase] = parts.get(event.phase, 0) + took / 1e6
        return seconds, parts

    def pause(self) -> tuple[float, dict[str, float]]:
        return self._measure(lambda: self.saver.pause("weights"))

    def resume(self) -> tuple[float, dict[str, float]]:
        return self._measure(lambda: self.saver.resume("weights"))

    def _named(self) -> dict[str, Any]:
        return {str(index): tensor for index, tensor in enumerate(self.weights)}

    def publish(self) -> None:
        self.store.publish("benchmark", self._named(), identity="benchmark")

    def adopt(self) -> tuple[float, dict[str, float]]:
        found: list[Any] = []
        result = self._measure(lambda: found.append(self.store.adopt("benchmark", self._named(), identity="benchmark")))
        assert found[0], found[0].reason
        return result

    def unpublish(self) -> None:
        self.store.remove("benchmark")

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

    def do_one(self, *command: object) -> Any:
        """The first replica does it alone."""
        self.ends[0].send(command)
        return self.ends[0].recv()

    def end(self) -> None:
        for end in self.ends:
            end.send(None)
        for process in self.processes:
            process.join()


def _folder_bytes() -> int:
    folder = os.path.join(os.environ["TMS_SHARED_DIR"], "objects")
    return sum(entry.stat().st_size for entry in os.scandir(folder)) if os.path.isdir(folder) else 0


class Times:
    """The seconds of each step in each round, and the parts of the slowest replica."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.parts: dict[str, list[dict[str, float]]] = {}

    def note(self, step: str, results: list[tuple[float, dict[str, float]]]) -> None:
        seconds, parts = max(results, key=lambda result: result[0])
        self.seconds.setdefault(step, []).append(seconds)
        self.parts.setdefault(step, []).append(parts)


def _cycle(crowd: Crowd, kind: str, rest: float, times: Times) -> float:
    """Return the bytes of the backups, divided by the weights of one replica."""
    size = crowd.do("make", kind, "retain" if kind == "host" else "release")[0]
    times.note("first", crowd.do("pause"))
    times.note("at once", crowd.do("resume"))
    crowd.do("rest", rest)
    times.note("unchanged", crowd.do("pause"))
    taken = sum(private for private, _ in crowd.do("host_bytes")) + (_folder_bytes() if kind == "shared" else 0)
    crowd.do("rest", rest)
    times.note("resume", crowd.do("resume"))
    assert all(crowd.do("check")), f"{kind}: other contents after the resume"
    if kind == "shared":
        crowd.do("rest", rest)  # the registrations end
        crowd.do_one("publish")
        times.note("adopt", [crowd.do_one("adopt")])
        crowd.do_one("unpublish")
        crowd.do_one("pause")  # it ends the links of the two calls
        crowd.do_one("resume")
    if kind == "shared" and len(crowd.ends) > 1:
        crowd.do_one("free")
        crowd.do_one("make", kind, "release")
        crowd.do_one("rest", rest)
        times.note("known", [crowd.do_one("pause")])
        crowd.do_one("resume")
    crowd.do("free")
    return float(taken / size)


def _measure(number: int, total: int, rounds: int, rest: float) -> dict[str, Any]:
    times = {"host": Times(), "shared": Times()}
    crowd = Crowd(number, total)
    for _ in range(rounds):
        taken = {kind: _cycle(crowd, kind, rest, times[kind]) for kind in times}
    crowd.end()
    return {
        "replicas": number,
        "taken": taken,
        "times": {kind: found.seconds for kind, found in times.items()},
        "parts": {kind: found.parts for kind, found in times.items()},
    }


def _row(result: dict[str, Any], step: str) -> str:
    cells = []
    for kind in ("host", "shared"):
        found = result["times"][kind].get(step)
        spread = [1e3 * each(found) for each in (statistics.median, min, max)] if found else []
        cells.append("{:.0f} [{:.0f}, {:.0f}]".format(*spread) if spread else "")
    both = [result["times"][kind].get(step) for kind in ("host", "shared")]
    ratio = ""
    if all(both):
        ratios = [shared / host for host, shared in zip(*both, strict=True)]
        ratio = f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"
    return f"| {result['replicas']} | {step}, ms | {cells[0]} | {cells[1]} | {ratio} |"


def _print_parts(results: list[dict[str, Any]]) -> None:
    columns = (*PHASES, *COUNTERS)
    print(f"\n| replicas | kind | step | {' | '.join(columns)} |\n|{' --- |' * (len(columns) + 3)}")
    for result in results:
        for kind, steps in result["parts"].items():
            for step, found in steps.items():
                cells = [statistics.median(parts.get(column, 0) for parts in found) for column in columns]
                print(f"| {result['replicas']} | {kind} | {step} | {' | '.join(f'{cell:.1f}' for cell in cells)} |")


@contextlib.contextmanager
def folder(huge: bool) -> Iterator[str]:
    """Sets TMS_SHARED_DIR to a folder of its own, on a tmpfs with huge pages if `huge`."""
    parent = tempfile.mkdtemp(prefix="tms-bench-", dir="/dev/shm")
    try:
        if huge:
            subprocess.run(["mount", "-t", "tmpfs", "-o", "huge=always,mode=0700", "tmpfs", parent], check=True)
        os.environ["TMS_SHARED_DIR"] = os.path.join(parent, "store")
        yield parent
    finally:
        if huge and os.path.ismount(parent):
            subprocess.run(["umount", parent], check=True)
        shutil.rmtree(parent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", default="1,2,4", help="numbers of processes (%(default)s)")
    parser.add_argument("--gib", type=float, default=8, help="weights of one replica (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of each kind (%(default)s)")
    parser.add_argument("--rest", type=float, default=3, help="seconds, in which objects are registered (%(default)s)")
    parser.add_argument("--huge", action="store_true", help="mount the folder with huge pages")
    parser.add_argument("--parts", action="store_true", help="print the parts of each step as well")
    parser.add_argument("--json", action="store_true", help="print the times as well")
    parsed = parser.parse_args()
    results = []
    with folder(parsed.huge):
        print("| replicas | step | host | shared | shared / host |\n| --- | --- | --- | --- | --- |")
        for number in map(int, parsed.replicas.split(",")):
            result = _measure(number, int(parsed.gib * (1 << 30)), parsed.rounds, parsed.rest)
            results.append(result)
            host, shared = (result["taken"][kind] for kind in ("host", "shared"))
            print(f"| {number} | bytes | {host:.3f} | {shared:.3f} | {shared / host:.3f} |")
            for step in STEPS:
                print(_row(result, step), flush=True)
            if parsed.json:
                print(json.dumps(result), file=sys.stderr)
        if parsed.parts:
            _print_parts(results)


if __name__ == "__main__":
    main()
