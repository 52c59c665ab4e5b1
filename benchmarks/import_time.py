"""What `import torch_memory_saver` costs where torch is imported already, and where it is not, in fresh processes.

The project's limit is 30 ms, with torch imported.
"""

from __future__ import annotations

import os
import subprocess
import sys

from common import Table, arguments, samples

MEASURE = """
import time
{first}
start = time.perf_counter()
import torch_memory_saver
print((time.perf_counter() - start) * 1e3)
"""


def measure(first: str, preload: bool, repetitions: int) -> list[float]:
    """Milliseconds."""
    import torch_memory_saver

    values = []
    for _ in range(repetitions + 1):
        environment = dict(os.environ)
        if preload:
            with torch_memory_saver.configure_subprocess():
                environment = dict(os.environ)
        done = subprocess.run(
            [sys.executable, "-c", MEASURE.format(first=first)], env=environment, capture_output=True, text=True, check=True
        )
        values.append(float(done.stdout))
    return values[1:]  # the first one compiles the modules


def main() -> None:
    options = arguments(__doc__, repetitions=5).parse_args()
    table = Table("import torch_memory_saver", ("in a process", "ms", "spread"))
    for when, first, preload in (
        ("with torch imported", "import torch", False),
        ("with torch imported, preloaded", "import torch", True),
        ("without torch", "", False),
    ):
        measured = samples(measure(first, preload, options.repetitions))
        table.add((when, f"{measured.median:.2f}", measured.spread), when=when, milliseconds=measured)
    table.show(options.json)


if __name__ == "__main__":
    main()
