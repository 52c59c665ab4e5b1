"""The benchmarks: ``python -m torch_memory_saver bench``, or ``make bench`` in the source tree.

Every case runs in a process of its own (worker.py), where it is timed in turns with what the hardware would allow: the
driver calls alone (yardstick.py), a pinned copy (driver.py), direct I/O (direct_io.py). The command (command.py) starts the
processes, puts what they measured together (figures.py) and shows it (table.py, plot.py).

The worker also times the C++ package of the same name, in a process in which `torch_memory_saver` is that one. So what it
runs in imports its neighbours relatively, and `torch_memory_saver` only where it uses it as any program would.
"""
