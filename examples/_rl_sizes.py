"""The sizes of rl_colocate.py: those of a published comparison with a 7B model on one GPU, or a part of them."""

from __future__ import annotations

from dataclasses import dataclass

GB = 10**9

#: Of the published run. Its KV cache had 60 to 90 GB, its CUDA graphs 1 to 3 GB, activations and logits 3 to 7 GB.
WEIGHTS_GB, KV_CACHE_GB, ACTIVATIONS_GB = 15.4, 90.0, 5.0
#: Weights, gradients and optimizer state of the trainer together.
TRAINER_GB = 48.0
#: The memory of the smallest GPU on which the published sizes are the default: an H200 has 150 GB.
FULL_SIZE_GB = 140.0

#: Qwen2.5-7B's, by its configuration.
LAYERS, HIDDEN, VOCABULARY = 28, 3584, 152_064
WORDS = HIDDEN * 2 // 8
#: An engine captures one graph for each of many batch sizes.
BATCHES = range(8, 256 + 1, 8)

#: Physical memory comes in pieces of this size, and each layer's cache is a tensor of its own.
PIECE = 2 << 20


@dataclass(frozen=True)
class Sizes:
    """Bytes of the two processes. The trainer keeps gradients of the weights' type and size; its optimizer state is the rest
    of ``trainer``.

    A layer's weights are a matrix of 16-bit numbers [rows, HIDDEN]; it is added up as 64-bit words [rows, WORDS]. Its
    KV cache is one tensor. Numbers are whole, so that every answer is exact, in whatever order they are added.
    """

    rows: int
    vocabulary: int
    kv_cache: int
    activations: int
    trainer: int

    @classmethod
    def scaled(cls, scale: float, kv_cache_gb: float | None, trainer_gb: float | None) -> Sizes:
        """The published sizes times `scale`; the KV cache and the trainer's memory as given, if they are."""
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
        """What the graphs keep: the logits of each batch size, in 32 bits. The measured pool has a little more."""
        return sum(BATCHES) * self.vocabulary * 4

    @property
    def physical_cache(self) -> int:
        """Of the KV cache, in whole pieces of physical memory."""
        return sum(-(-size // PIECE) * PIECE for size in per_layer(self.kv_cache))

    @property
    def total(self) -> int:
        return 2 * self.weights + self.kv_cache + self.graphs + self.activations + self.weights + self.optimizer

    def check(self) -> None:
        """Ends the program if the parts do not fit together."""
        if self.optimizer < LAYERS:
            raise SystemExit("the trainer's memory must hold its weights, gradients of the same size, and optimizer state")
        if self.kv_cache < self.smallest_cache:
            raise SystemExit(f"the KV cache must have {self.smallest_cache / GB:.3f} GB for the largest batch")

    @property
    def smallest_cache(self) -> int:
        """What one decode step of the largest batch writes: its hidden states, in 64 bits."""
        return LAYERS * max(BATCHES) * WORDS * 8


def per_layer(total: int) -> list[int]:
    """`total` bytes in LAYERS parts, which differ by 1 at most."""
    return [total * (layer + 1) // LAYERS - total * layer // LAYERS for layer in range(LAYERS)]
