"""The trainer and the engine of examples/rl_loop.py for a long time, with faults, and with the settings of `make rl-soak`.

A step is one of the example's, and everything in it is compared: the trainer's weights and moments before a pause and after
a resume, the engine's weights with the trainer's, and two rollouts of one seed with each other. In a third of the calls the
driver fails. The call must then work when it is repeated. At the end nothing may be damaged or quarantined, and what the
processes hold must not have grown since the first steps:

    python -m torch_memory_saver simulate -- python tests/torch/rl_soak.py --seconds 600
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "model"))

import rl_loop
import torch
import torch.multiprocessing as mp
from model_machine import OPERATING_SYSTEM, OUT_OF_MEMORY, Machine
from model_torch import CALLS, COPIES
from transformer import Shape, Transformer

from torch_memory_saver import _core, errors
from torch_memory_saver import torch_memory_saver as saver

#: The sizes of the example are for a GPU that does not compute on the host.
rl_loop.SHAPE = Shape(width=64, vocab_size=16, max_length=4)
rl_loop.PROMPTS, rl_loop.GROUP = 4, 8
#: Steps after which nothing may grow: by then every cache and every pool has its size.
WARM_UP = 20
#: Numbers that may be this much larger at the end: threads and descriptors of a pause that is under way, rounding.
SLACK = 4
BACKUPS = ("host", "mmap", "disk")


class Faults:
    """Failures of the driver in this process, and what this process holds."""

    def __init__(self, seed: int) -> None:
        self.machine = Machine()
        self.random = random.Random(seed)

    def during(self, call: Callable[[], object]) -> None:
        """Make the call, in a third of the cases with a failure. If it fails, make it again."""
        name = self.random.choice((*CALLS, *COPIES))
        often, code = self.random.choice((1, 2, 1000)), self.random.choice((OUT_OF_MEMORY, OPERATING_SYSTEM))
        if self.random.random() < 1 / 3:
            self.machine.fail(name, self.random.randrange(4), often, code)
        try:
            call()
        except errors.TorchMemorySaverError:
            self.machine.fail(name, 0, 0, 0)
            call()
        finally:
            self.machine.fail(name, 0, 0, 0)

    def holds(self) -> dict[str, int]:
        """What must not grow, and `rss_mib` for the report."""
        saver.pause("no tag")  # it retries the releases that have failed
        counters = _core.counters()
        device = self.machine.usage(0)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return {
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": threading.active_count(),
            "allocations": counters["allocations"],
            "backups_mib": sum(counters[f"{kind}_backup_bytes"] for kind in ("host", "disk", "shared")) >> 20,
            "damaged": counters["damaged"] + counters["quarantined_handles"] + counters["quarantined_ranges"],
            "reservations": device.reservations,
            "handles": device.handles,
            "host_mib": device.host_bytes >> 20,
            "rss_mib": pages * os.sysconf("SC_PAGE_SIZE") >> 20,
            "fired": self.machine.fired(),
        }


class Engine(rl_loop.Engine):
    """The engine of the example. Its calls may fail, and are repeated."""

    def __init__(self, cache_bytes: int, seed: int) -> None:
        self.faults = Faults(seed)
        super().__init__(cache_bytes)

    def wake(self, *tags: str) -> None:
        self.faults.during(lambda: saver.resume(tags))

    def sleep(self) -> None:
        self.faults.during(lambda: saver.pause(["weights", "kv_cache", "cuda_graph"]))

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: weight.detach().cpu() for name, weight in self.model.named_parameters()}

    def rollout(self, prompts: torch.Tensor, seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return self.answer(prompts)

    def holds(self) -> dict[str, int]:
        return self.faults.holds()


class RemoteEngine(rl_loop.RemoteEngine):
    def __init__(self, cache_bytes: int, seed: int) -> None:
        self.pool = ProcessPoolExecutor(1, mp.get_context("spawn"), self.start, (cache_bytes, seed))

    @classmethod
    def start(cls, cache_bytes: int, seed: int) -> None:  # type: ignore[override]
        rl_loop.make_reproducible()
        cls.local = Engine(cache_bytes, seed)


class Trainer:
    """The trainer of the example, one step at a time."""

    def __init__(self, engine: RemoteEngine, seed: int) -> None:
        self.engine = engine
        self.faults = Faults(seed)
        rl_loop.make_reproducible()
        with saver.region(tag="actor", backup="host", runs=False):
            self.actor = Transformer(rl_loop.SHAPE).to("cuda")
        self.optimizer = torch.optim.AdamW(self.actor.parameters(), lr=1e-3)
        self.parked = ["actor"]

    def contents(self) -> dict[str, torch.Tensor]:
        found = {name: weight.detach().cpu() for name, weight in self.actor.named_parameters()}
        for number, state in enumerate(self.optimizer.state.values()):
            found |= {f"{number}.{name}": value.cpu() for name, value in state.items()}
        return found

    def park(self) -> None:
        for tag in self.parked:
            backup = self.faults.random.choice(BACKUPS)
            self.faults.during(lambda tag=tag, backup=backup: saver.pause(tag, backup=backup, if_shared="wait", timeout=60))

    def unpark(self) -> None:
        pending = {"wait": False} if self.faults.random.random() < 0.5 else {}
        self.faults.during(lambda: getattr(saver.resume(self.parked, **pending), "wait", bool)())

    def step(self, number: int) -> None:
        engine, before = self.engine, self.contents()
        engine("wake", "weights")
        engine("load", {name: weight.detach() for name, weight in self.actor.named_parameters()})
        expect("the engine's weights", {name: before[name].bfloat16() for name in engine("weights")}, engine("weights"))
        torch.cuda.empty_cache()
        self.park()
        engine("wake", "kv_cache", "cuda_graph")
        prompts = torch.randint(rl_loop.SHAPE.vocab_size, (rl_loop.PROMPTS,))
        sequences = engine("rollout", prompts, number)
        expect("two rollouts", {"tokens": sequences}, {"tokens": engine("rollout", prompts, number)})
        engine("sleep")
        self.unpark()
        expect("the trainer's memory", before, self.contents())
        loss = rl_loop.loss_of(self.actor, sequences.cuda(), rl_loop.rewards_of(sequences).cuda())
        loss.backward()
        with saver.region(tag="optimizer", backup="host"):
            self.optimizer.step()
        self.parked = ["actor", "optimizer"]
        self.optimizer.zero_grad()
        saver.stats()
        saver.ledger()


def expect(what: str, expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> None:
    wrong = [name for name in expected if not torch.equal(expected[name], found[name])]
    assert expected.keys() == found.keys() and not wrong, f"{what}: {wrong} differ"


def main() -> None:
    parser = argparse.ArgumentParser(description="an RL loop with faults, for a long time")
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    options = parser.parse_args()
    trainer = Trainer(RemoteEngine(64 << 20, options.seed), options.seed + 1)
    print(f"seed {options.seed}, hook mode {saver.hook_mode}", flush=True)
    began, steps, warm = time.monotonic(), 0, {}
    while steps <= WARM_UP or time.monotonic() - began < options.seconds:
        trainer.step(steps)
        steps += 1
        held: dict[str, dict[str, Any]] = {"trainer": trainer.faults.holds(), "engine": trainer.engine("holds")}
        for role, numbers in held.items():
            assert numbers["damaged"] == 0, f"{role}: {numbers}"
        if steps <= WARM_UP:
            warm = {role: {name: max(n, warm.get(role, {}).get(name, 0)) for name, n in held[role].items()} for role in held}
    trainer.engine.pool.shutdown()
    for role, numbers in held.items():
        print(f"{role}: " + ", ".join(f"{name} {warm[role][name]} then {number}" for name, number in numbers.items()))
        grown = [name for name in numbers if name not in ("rss_mib", "fired") and numbers[name] > warm[role][name] + SLACK]
        assert not grown, f"{role}: {grown} grew"
    fired = sum(numbers["fired"] for numbers in held.values())
    assert fired > 0
    print(f"{steps} steps in {time.monotonic() - began:.0f} seconds, {fired} injected failures; no byte wrong, nothing grew")


if __name__ == "__main__":
    main()
