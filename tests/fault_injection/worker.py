"""Runs one scenario in this process, once for every call that it makes, with that call failing, and reports the problems.
Without `--full` the first and the last call of each function fail.

Prints one JSON object a line: {"begin": name} before an injection and {"end": name, "fired": n, "problems": [...]} after it,
so that its starter knows which one killed it; at last {"done": ...}. `fresh` scenarios run in a forked child each.

    worker.py SCENARIO --directory D [--full] [--only NAME] [--skip N M]
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import operator
import os
import shutil
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: No injection takes a second. One that takes this long hangs, and is ended with every thread's stack on stderr.
HANGS_AFTER_SECONDS = 180
#: "and every later call too": no scenario makes more.
ALWAYS = 1 << 40
#: The number of these calls depends on the speed of threads and disks: a thread that releases memory may have ended, or
#: release more; one call may report several writes that have ended.
VARYING = {"pthread_create", "syscall"}
TRIES = 20
#: In which a call of these must be made, to be one of the scenario's, if it is not the first of its function.
MORE_RUNS = 6
NOT_FIRED = "the failure did not fire"


def tell(**fields: Any) -> None:
    os.write(1, (json.dumps(fields) + "\n").encode())


class Worker:
    def __init__(self, name: str, directory: Path, full: bool) -> None:
        from all_scenarios import SCENARIOS
        from machine import Machine
        from steps import Steps

        from torch_memory_saver import _core

        self.name, self.directory, self.full = name, directory, full
        self.scenario = SCENARIOS[name]
        self.new_world = Steps
        self.machine = Machine(os.environ["TMS_CUDA_DRIVER"], [os.path.basename(_core.library_path)])
        #: What is held at rest: after the first run, which creates everything that is created once.
        self.baseline: dict[str, Any] = {}

    # ---- one injection ----

    def inject(self, faults: list[Any], again: bool) -> dict[str, Any]:
        """Runs the scenario with the faults. `again`: if the next call of the same function was not reached, it fails in a
        retry of the caller's."""
        world = self.new_world(self.machine, self.directory)
        step = self.scenario.prepare(world)
        step.keeps |= self.scenario.fresh
        outcome = world.attempt(step.run, step, faults)
        problems, fired, calls = list(outcome.problems), outcome.fired, outcome.calls
        if again and outcome.error is not None and outcome.fired == 1:
            from machine import Call, Fault

            first = faults[0]
            next_call = Fault(Call(first.call.domain, first.call.name, 0), first.code)
            outcome = world.attempt(step.run, step, [next_call])
            problems += [f"in the second try: {problem}" for problem in outcome.problems]
            fired += outcome.fired
        if faults and fired == 0:
            problems.append(NOT_FIRED)
        if outcome.error is not None or step.retry is not None:
            last = world.attempt(step.retry or step.run, step, [])
            problems += [f"in the retry, with the cause gone: {problem}" for problem in last.problems]
            if last.error is not None:
                problems.append(f"the retry, with the cause gone, failed: {last.error}")
        if step.finish:
            step.finish()
        problems += [f"at the end: {problem}" for problem in world.complete()]
        del step, outcome
        gc.collect()
        problems += self.leaks(world, {fault.call.name for fault in faults})
        return {"fired": fired, "problems": problems, "calls": [(call.domain, call.name, call.number) for call in calls]}

    def leaks(self, world: Any, failed: set[str]) -> list[str]:
        from checks import REMOVING, grew

        if failed & REMOVING:
            world.remove_objects()
        held = world.holdings()
        for path in self.directory.glob("above-*"):
            shutil.rmtree(path)
        if not self.baseline:
            self.baseline = held
        former, self.baseline = self.baseline, held  # an earlier leak is not reported again
        # Objects that are created once a process may be fewer after a failure.
        leaked = grew if self.scenario.fresh else operator.ne
        # Addresses that were never prefaulted are not retried: they cost nothing.
        ignored = {"mapped bytes"} if "munmap" in failed else set()
        ignored |= {"blocks of memory"} if world.new_tags else set()
        return [
            f"leaked: {name} is {held[name]}, was {former[name]}"
            for name in held
            if name not in ignored and leaked(former[name], held[name])
        ]

    def guarded(self, faults: list[Any], again: bool) -> dict[str, Any]:
        faulthandler.dump_traceback_later(HANGS_AFTER_SECONDS, exit=True)
        try:
            return self.inject(faults, again)
        except Exception:
            return {"fired": self.machine.fired(), "problems": [traceback.format_exc()], "calls": []}

    def forked(self, faults: list[Any], again: bool) -> dict[str, Any]:
        for path in self.directory.iterdir():
            shutil.rmtree(path)
        shutil.rmtree(os.environ["TMS_SHARED_DIR"], ignore_errors=True)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            result = self.guarded(faults, again) | {"baseline": self.baseline}
            with os.fdopen(write, "w") as pipe:
                json.dump(result, pipe)
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            text = pipe.read()
        _, status = os.waitpid(child, 0)
        if status or not text:
            return {"fired": 0, "problems": [f"the process died with wait status {status}"], "calls": []}
        result: dict[str, Any] = json.loads(text)
        self.baseline = self.baseline or result["baseline"]
        return result

    def one(self, faults: list[Any], again: bool = False) -> dict[str, Any]:
        """Another run, if the call that was to fail is not always made and was not made this time; or if its failure was not
        reported, because a thread of an earlier run met it. A failure that is never reported is so in each run."""
        from checks import UNREPORTED

        for _ in range(TRIES):
            result = self.forked(faults, again) if self.scenario.fresh else self.guarded(faults, again)
            varies = result["problems"] == [NOT_FIRED] and faults[0].call.name in VARYING
            if not varies and result["problems"] != [UNREPORTED]:
                break
        return result

    # ---- all of them ----

    def count(self) -> list[Any]:
        """The calls that the scenario makes when nothing fails, which must be the same each time."""
        from machine import Call

        from torch_memory_saver import _core

        if not self.scenario.fresh:
            self.start()
        gc.collect()
        gc.freeze()  # each injection collects, and need not look at all modules every time
        runs = [self.one([]) for _ in range(3)]
        if not self.scenario.fresh:
            self.baseline = {}
            runs = [self.one([]) for _ in range(2)]
        if any(name in VARYING and number > 0 for run in runs for _, name, number in run["calls"]):
            # The call to fail has to be made nearly always, or none of the runs may reach it.
            runs += [self.one([]) for _ in range(MORE_RUNS)]
        problems = [problem for run in runs for problem in run["problems"]]
        made = [set(map(tuple, run["calls"])) for run in runs]
        always = set.intersection(*made)
        differing = {call[1] for call in set.union(*made) - always} - VARYING
        if differing:
            problems.append(f"it makes other calls each time: {sorted(differing)} in {[run['calls'] for run in runs]}")
        calls = [Call(*call) for call in runs[0]["calls"] if tuple(call) in always]
        tell(problems=problems, library=os.path.basename(_core.library_path))
        return calls

    def start(self) -> None:
        """As PyTorch leaves a thread: device 0 current; device 1 in use."""
        from torch_memory_saver import errors

        assert errors.make_error
        self.machine.push(self.machine.retain(0))
        self.machine.retain(1)

    def plan(self, points: list[Any]) -> Iterator[tuple[str, list[Any], bool]]:
        from machine import Fault

        twice = points if self.full else self.firsts(points)
        for call in points:
            for code in call.codes() if self.full else call.codes()[:1]:
                yield f"{Fault(call, code)}", [Fault(call, code)], False
            if call in twice:
                yield f"{Fault(call, call.codes()[0], 2)}", [Fault(call, call.codes()[0], 2)], True
        if not self.full:
            return
        for number, call in enumerate(points):
            # From here on everything fails, each function in its own way.
            seen = {(one.domain, one.name) for one in points}
            before = {key: sum((one.domain, one.name) == key for one in points[:number]) for key in seen}
            rest = [Fault(type(call)(*key, before[key]), type(call)(*key, 0).codes()[0], ALWAYS) for key in sorted(seen)]
            first = Fault(call, call.codes()[0], ALWAYS)
            yield f"{call}...", [first, *(fault for fault in rest if fault.call != call)], False

    @staticmethod
    def firsts(points: list[Any]) -> set[Any]:
        """The first call of each function. All calls of a function are undone in the same way."""
        return {*{(call.domain, call.name): call for call in reversed(points)}.values()}

    @classmethod
    def ends(cls, points: list[Any]) -> set[Any]:
        """The first and the last call of each function. Without `full` only these fail. With failing undo calls after every
        call, a scenario of 300 calls would take ten minutes."""
        last = {(call.domain, call.name): call for call in points}
        return {*cls.firsts(points), *last.values()}

    def undo(self, fault: Any, calls: list[Any]) -> Iterator[tuple[str, list[Any], bool]]:
        """Calls after a failure that fail as well: of each function the first call."""
        from machine import Call, Fault

        made = [Call(*call) for call in calls]
        if fault.call not in made:
            return
        after = made[made.index(fault.call) + 1 :]
        firsts = {(call.domain, call.name): call for call in reversed(after)}
        for call in firsts.values():
            if (call.domain, call.name) != (fault.call.domain, fault.call.name):
                second = Fault(call, call.codes()[0])
                yield f"{fault} then {second}", [fault, second], False

    def run(self, only: str | None, skip: tuple[int, int]) -> None:
        points = self.count()
        ends = self.ends(points)
        if not self.full:
            points = [call for call in points if call in ends]

        def each(number: tuple[int, int], name: str, faults: list[Any], again: bool) -> dict[str, Any]:
            if only is not None and name != only:
                return {}
            if number <= skip:
                # Its calls show what is done after it: it is repeated, unless all of that is skipped as well.
                return self.one(faults, again) if number[0] == skip[0] and skip[1] > 0 and number[1] == 0 else {}
            tell(begin=name, number=number)
            result = self.one(faults, again)
            tell(end=name, fired=result["fired"], problems=result["problems"])
            if result["problems"] and not self.scenario.fresh:
                # What this one left behind must not be blamed on the next ones: a new process continues.
                tell(restart=number)
                sys.exit(0)
            return result

        for number, (name, faults, again) in enumerate(self.plan(points), 1):
            result = each((number, 0), name, faults, again)
            single = len(faults) == 1 and faults[0].times == 1 and faults[0].code == faults[0].call.codes()[0]
            if self.full and single and result and faults[0].call in ends:
                for second, undo in enumerate(self.undo(faults[0], result["calls"]), 1):
                    each((number, second), *undo)
        tell(done=True, points=[str(call) for call in points])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("scenario")
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--only")
    parser.add_argument("--skip", type=int, nargs=2, default=(0, 0), help="the last injection that is done already")
    arguments = parser.parse_args()
    sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "shared"))
    Worker(arguments.scenario, arguments.directory, arguments.full).run(arguments.only, tuple(arguments.skip))


if __name__ == "__main__":
    main()
