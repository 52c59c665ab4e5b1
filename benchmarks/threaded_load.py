"""The time and the peak of memory while transformers loads a model on its own thread pool, in no region and in a region.

Both are measured in one process, in turns, after one load of each that does not count. Each load begins with empty caches.
It needs transformers and accelerate:

    python benchmarks/threaded_load.py
    python -m torch_memory_saver simulate --memory 4GiB -- python benchmarks/threaded_load.py --layers 4 --loads 2
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import statistics
import tempfile
import time

import torch

from torch_memory_saver import torch_memory_saver as saver

MIB = 1 << 20
WAYS = ("ordinary", "region")

transformers = importlib.import_module("transformers")


def load(folder: str, way: str) -> tuple[float, float]:
    """Return the seconds of one load, and the most MiB that PyTorch reserved during it."""
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.synchronize()
    began = time.perf_counter()
    with saver.region(tag="weights") if way == "region" else contextlib.nullcontext():
        model = transformers.LlamaForCausalLM.from_pretrained(folder, device_map="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    tags = {saver.tag_of(parameter) for parameter in model.parameters()}
    assert tags == ({"weights"} if way == "region" else {None}), tags
    peak = torch.cuda.max_memory_reserved() / MIB
    del model
    torch.cuda.empty_cache()
    return seconds, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16, help="of 128 MiB each at the default width (%(default)s)")
    parser.add_argument("--width", type=int, default=2048, help="the width of the model (%(default)s)")
    parser.add_argument("--loads", type=int, default=10, help="loads of each way (%(default)s)")
    parsed = parser.parse_args()
    config = transformers.LlamaConfig(
        hidden_size=parsed.width,
        intermediate_size=4 * parsed.width,
        num_hidden_layers=parsed.layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        vocab_size=32000,
        dtype="bfloat16",
    )
    figures: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
        for way in WAYS * (parsed.loads + 1):
            figures[way].append(load(folder, way))
    for way in WAYS:
        seconds = [second for second, _ in figures[way][1:]]
        peaks = [peak for _, peak in figures[way][1:]]
        print(
            f"{way:9} {statistics.median(seconds) * 1e3:8.1f} ms [{min(seconds) * 1e3:.1f}, {max(seconds) * 1e3:.1f}], "
            f"peak {statistics.median(peaks):.0f} MiB [{min(peaks):.0f}, {max(peaks):.0f}]"
        )
    ratios = [ours / theirs for (ours, _), (theirs, _) in zip(figures["region"][1:], figures["ordinary"][1:], strict=True)]
    print(f"region / ordinary: {statistics.median(ratios):.3f} [{min(ratios):.3f}, {max(ratios):.3f}]", flush=True)


if __name__ == "__main__":
    main()
