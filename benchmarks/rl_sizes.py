"""The sizes of rl_colocate.py: those of a published comparison with a 7B model on one GPU, or a fraction of them."""

from __future__ import annotations

from dataclasses import dataclass

GB = 10**9

#: Sizes of the published run. It had a KV cache of 60 to 90 GB, CUDA graphs of 1 to 3 GB, activations and logits of 3 to 7.
WEIGHTS_GB, KV_CACHE_GB, ACTIVATIONS_GB = 15.4, 90.0, 5.0
#: The weights, gradients and optimizer state of the trainer together.
TRAINER_GB = 48.0
#: The memory of the smallest GPU on which the published sizes are the default: an H200 has 150 GB.
FULL_SIZE_GB = 140.0

#: The dimensions of Qwen2.5-7B, from its configuration.
LAYERS, HIDDEN, VOCABULARY = 28, 3584, 152_064
WORDS = HIDDEN * 2 // 8
#: An engine captures one graph for each of many batch sizes.
BATCHES = range(8, 256 + 1, 8)

#: Physical memory comes in pieces of this size, and each layer's cache is a tensor of its own.
PIECE = 2 << 20


@dataclass(frozen=True)
class Sizes:
    """The sizes of the two processes, in bytes. The trainer keeps gradients of the weights' type and size, and its optimizer
    state is the rest of ``trainer``.

    A layer's weights are a matrix of 16-bit numbers [rows, HIDDEN], which is added up as 64-bit words [rows, WORDS]. A
    layer's KV cache is one tensor. All numbers are integers, so every answer is exact, whatever the order of additions.
    """

    rows: int
    vocabulary: int
    kv_cache: int
    activations: int
    trainer: int

    @classmethod
    def scaled(cls, scale: float, kv_cache_gb: float | None, trainer_gb: float | None) -> Sizes:
        """Return the published sizes times `scale`. `kv_cache_gb` and `trainer_gb`, if given, are not scaled."""
        return cls(
            rows=max(1, round(scale * WEIGHTS_GB * GB / (LAYERS * HIDDEN * 2))),
            vocabulary=max(1, round(scale * VOCABULARY)),
            kv_cache=round((scale * KV_CACHE_GB if kv_cache_gb is None else kv_cache_gb) * GB),
            activations=round(scale * ACTIVATIONS_GB * GB),
            trainer=round((scale * TRAINER_GB if trainer_gb is None else trainer_gb) * GB),
        )

    @property
    def weights(self) -> int:
        return LAYERS * self.rows * HIDDEN * 2

    @property
    def optimizer(self) -> int:
        return self.trainer - 2 * self.weights

    @property
    def graphs(self) -> int:
        """The bytes that the graphs keep: the 32-bit logits of each batch size. The measured pool is slightly larger."""
        return sum(BATCHES) * self.vocabulary * 4

    @property
    def physical_cache(self) -> int:
        """The bytes of the KV cache in whole pieces of physical memory."""
        return sum(-(-size // PIECE) * PIECE for size in per_layer(self.kv_cache))

    @property
    def total(self) -> int:
        return 2 * self.weights + self.kv_cache + self.graphs + self.activations + self.weights + self.optimizer

    def check(self) -> None:
        """End the program if the parts do not fit together."""
        if self.optimizer < LAYERS:
            raise SystemExit("the trainer's memory must hold its weights, gradients of the same size, and optimizer state")
        if self.kv_cache < self.smallest_cache:
            raise SystemExit(f"the KV cache must have {self.smallest_cache / GB:.3f} GB for the largest batch")

    @property
    def smallest_cache(self) -> int:
        """The bytes that one decode step of the largest batch writes: its hidden states, in 64 bits."""
        return LAYERS * max(BATCHES) * WORDS * 8


def per_layer(total: int) -> list[int]:
    """Divide `total` bytes into LAYERS parts, which differ by at most 1."""
    return [total * (layer + 1) // LAYERS - total * layer // LAYERS for layer in range(LAYERS)]
