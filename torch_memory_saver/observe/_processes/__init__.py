"""The memory that other processes of this user hold on the GPUs: their shared pages, NVML, and requests for files.

``pages`` reads pages; ``view`` puts them and the values of NVML together as plain values; ``table`` makes lines of a view.
The last two touch nothing else. ``names`` has the names of other programs, and their widths on a terminal. ``requests`` has
a process write a file, on both sides. Nothing here imports torch or initialises CUDA.
"""
