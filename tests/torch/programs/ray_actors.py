"""Two Ray actors share a simulated GPU, and one of them is killed: python ray_actors.py FOLDER

Prints the scenarios that have passed. The driver has no GPU. The environment of `simulate` and that of `run --print-env`
reach the actors by Ray's `runtime_env`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import ray

from torch_memory_saver import simulate
from torch_memory_saver.errors import OutOfMemoryError

MIB = 1 << 20
DEVICE_MIB = 256
#: More than half of the device, so that only one actor fits.
SIZE = 160 * MIB
#: Longer than the death of an actor takes, however slow the machine is.
TIMEOUT_S = 100.0


def runtime_env() -> dict[str, Any]:
    """The environment of the actors: the hook library by `run --print-env`, and a simulated machine of their own."""
    command = [sys.executable, "-m", "torch_memory_saver", "run", "--preload", "--print-env", "json"]
    variables = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["env_vars"]
    base = {name: value for name, value in os.environ.items() if name in ("PATH", "PYTHONPATH", "HOME", "XDG_CACHE_HOME")}
    machine = simulate.environment(memory=f"{DEVICE_MIB}MiB", base=base | variables)
    return {"env_vars": {name: value for name, value in machine.items() if os.environ.get(name) != value}}


class Engine:
    """One process of a colocated pair, with memory that must survive its pauses."""

    def __init__(self, value: int) -> None:
        import torch

        from torch_memory_saver import torch_memory_saver as saver

        self.saver = saver
        self.value = value
        with saver.region(tag="weights", backup="host"):
            self.weights = torch.empty(SIZE, dtype=torch.uint8, device="cuda")
        self.weights.fill_(value)

    def about(self) -> dict[str, Any]:
        import torch

        devices = [torch.cuda.get_device_name(device) for device in range(torch.cuda.device_count())]
        return {
            "hook_mode": self.saver.hook_mode,
            "devices": devices,
            "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        }

    def pause(self) -> int:
        return self.saver.pause("weights").bytes

    def resume(self, timeout: float | None = None, exclusive: bool = False) -> int:
        return self.saver.resume("weights", timeout=timeout, exclusive=exclusive).bytes

    def is_whole(self) -> bool:
        return int(self.weights.min()) == int(self.weights.max()) == self.value


def start(value: int) -> Any:
    """An actor that has half of the GPU, as Ray counts it, and needs more than half of its memory."""
    return ray.remote(Engine).options(num_gpus=0.5, num_cpus=0, max_restarts=0).remote(value)


def kill(actor: Any) -> None:
    """Kill the process of an actor, and wait until Ray has noticed."""
    ray.kill(actor, no_restart=True)
    try:
        ray.get(actor.about.remote(), timeout=TIMEOUT_S)
    except ray.exceptions.RayActorError:
        return
    raise AssertionError("the actor is alive")


def killed_while_paused(survivor: Any) -> None:
    """The actor that is killed has released its memory before."""
    other = start(2)
    assert ray.get(other.is_whole.remote())
    ray.get(other.pause.remote())
    kill(other)
    assert ray.get(survivor.resume.remote(timeout=TIMEOUT_S)) == SIZE


def killed_while_resident(survivor: Any) -> None:
    """The actor that is killed has the memory and the lock of the device, for which the other one waits."""
    other = start(3)
    ray.get(other.pause.remote())
    assert ray.get(other.resume.remote(timeout=TIMEOUT_S, exclusive=True)) == SIZE
    try:
        ray.get(survivor.resume.remote())
    except OutOfMemoryError as error:
        assert f"device 0 needs {SIZE // MIB}.0 MiB and has" in str(error)
    else:
        raise AssertionError("both actors fit")
    resumed = survivor.resume.remote(timeout=TIMEOUT_S, exclusive=True)
    assert ray.wait([resumed], timeout=1.0) == ([], [resumed])
    kill(other)
    assert ray.get(resumed) == SIZE


def main() -> None:
    # Ray finds no GPU here, so the number is given.
    ray.init(
        num_cpus=2,
        num_gpus=1,
        include_dashboard=False,
        object_store_memory=80 * MIB,
        runtime_env=runtime_env(),
        _temp_dir=sys.argv[1],
        log_to_driver=False,
    )
    survivor = start(1)
    assert ray.get(survivor.about.remote()) == {"hook_mode": "preload", "devices": ["Simulated GPU"], "visible": "0"}
    for scenario in (killed_while_paused, killed_while_resident):
        assert ray.get(survivor.pause.remote()) == SIZE
        scenario(survivor)
        assert ray.get(survivor.is_whole.remote())
        print(scenario.__name__, flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
