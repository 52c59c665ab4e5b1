"""The memory and the times of a training that fragments its memory, with ordinary and expandable segments, managed or not.

A transformer is trained on batches whose lengths vary. A part of each batch is kept for some steps, as in a replay buffer.
So blocks of many sizes lie between free memory. The managed settings then pause and resume four times, with backups in host
memory. Each setting runs in a process of its own, in the environment that it needs.

    python benchmarks/fragmented_training.py                       # all settings, as a table in Markdown
    python benchmarks/fragmented_training.py --setting managed     # one setting, as JSON
    python -m torch_memory_saver simulate -- python benchmarks/fragmented_training.py --small
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

GIB = 1 << 30
SETTINGS = ("ordinary", "expandable", "managed", "managed-expandable")
#: The names of the variable. Newer releases of PyTorch read the second one, and older releases only the first.
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
COLUMNS = (
    *("setting", "peak allocated GiB", "peak reserved GiB", "in use at the end GiB", "after `empty_cache` GiB"),
    *("step ms", "pause ms", "resume ms", "in use while paused GiB"),
)
#: Width, heads and feed-forward width of a layer; layers; steps; lengths of the batches; the largest product of the length
#: and the number of sequences in a batch.
SIZES = ((2048, 16, 8192), 12, 60, (256, 4096), 16384)
SMALL = ((64, 4, 128), 2, 8, (32, 256), 1024)


def measure(setting: str, small: bool) -> dict[str, Any]:
    """Train in this process, which has the environment of the setting, and return what was measured."""
    # Only the process that measures imports PyTorch.
    import torch

    layer, layers, steps, lengths, tokens = SMALL if small else SIZES
    torch.manual_seed(0)
    chooser = random.Random(0)
    managed = setting.startswith("managed")
    if managed:
        from torch_memory_saver import torch_memory_saver as saver
    torch.empty(1, device="cuda")

    def used() -> float:
        free, total = torch.cuda.mem_get_info()
        return float(total - free) / GIB

    used_before = used()
    kind = {"batch_first": True, "dropout": 0.0, "device": "cuda", "dtype": torch.bfloat16}
    model = torch.nn.Sequential(*[torch.nn.TransformerEncoderLayer(*layer, **kind) for _ in range(layers)])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    kept, times = [], []
    # The loop is in this function because each batch must live until the next one exists.
    for _ in range(steps):
        length = chooser.randrange(*lengths, 8)
        start = time.perf_counter()
        batch = torch.randn(max(1, tokens // length), length, layer[0], device="cuda", dtype=torch.bfloat16)
        loss = model(batch).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        kept.append(batch[:, : length // 8].clone())
        if len(kept) > 12:
            kept.pop(chooser.randrange(len(kept)))
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    del batch, loss
    stats = torch.cuda.memory_stats()
    result: dict[str, Any] = {"mode": setting}
    result |= {f"{name}_peak_gib": stats[f"{name}_bytes.all.peak"] / GIB for name in ("allocated", "reserved")}
    result |= {"live_gib": stats["allocated_bytes.all.current"] / GIB, "used_end_gib": used() - used_before}
    # The first steps include the start of the libraries.
    result |= {"step_ms_median": median(times[5:]), "step_ms_max": max(times[5:])}
    if managed:
        result |= pause_and_resume(saver, model, lambda: used() - used_before)
    torch.cuda.empty_cache()
    result["used_after_empty_cache_gib"] = used() - used_before
    return {key: round(value, 3) if isinstance(value, float) else value for key, value in result.items()}


def pause_and_resume(saver: Any, model: Any, used: Callable[[], float]) -> dict[str, Any]:
    """Pause and resume everything four times. Return the times, the memory in use while paused, and whether all is right."""
    import torch

    def contents() -> float:
        return float(sum(parameter.double().sum().item() for parameter in model.parameters()))

    before = contents()
    pauses, resumes, paused = [], [], []
    for _ in range(4):
        torch.cuda.synchronize()
        start = time.perf_counter()
        saver.pause()
        pauses.append(round((time.perf_counter() - start) * 1e3, 1))
        paused.append(used())
        time.sleep(1)  # The driver clears the memory meanwhile.
        start = time.perf_counter()
        saver.resume()
        torch.cuda.synchronize()
        resumes.append(round((time.perf_counter() - start) * 1e3, 1))
    return {"pause_ms": pauses, "resume_ms": resumes, "used_paused_gib": paused, "same": before == contents()}


def start_worker(setting: str, small: bool) -> dict[str, Any]:
    """Measure a setting in a process of its own. Exits with a message if the process fails."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    command = [sys.executable, os.path.abspath(__file__), "--worker", setting, *(["--small"] if small else [])]
    if setting.endswith("expandable"):
        environment |= dict.fromkeys(VARIABLES, "expandable_segments:True")
    if setting.startswith("managed"):
        environment["TMS_INIT_ENABLE_CPU_BACKUP"] = "1"
        command = [sys.executable, "-m", "torch_memory_saver", "run", "--manage", "--", *command]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"FAILED: {shlex.join(command)} ended with status {done.returncode}")
    return dict(json.loads(done.stdout))


def row(result: dict[str, Any]) -> list[str]:
    """Return a row of the table. Times of pauses and resumes are medians, with the smallest and the largest time."""
    names = "allocated_peak_gib", "reserved_peak_gib", "used_end_gib", "used_after_empty_cache_gib", "step_ms_median"
    cells = [result["mode"], *(f"{result[name]:.2f}" for name in names)]
    for times in (result.get(name) for name in ("pause_ms", "resume_ms")):
        cells.append(f"{median(times):.0f} ({min(times):.0f} - {max(times):.0f})" if times else "-")
    return [*cells, f"{max(result['used_paused_gib']):.2f}" if "used_paused_gib" in result else "-"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", choices=SETTINGS, help="measure only this setting and print JSON (default: all)")
    parser.add_argument("--small", action="store_true", help="train a small model for a few steps, for the simulated GPU")
    parser.add_argument("--worker", choices=SETTINGS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(measure(options.worker, options.small)))
    elif options.setting:
        print(json.dumps(start_worker(options.setting, options.small)))
    else:
        rows = (row(start_worker(setting, options.small)) for setting in SETTINGS)
        for cells in itertools.chain([COLUMNS, ["---"] * len(COLUMNS)], rows):
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
