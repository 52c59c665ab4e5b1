"""The demo: one step of reinforcement learning with a trainer and an inference engine on one GPU. It checks every claim.

It runs on the GPU through PyTorch. Without a GPU it runs on the simulated GPU, in a child process with the preload library.
There "tensors" are memory from cudaMalloc. The regions, pauses and resumes are the same public calls.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys

from torch_memory_saver import simulate, torch_memory_saver
from torch_memory_saver._cli.child_python import command_options
from torch_memory_saver._cli.machines import Buffer, GpuMachine, Machine, SimulatedMachine
from torch_memory_saver._cli.output import can_draw_blocks, draw, progress_bar
from torch_memory_saver._services import layer
from torch_memory_saver._text import binary_size
from torch_memory_saver.errors import OutOfMemoryError, TorchUnavailableError

__all__ = ["run_demo"]

#: Set in the child process that runs on the simulated GPU.
_CHILD = "TMS_DEMO_CHILD"
_SIMULATED_MEMORY = "512MiB"


class _Demo:
    """One run: the stages, the memory in use after each, and the checks."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.failures = 0
        self.stages: list[tuple[str, dict[str, int]]] = []
        self.base = machine.used_bytes()
        self.trainer_bytes = 0

    def check(self, claim: str, holds: bool) -> None:
        """Print the claim and whether it holds."""
        self.failures += not holds
        print(f"    {'ok  ' if holds else 'FAIL'}  {claim}")

    def stage(self, title: str) -> None:
        """Record the memory in use now, under the title of the stage that has just ended."""
        tags = torch_memory_saver.stats().tags
        parts = {tag: tags[tag].resident_bytes for tag in ("weights", "kv_cache") if tag in tags}
        parts["trainer"] = self.trainer_bytes
        parts["other"] = max(self.machine.used_bytes() - sum(parts.values()), 0)
        self.stages.append((title, parts))

    def in_use(self) -> int:
        """Return the bytes of the device in use, beyond those that were in use when the demo began."""
        return self.machine.used_bytes() - self.base

    def run(self) -> int:
        """Run all stages. Return the number of checks that failed."""
        machine = self.machine
        print(f"Running on {machine.name} ({binary_size(machine.total_bytes())}).\n")

        print("1. The inference engine allocates each kind of memory in a region of its own and captures a CUDA graph.")
        with torch_memory_saver.region(tag="weights", enable_cpu_backup=True):
            weights = machine.allocate(machine.weights_bytes, 11)
        with torch_memory_saver.region(tag="kv_cache"):
            cache = machine.allocate(machine.cache_bytes, 22)
        replay = machine.capture_copy(weights)
        addresses = (weights.address, cache.address)
        self.check("the graph reads what the weights hold", replay() == 11)
        self.stage("generate")
        before = self.in_use()

        print("2. Generation ends: both tags are paused. The contents of the weights are kept in host memory.")
        dropped = torch_memory_saver.pause("kv_cache")
        with progress_bar("    weights to host memory") as bar:
            kept = torch_memory_saver.pause("weights", progress=bar)
        print(f"    released {binary_size(dropped.bytes)} of kv_cache in {dropped.seconds * 1e3:.1f} ms, contents dropped")
        print(f"    released {binary_size(kept.bytes)} of weights in {kept.seconds * 1e3:.1f} ms, contents kept")
        released = machine.weights_bytes + machine.cache_bytes
        # Pinning the backup takes a little of the device's own memory, for page tables.
        self.check(f"the device has {binary_size(released)} more free memory", before - self.in_use() >= released * 0.99)
        self.check("pausing again does nothing", torch_memory_saver.pause().allocations == 0)
        self.stage("paused")

        print("3. The trainer uses that memory. Then the weights are resumed first, and it writes new values into them.")
        trainer = machine.allocate(machine.trainer_bytes, 33)
        self.trainer_bytes = machine.trainer_bytes
        self.stage("train")
        with progress_bar("    weights from host memory") as bar:
            torch_memory_saver.resume("weights", progress=bar)
        self.check("the weights are at the same address, with the same contents", self._intact(weights, addresses[0], 11))
        self.check("kv_cache is still paused", torch_memory_saver.stats().tags["kv_cache"].resident_bytes == 0)
        self.stage("wake weights")
        if machine.is_full_with_all:
            self.check("kv_cache does not fit yet, and its failed resume changes nothing", self._cannot_resume("kv_cache"))
        weights.fill(44)

        print("4. The trainer frees its memory, the cache is resumed, and the graph captured in step 1 is replayed.")
        trainer.free()
        self.trainer_bytes = 0
        torch_memory_saver.resume("kv_cache")
        cache.fill(55)
        self.check("the cache is at the same address and can be used", self._intact(cache, addresses[1], 55))
        self.check("the replayed graph reads the new weights", replay() == 44)
        self.check("as much memory is in use as before", abs(self.in_use() - before) <= machine.tolerance)
        self.stage("generate again")
        return self.failures

    def _intact(self, buffer: Buffer, address: int, value: int) -> bool:
        return buffer.address == address and buffer.holds(value)

    def _cannot_resume(self, tag: str) -> bool:
        try:
            torch_memory_saver.resume(tag)
        except OutOfMemoryError:
            usage = torch_memory_saver.stats().tags[tag]
            return usage.resident_bytes == 0 and usage.paused_bytes > 0
        return False


def run_demo(device: str, ascii_only: bool = False) -> int:
    """Run the demo and print its stages, its checks and a chart.

    Args:
        device: "gpu", "simulated", or "auto" for the GPU if PyTorch finds one.
        ascii_only: Draws the chart without Unicode characters, as it always is on a terminal that cannot show them.

    Returns:
        The exit status: 0 if every check held.
    """
    machine: Machine
    if os.environ.get(_CHILD):
        machine = SimulatedMachine()
    elif device == "simulated":
        return _run_in_child(ascii_only)
    elif device == "auto" and not GpuMachine.is_available():
        print("There is no GPU with PyTorch here.", end=" ")
        return _run_in_child(ascii_only)
    else:
        try:
            layer.require_module()
        except TorchUnavailableError as error:
            raise TorchUnavailableError(f"the demo finds no GPU: {error}; or use --device simulated") from error
        machine = GpuMachine()
    demo = _Demo(machine)
    failures = demo.run()
    print("\nMemory of the device after each stage:\n")
    chart = draw(demo.stages, machine.chart_bytes(), ascii_only or not can_draw_blocks(sys.stdout))
    print("\n".join(f"  {line}" for line in chart))
    print(f"\n{'Every check held.' if not failures else f'{failures} checks failed.'}")
    return 1 if failures else 0


def _run_in_child(ascii_only: bool) -> int:
    environment = simulate.environment_without_torch(memory=_SIMULATED_MEMORY) | {_CHILD: "1"}
    command = [sys.executable, *command_options("demo", *(["--ascii"] if ascii_only else []))]
    sys.stdout.flush()
    # Ctrl-C reaches both processes. The child ignores it, and this process kills the child, because the child may be inside
    # a call that Ctrl-C does not interrupt.
    ignore = functools.partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
    return subprocess.run(command, env=environment, check=False, preexec_fn=ignore).returncode
