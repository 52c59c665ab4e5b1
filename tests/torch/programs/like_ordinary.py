"""Random programs that load, convert and free tensors, pause and resume: regions must hold as much as ordinary memory does.

Each program runs twice, each time in a process and on a simulated GPU of its own. The first run makes ordinary tensors and
ignores pauses, on a device that is larger than any program needs. It finds the peak of the memory that PyTorch reserves. The
second run puts the same tensors into regions. Its device has that peak and 10 % more, and ROUNDING_BYTES for each pool,
because each pool rounds its memory up to PyTorch's segments. The second run must not run out of memory, and must find the
contents that it wrote. After a pause of everything the device must hold exactly what PyTorch reserves outside regions.

    python -m torch_memory_saver simulate -- python tests/torch/programs/like_ordinary.py --programs 1000 --seed 1

A program is a list of steps. Each step belongs to a thread, and the threads take turns: while a thread is inside a region,
PyTorch returns no cached memory to any thread, which the documentation states as a limit.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import queue
import random
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch

MIB = 1 << 20
#: The memory of the first run's device.
LARGE_BYTES = 8 << 30
#: PyTorch's segments: 20 MiB for blocks of 1 to 10 MiB, and 2 MiB for smaller ones.
ROUNDING_BYTES = 22 * MIB
#: The most that a program keeps.
MAX_LIVE_BYTES = 640 * MIB
TAGS = ("weights", "kv_cache", "optimizer")
BACKUPS = {"weights": "host", "kv_cache": None, "optimizer": "host"}
THREADS = 3


@dataclasses.dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        kind: The name of a method of Run.
        thread: The number of the thread that performs it.
        tag: The tag of its region; None is ordinary memory.
        sizes: The bytes of its tensors.
        choice: A number from which the step derives what else it has to choose.
    """

    kind: str
    thread: int
    tag: str | None
    sizes: tuple[int, ...] = ()
    choice: int = 0


# Programs.


def random_size(choose: random.Random) -> int:
    """A size as models have it: biases, tables, layers."""
    low, high = choose.choice(((512, 64 << 10), (64 << 10, MIB), (MIB, 10 * MIB), (10 * MIB, 64 * MIB)))
    return choose.randint(low, high)


def layer_sizes(choose: random.Random) -> tuple[int, ...]:
    """The sizes of the tensors of some layers, which repeat as those of a model do."""
    shapes = [random_size(choose) for _ in range(choose.randint(1, 4))]
    layers = choose.choice((1, 2, 8, 16))
    sizes: list[int] = []
    for size in shapes * layers:
        if sum(sizes) + size <= MAX_LIVE_BYTES // 2:
            sizes.append(size)
    return tuple(sizes)


KINDS = ("load", "convert", "free", "scratch", "nested", "cycle", "empty", "keep_one")


def make_program(seed: int) -> list[Step]:
    """The steps of a program. Programs differ in which kinds of steps, threads and tags they prefer."""
    choose = random.Random(seed)
    weights = [choose.choice((1, 2, 8)) for _ in KINDS]
    tags = choose.sample(TAGS, choose.choice((1, 1, 2, 3)))
    threads = range(choose.choice((1, 1, 1, THREADS)))
    ordinary = choose.choice((0.1, 0.5))
    steps: list[Step] = []
    for _ in range(choose.randint(6, 60)):
        kind = choose.choices(KINDS, weights)[0]
        tag = None if choose.random() < ordinary else choose.choice(tags)
        sizes = layer_sizes(choose) if kind != "keep_one" else (random_size(choose), choose.randint(512, 2 * MIB))
        steps.append(Step(kind, choose.choice(threads), tag, sizes, choose.randrange(1 << 30)))
    return steps


def pools_of(steps: list[Step]) -> int:
    """The number of pools that a program can use at a time: one for each tag and thread, and PyTorch's own."""
    used = {(step.tag, step.thread) for step in steps if step.tag}
    used |= {(TAGS[0], step.thread) for step in steps if step.kind == "nested"}
    return len(used) + 1


# One run.


