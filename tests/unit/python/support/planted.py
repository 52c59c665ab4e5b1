"""A program with planted memory problems, on the simulated caching allocator: what a comparison must tell apart."""

from __future__ import annotations

from collections.abc import Callable

from caching_allocator import KIB, MIB, CachingAllocator, Call

TORCH = "/opt/env/lib/python3.11/site-packages/torch"
MAIN: Call = ("/srv/engine/main.py", 10, "main")
WEIGHTS: Call = ("/srv/engine/model.py", 21, "load_weights")
LEAK: Call = ("/srv/engine/images.py", 88, "to_gpu")
ADAM: tuple[Call, ...] = ((f"{TORCH}/optim/adam.py", 182, "_init_group"), ("/srv/trainer/step.py", 33, "optimizer_step"))
CACHE: Call = ("/srv/engine/kv_cache.py", 40, "remember")
BURST: Call = ("/srv/engine/batch.py", 5, "decode_batch")
KEPT: Call = ("/srv/engine/batch.py", 9, "keep_header")
OFFLOADED: Call = ("/srv/trainer/step.py", 60, "load_optimizer")

#: Blocks a step.
LEAKED_BLOCKS, LEAKED_BYTES = 6, 200 * KIB
CACHE_LIMIT = 2
HELD_SEGMENTS, KEPT_BYTES = 12, 3 * MIB // 2


class Program:
    """Steps of a program; each argument plants one problem.

    Args:
        leak: Small blocks stay each step, between large ones that do not.
        adam: The optimizer's state is made in the second step.
        cache: A cache grows for two steps, and is full then.
        fragmentation: In the first step, small blocks stay between large ones that do not.
        bursts: Each step takes more for a moment than the one before.
        offloaded: Large blocks are freed and allocated anew each step, after what leaks.
    """

    def __init__(
        self,
        *,
        leak: bool = False,
        adam: bool = False,
        cache: bool = False,
        fragmentation: bool = False,
        bursts: bool = False,
        offloaded: bool = False,
        allocator: CachingAllocator | None = None,
    ) -> None:
        self.allocator = allocator or CachingAllocator()
        planted = [
            (fragmentation, self._fragmentation),
            (leak, self._leak),
            (adam, self._adam),
            (cache, self._cache),
            (bursts, self._bursts),
            (offloaded, self._offloaded),
        ]
        self._work: list[Callable[[], None]] = [self._activations, *(work for wanted, work in planted if wanted)]
        self._step = 0
        self._offloaded_blocks: list[int] = []
        for _ in range(4):
            self.allocator.alloc(16 * MIB, WEIGHTS, MAIN)

    def step(self) -> None:
        for work in self._work:
            work()
        self._step += 1

    def _activations(self) -> None:
        temporary = [self.allocator.alloc(size * MIB, BURST, MAIN) for size in (3, 5, 12)]
        for address in temporary:
            self.allocator.free(address)

    def _leak(self) -> None:
        large = []
        for _ in range(LEAKED_BLOCKS):
            large.append(self.allocator.alloc(12 * MIB, BURST, MAIN))
            self.allocator.alloc(LEAKED_BYTES, LEAK, MAIN)
        for address in large:
            self.allocator.free(address)

    def _adam(self) -> None:
        if self._step == 1:
            for _ in range(8):
                self.allocator.alloc(16 * MIB, *ADAM, MAIN)

    def _cache(self) -> None:
        if self._step < CACHE_LIMIT:
            self.allocator.alloc(32 * MIB, CACHE, MAIN)

    def _fragmentation(self) -> None:
        """Segments of 20 MiB, each with two blocks of a burst and a small one that stays between them."""
        if self._step == 0:
            burst = []
            for _ in range(HELD_SEGMENTS):
                burst.append(self.allocator.alloc(9 * MIB, BURST, MAIN))
                self.allocator.alloc(KEPT_BYTES, KEPT, MAIN)
                burst.append(self.allocator.alloc(9 * MIB, BURST, MAIN))
            for address in burst:
                self.allocator.free(address)

    def _bursts(self) -> None:
        """Each step needs more memory for a moment, and all of it at once."""
        self.allocator.free(self.allocator.alloc((self._step + 1) * 40 * MIB, BURST, MAIN))

    def _offloaded(self) -> None:
        for address in self._offloaded_blocks:
            self.allocator.free(address)
        self._offloaded_blocks = [self.allocator.alloc(64 * MIB, OFFLOADED, MAIN) for _ in range(2)]
