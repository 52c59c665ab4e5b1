"""Another thread of a test, which stays in a region."""

from __future__ import annotations

import threading

from fake_torch import FakeTorch

from torch_memory_saver.saver import TorchMemorySaver

MIB = 1 << 20


class InsideRegion:
    """A thread that stays inside a region, where it has allocated 2 MiB, until it is released or a block ends."""

    def __init__(self, saver: TorchMemorySaver, tag: str, fake_torch: FakeTorch) -> None:
        self.address = 0
        self._inside, self._leave = threading.Event(), threading.Event()

        def work() -> None:
            with saver.region(tag):
                self.address = fake_torch.allocate(2 * MIB)
                self._inside.set()
                self._leave.wait(60)

        self._thread = threading.Thread(target=work)
        self._thread.start()
        assert self._inside.wait(60)

    def leave(self) -> None:
        self._leave.set()
        self._thread.join()

    def __enter__(self) -> InsideRegion:
        return self

    def __exit__(self, *exception: object) -> None:
        self.leave()
