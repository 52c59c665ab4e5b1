"""The benchmarks: ``python -m torch_memory_saver bench``, or ``make bench`` in the source tree.

Each case runs in a process of its own (worker.py). It is timed in turns with the limit that the hardware sets: the driver
calls alone (yardstick.py), a pinned copy (driver.py), or direct I/O (direct_io.py). The command (command.py) starts the
processes, merges their results (figures.py) and shows them (table.py, plot.py).

The worker also times the C++ package of the same name. In that process `torch_memory_saver` is the C++ package. So the
modules that the worker loads import their neighbours relatively. They import `torch_memory_saver` only to use it as any
program would.
"""
