"""What other processes of this user hold on the GPUs: their shared pages, NVML, and requests for files.

``pages`` reads pages, ``gpus`` NVML; ``view`` puts both together as plain values; ``table`` makes lines of a view. The last
two touch nothing else. ``names`` makes names of other programs fit for a terminal. ``requests`` has a process write a file,
and ``serving`` is the side of that process. Nothing here imports torch or initialises CUDA.
"""