class Run:
    """The tensors of one run, by the number of the step that made them."""

    def __init__(self, regions: bool) -> None:
        self.regions = regions
        self.groups: dict[int, tuple[str | None, list[torch.Tensor]]] = {}
        self.marks: dict[int, list[int]] = {}
        self.number = 0
        if regions:
            from torch_memory_saver import torch_memory_saver

            self.saver = torch_memory_saver

    def region(self, tag: str | None) -> contextlib.AbstractContextManager[None]:
        if tag is None or not self.regions:
            return contextlib.nullcontext()
        return self.saver.region(tag=tag, enable_cpu_backup=BACKUPS[tag] == "host")

    def empty_between_layers(self) -> None:
        """The line that the documentation gives to loaders, which also empties the cache of ordinary memory."""
        if self.regions:
            self.saver.empty_cache()
        else:
            torch.cuda.empty_cache()

    def tensor(self, size: int, mark: int) -> torch.Tensor:
        made = torch.empty(size, dtype=torch.uint8, device="cuda")
        made[:256] = mark
        made[-256:] = mark
        return made

    def live_bytes(self) -> int:
        return sum(tensor.nbytes for _, tensors in self.groups.values() for tensor in tensors)

    def perform(self, step: Step) -> None:
        self.number += 1
        getattr(self, step.kind)(step)

    def keep(self, tag: str | None, tensors: list[torch.Tensor], marks: list[int]) -> None:
        self.groups[self.number] = (tag, tensors)
        self.marks[self.number] = marks

    def load(self, step: Step) -> None:
        if self.live_bytes() + sum(step.sizes) > MAX_LIVE_BYTES:
            self.free(step)
            return
        marks = [(step.choice + n) % 251 for n in range(len(step.sizes))]
        with self.region(step.tag):
            tensors = [self.tensor(size, mark) for size, mark in zip(step.sizes, marks, strict=True)]
        self.keep(step.tag, tensors, marks)

    def convert(self, step: Step) -> None:
        """Replaces the tensors of one group by larger or smaller ones, with temporary tensors, layer by layer."""
        if not self.groups:
            return
        number = sorted(self.groups)[step.choice % len(self.groups)]
        tag, tensors = self.groups[number]
        factor = (0.5, 1.0, 1.06, 1.25)[step.choice % 4]
        if self.live_bytes() > MAX_LIVE_BYTES:
            return
        with self.region(tag):
            for index in range(len(tensors)):
                old = tensors[index]
                temporary = [
                    torch.empty(max(512, old.nbytes * part // 4), dtype=torch.uint8, device="cuda") for part in (1, 2)
                ]
                tensors[index] = self.tensor(max(512, int(old.nbytes * factor)), self.marks[number][index])
                del old, temporary
                self.empty_between_layers()

    def free(self, step: Step) -> None:
        if not self.groups:
            return
        number = sorted(self.groups)[step.choice % len(self.groups)]
        _, tensors = self.groups[number]
        every = step.choice % 3 + 1
        del tensors[::every], self.marks[number][::every]
        if not tensors:
            del self.groups[number], self.marks[number]

    def scratch(self, step: Step) -> None:
        """Temporary tensors in a region, as an engine makes them while it warms up."""
        with self.region(step.tag):
            for _ in range(step.choice % 3 + 1):
                tensors = [self.tensor(size, 0) for size in step.sizes]
                del tensors

    def keep_one(self, step: Step) -> None:
        """A temporary tensor and a small one that stays, in one region."""
        temporary, kept = step.sizes
        mark = step.choice % 251
        with self.region(step.tag):
            self.tensor(temporary, 0)
            tensor = self.tensor(kept, mark)
        self.keep(step.tag, [tensor], [mark])

    def nested(self, step: Step) -> None:
        if self.live_bytes() + sum(step.sizes) > MAX_LIVE_BYTES:
            return
        marks = [(step.choice + n) % 251 for n in range(len(step.sizes))]
        half = len(step.sizes) // 2
        with self.region(step.tag):
            outer = [self.tensor(size, mark) for size, mark in zip(step.sizes[:half], marks, strict=False)]
            with self.region(TAGS[0]):
                inner = [self.tensor(size, mark) for size, mark in zip(step.sizes[half:], marks[half:], strict=True)]
        self.keep(step.tag, outer, marks[:half])
        self.number += 1
        self.keep(TAGS[0], inner, marks[half:])

    def empty(self, step: Step) -> None:
        torch.cuda.empty_cache()

    def cycle(self, step: Step) -> None:
        """Pauses one tag or all of them, makes temporary ordinary tensors, and resumes."""
        tag = None if step.choice % 3 == 0 else TAGS[step.choice % len(TAGS)]
        if self.regions:
            self.saver.pause(tag)
        if step.choice % 2:
            tensors = [self.tensor(size, 0) for size in step.sizes[:4]]
            del tensors
        if step.choice % 5 == 0:
            torch.cuda.empty_cache()
        if self.regions:
            self.saver.resume(tag)
            self.renew(tag)

    def renew(self, tag: str | None) -> None:
        """Writes what a pause without a backup has discarded."""
        for number, (of, tensors) in self.groups.items():
            if of is not None and BACKUPS[of] is None and tag in (None, of):
                for tensor, mark in zip(tensors, self.marks[number], strict=True):
                    tensor[:256] = mark
                    tensor[-256:] = mark

    def check_contents(self) -> None:
        for number, (tag, tensors) in self.groups.items():
            for tensor, mark in zip(tensors, self.marks[number], strict=True):
                wrong = int((tensor[:256] != mark).sum()) + int((tensor[-256:] != mark).sum())
                assert wrong == 0, f"a tensor of {tensor.nbytes} bytes of tag {tag} has {wrong} wrong bytes"

    def held_while_paused(self) -> tuple[int, int]:
        """The bytes of the device in use after a pause of everything, and those that PyTorch reserves outside regions."""
        from torch_memory_saver import _core

        self.saver.pause()
        ordinary = sum(
            segment["total_size"] for segment in torch.cuda.memory_snapshot() if _core.find(segment["address"]) is None
        )
        free, total = torch.cuda.mem_get_info()
        self.saver.resume()
        self.renew(None)
        return total - free, ordinary


class Threads:
    """Threads that perform steps, one step at a time."""

    def __init__(self) -> None:
        self._tasks: dict[int, queue.SimpleQueue[Callable[[], None] | None]] = {}
        self._done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def perform(self, thread: int, task: Callable[[], None]) -> None:
        if thread == 0:
            task()
            return
        if thread not in self._tasks:
            self._tasks[thread] = queue.SimpleQueue()
            started = threading.Thread(target=self._work, args=(self._tasks[thread],))
            self._threads.append(started)
            started.start()
        self._tasks[thread].put(task)
        failure = self._done.get()
        if failure is not None:
            raise failure

    def _work(self, tasks: queue.SimpleQueue[Callable[[], None] | None]) -> None:
        while (task := tasks.get()) is not None:
            try:
                task()
            except BaseException as error:
                self._done.put(error)
            else:
                self._done.put(None)
            del task

    def end(self) -> None:
        for tasks in self._tasks.values():
            tasks.put(None)
        for thread in self._threads:
            thread.join()


def run_program(seed: int, regions: bool) -> dict[str, Any]:
    """One run of a program in this process."""
    run, threads = Run(regions), Threads()
    steps = make_program(seed)
    torch.cuda.init()
    failed: str | None = None
    done = 0
    result: dict[str, Any] = {}
    try:
        for step in steps:
            threads.perform(step.thread, functools.partial(run.perform, step))
            done += 1
        run.check_contents()
        if regions:
            result["used"], result["ordinary"] = run.held_while_paused()
            run.check_contents()
    except Exception:
        failed = traceback.format_exc()
    finally:
        threads.end()
    stats = torch.cuda.memory_stats()
    result |= {
        "failed": failed,
        "step": f"{done}: {steps[min(done, len(steps) - 1)]}"[:400],
        "steps": len(steps),
        "peak": stats["reserved_bytes.all.peak"],
        "live": run.live_bytes(),
        "pools": pools_of(steps),
    }
    return result


# Two runs, each in a process and on a device of its own.


def in_child(seed: int, regions: bool, memory: int) -> dict[str, Any]:
    """Runs a program in a forked child of this process, which has imported torch and not used the device."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(read)
            os.environ["TMS_SIMULATED_MEMORY"] = str(memory)
            os.environ.pop("TMS_SIMULATED_SHARED", None)
            with os.fdopen(write, "w") as pipe:
                json.dump(run_program(seed, regions), pipe)
            status = 0
        finally:
            sys.stderr.flush()
            os._exit(status)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    assert text, f"program {seed}: the process ended with status {status}"
    result: dict[str, Any] = json.loads(text)
    return result


def compare(seed: int) -> dict[str, Any]:
    """Both runs. Returns the second one's result, with the memory of its device.

    Raises:
        AssertionError: The second run failed, or holds other memory after a pause than PyTorch's outside regions.
    """
    first = in_child(seed, False, LARGE_BYTES)
    assert first["failed"] is None, f"program {seed} fails without regions:\n{first['failed']}"
    memory = first["peak"] * 11 // 10 + ROUNDING_BYTES * first["pools"]
    memory = -(-memory // (2 * MIB)) * (2 * MIB)
    second = in_child(seed, True, memory)
    second["memory"], second["ordinary_peak"] = memory, first["peak"]
    assert second["failed"] is None, (
        f"program {seed} fails in regions on a device of {memory / MIB:.0f} MiB (without regions: peak of "
        f"{first['peak'] / MIB:.0f} MiB; {first['pools']} pools) in step {second['step']}:\n{second['failed']}"
    )
    assert second["used"] == second["ordinary"], (
        f"program {seed}: after a pause of everything the device holds {second['used']} bytes, and PyTorch reserves "
        f"{second['ordinary']} outside regions"
    )
    return second


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=100, help="number of programs")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first program")
    arguments = parser.parse_args()
    failures, peaks, steps = [], [], 0
    for seed in range(arguments.seed, arguments.seed + arguments.programs):
        try:
            result = compare(seed)
        except AssertionError as error:
            failures.append(seed)
            print(error, file=sys.stderr, flush=True)
        else:
            peaks.append(result["ordinary_peak"])
            steps += result["steps"]
    print(
        f"{arguments.programs} programs from seed {arguments.seed}: {len(failures)} failed {failures}; "
        f"{steps} steps; peaks without regions {min(peaks, default=0) / MIB:.0f} to {max(peaks, default=0) / MIB:.0f} MiB"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
