"""Guards that the colocated loop succeeds with a 32B model on 8 GPUs at a KV ratio of 0.9, at a 64th of the scale, and that
each component takes the memory that the model's configuration says.

It is published of this run that training succeeds when the engine wakes in stages
(https://hebiao064.github.io/rl-memory-management). Sizes of its engine are published too, for two tensor-parallel GPUs
(https://github.com/sgl-project/sglang/issues/7009): the weights' wake-up adds 30.8 GiB, and the KV cache's 94.2.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rank_processes import run_together

MIB, GIB = 1 << 20, 1 << 30
#: The largest tensor that PyTorch packs into 2 MiB.
SMALL = MIB
SCALE = 64
#: Widths are divided by it, so that matrices are by its square.
WIDTHS = 8
RANKS, ENGINE_RANKS = 8, 2
#: Of a GPU's memory, for the engine's weights and KV cache together, as SGLang's mem_fraction_static means it.
RATIO = 0.9
#: What cudaMemGetInfo reports of an H200.
H200_BYTES = int(139.8 * GIB)
#: Of the CUDA graph, whose memory is no part of the ratio; 1 to 3 GB are published.
GRAPH_BYTES = 2 * GIB

# https://huggingface.co/Qwen/Qwen2.5-32B-Instruct/raw/main/config.json. Its embeddings are not tied. Queries, keys and
# values have biases. A head's size is hidden_size / num_attention_heads.
HIDDEN_SIZE = 5120
INTERMEDIATE_SIZE = 27648
NUM_HIDDEN_LAYERS = 64
NUM_ATTENTION_HEADS = 40
NUM_KEY_VALUE_HEADS = 8
VOCAB_SIZE = 152064


def shapes(divided: int = 1) -> list[tuple[int, ...]]:
    """Of all parameters, with each width divided by a number. Widths are sizes, and not the numbers of heads and layers."""
    hidden, intermediate, words = (width // divided for width in (HIDDEN_SIZE, INTERMEDIATE_SIZE, VOCAB_SIZE))
    key = NUM_KEY_VALUE_HEADS * hidden // NUM_ATTENTION_HEADS
    attention = [(hidden, hidden), (hidden,), (key, hidden), (key,), (key, hidden), (key,), (hidden, hidden)]
    gated = [(intermediate, hidden), (intermediate, hidden), (hidden, intermediate)]
    norms = [(hidden,), (hidden,)]
    return [(words, hidden), *(attention + gated + norms) * NUM_HIDDEN_LAYERS, (hidden,), (words, hidden)]


def parameters() -> int:
    return sum(math.prod(shape) for shape in shapes())


def computed() -> dict[str, float]:
    """Bytes of each component on one GPU of 64 times the size: float32 for the trainer, bfloat16 for the engine."""
    weights = parameters() * 2 / ENGINE_RANKS
    return {
        "parameters": parameters() * 4 / RANKS,
        "gradients": parameters() * 4 / RANKS,
        "optimizer": parameters() * 8 / RANKS,
        "weights": weights,
        "kv_cache": RATIO * H200_BYTES - weights,
        "cuda_graph": GRAPH_BYTES,
    }


def most_reserved() -> dict[str, int]:
    """Bounds of physical memory at the scale of the run, from PyTorch's rounding of each tensor."""
    elements = [math.prod(shape) for shape in shapes(WIDTHS)]
    shards = [count * 4 // RANKS for count in elements]
    steps = [4] * len(elements)  # Adam counts them for each parameter
    # Norms, which have one dimension, are whole on each GPU of an engine. Biases are halves: a bound may count them whole.
    halves = [
        count * 2 // (ENGINE_RANKS if len(shape) > 1 else 1) for count, shape in zip(elements, shapes(WIDTHS), strict=True)
    ]
    return {
        "parameters": in_segments(shards),
        "gradients": in_segments(shards),
        "optimizer": in_segments([*shards, *shards, *steps]),
        "weights": in_segments(halves),
        "kv_cache": in_segments([int(computed()["kv_cache"] / SCALE)]),
        "cuda_graph": in_segments([GRAPH_BYTES // SCALE, SMALL]),  # what a decode step computes with is small
    }


def in_segments(sizes: list[int]) -> int:
    """PyTorch takes 2 MiB for tensors of up to 1 MiB and 20 MiB for those below 10 MiB, and packs them. Tensors of different
    sizes are taken to share no segment. Others have a segment each, of a multiple of 2 MiB."""
    total = 0
    for size, count in Counter(math.ceil(size / 512) * 512 for size in sizes).items():
        if size < 10 * MIB:
            segment = 2 * MIB if size <= SMALL else 20 * MIB
            total += math.ceil(count / (segment // size)) * segment
        else:
            total += count * math.ceil(size / (2 * MIB)) * 2 * MIB
    return total


def test_the_configuration_is_that_of_the_published_model() -> None:
    """Its model card says 32.5 billion parameters, 31.0 of them not in embeddings."""
    assert parameters() == pytest.approx(32.5e9, rel=0.01)
    assert parameters() - 2 * VOCAB_SIZE * HIDDEN_SIZE == pytest.approx(31.0e9, rel=0.01)
    assert computed()["weights"] / GIB == pytest.approx(30.8, rel=0.02)
    assert computed()["kv_cache"] / GIB == pytest.approx(94.2, rel=0.02)


@pytest.mark.slow
def test_training_and_rollout_in_turn(tmp_path: Path) -> None:
    machine = f"scaled-{os.getpid()}"
    try:
        ranks = run_together(
            "scaled_rank.py",
            [[str(rank), str(tmp_path / "rendezvous")] for rank in range(RANKS)],
            timeout=1100,
            TMS_SIMULATED_SHARED=machine,
            TMS_SIMULATED_DEVICES=str(RANKS),
            TMS_SIMULATED_MEMORY=str(H200_BYTES // SCALE),
            TMS_SIMULATED_NCCL_MEMORY=str(2 * MIB),
            CUBLAS_WORKSPACE_CONFIG=f":{4096 // SCALE}:8",  # 32 MiB for each thread and stream, divided
        )
    finally:  # the last process of a machine removes it by itself, unless it is killed
        Path(f"/dev/shm/tms_simulated_{machine}").unlink(missing_ok=True)
    assert [rank.status for rank in ranks] == [0] * RANKS, "".join(rank.errors for rank in ranks)
    for rank in ranks:
        expect(json.loads(rank.output.splitlines()[-1]))


def expect(rank: dict[str, Any]) -> None:
    bounds = most_reserved()
    for name, full in computed().items():
        requested, reserved = (rank["components"][name][kind] for kind in ("requested", "reserved"))
        print(
            f"{name}: computed {full / SCALE / MIB:.1f}, requested {requested / MIB:.1f}, reserved {reserved / MIB:.1f} MiB"
        )
        assert requested == pytest.approx(full / SCALE, rel=0.02), name
        assert requested <= reserved <= bounds[name], name
    assert rank["losses"] == sorted(rank["losses"], reverse=True) and len(set(rank["losses"])) == 2
    for strategy in ("kept", "one stage"):
        print(f"{strategy}: {rank[strategy]}")
        assert "are missing" in rank[strategy], strategy
    # Only the engine is there in the rollout, and only weights in the update. The rest is NCCL's and temporary memory.
    reserved = {name: component["reserved"] for name, component in rank["components"].items()}
    phases = rank["phases"]
    assert 0 <= phases["rollout"] - reserved["weights"] - reserved["kv_cache"] - reserved["cuda_graph"] <= 64 * MIB
    assert 0 <= phases["update"] - reserved["weights"] - reserved["parameters"] <= 128 * MIB
    assert max(phases.values()) <= rank["capacity"] < sum(reserved.values())
