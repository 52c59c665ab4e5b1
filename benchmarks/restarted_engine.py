"""How long a process takes from its start to its weights on the GPU: adopted from the shared store, and read from a file.

One process publishes the weights and writes them to a file with safetensors. Then new processes take turns to adopt them and
to read the file, which is in the page cache. Prints a table in Markdown:

    python benchmarks/restarted_engine.py --gib 16
    python -m torch_memory_saver simulate --memory 2GiB -- python benchmarks/restarted_engine.py --gib 0.25 --rounds 1

    whole     from the start of the process to the weights on the GPU, imports and CUDA's context included
    weights   from the call of adopt() or load_file() on
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

#: The program of each process: what to do, the file, bytes, and the time at its start.
PROGRAM = """
import sys, time
import torch
from torch_memory_saver import node_store

what, file, total, started = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
sizes = [size << 20 for size in (128, 64, 64, 256, 256)]
count = max(1, total // sum(sizes)) * len(sizes)
small = max(1, sum(sizes) // total)
names = [f"layers.{index}" for index in range(count)]
weights = {
    name: torch.empty(sizes[index % len(sizes)] // small // 8, dtype=torch.int64, device="cuda")
    for index, name in enumerate(names)
    if what != "load"
}
torch.cuda.synchronize()
began = time.time()
if what == "publish":
    from safetensors.torch import save_file

    for index, tensor in enumerate(weights.values()):
        tensor.random_(generator=torch.Generator(device="cuda").manual_seed(index))
    torch.cuda.synchronize()
    began = time.time()
    node_store.publish("benchmark", weights, identity="benchmark")
    print(time.time() - began, time.time() - started)
    save_file({name: tensor.cpu() for name, tensor in weights.items()}, file)
    sys.exit()
if what == "adopt":
    adopted = node_store.adopt("benchmark", weights, identity="benchmark")
    assert adopted, adopted.reason
else:
    from safetensors.torch import load_file

    began = time.time()
    weights = load_file(file, device="cuda")
torch.cuda.synchronize()
print(time.time() - began, time.time() - started)
expected = torch.empty_like(weights["layers.1"])
expected.random_(generator=torch.Generator(device="cuda").manual_seed(1))
assert torch.equal(weights["layers.1"], expected), "other weights"
"""


def _run(what: str, file: str, total: int) -> tuple[float, float]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, what, file, str(total), str(time.time())],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    weights, whole = map(float, done.stdout.split())
    return weights, whole


def _cell(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f} [{min(seconds):.2f}, {max(seconds):.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=16, help="size of the weights (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each kind (%(default)s)")
    parser.add_argument("--folder", help="where the file is written; default: TMPDIR")
    parsed = parser.parse_args()
    total = int(parsed.gib * (1 << 30))
    os.environ["TMS_SHARED_DIR"] = tempfile.mkdtemp(prefix="tms-bench-", dir="/dev/shm")
    folder = tempfile.mkdtemp(prefix="tms-bench-", dir=parsed.folder)
    file = os.path.join(folder, "weights.safetensors")
    try:
        published, _ = _run("publish", file, total)
        size = os.path.getsize(file)
        times: dict[str, list[tuple[float, float]]] = {"load": [_run("load", file, total)], "adopt": []}
        times["load"].clear()  # the first one has filled the page cache
        for _ in range(parsed.rounds):
            for what, found in times.items():
                found.append(_run(what, file, total))
        print(f"{size / 1e9:.1f} GB, published in {published:.2f} s\n")
        print("| from | weights, s | GB/s | whole, s |\n| --- | --- | --- | --- |")
        for what, found in times.items():
            weights, whole = ([each[part] for each in found] for part in (0, 1))
            speed = size / 1e9 / statistics.median(weights)
            print(f"| {what} | {_cell(weights)} | {speed:.1f} | {_cell(whole)} |")
    finally:
        shutil.rmtree(os.environ["TMS_SHARED_DIR"])
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
