"""PyTorch: finding it, routing its allocations to pools, graphs, live blocks, and the preparation of its pools for a pause.

A folder imports only those below it:

- ``graphs``: cuda_graph(), and the objects that PyTorch keeps and that graphs rely on;
  ``sharing``: memory that is sent to other processes;
  ``distributed``: NCCL's communicators, process groups and symmetric memory;
- ``memory``: what gives memory back at pauses, resumes, ends of regions and empty_cache(), and what lists live blocks;
- ``routing``: which pools serve which thread, as regions are entered and left;
- ``pools``: idle and retired pools, and how a pool ends;
- ``records``: what a pool, its key, a frame and a selection of tags are;
- ``binding``: PyTorch's functions;
- ``base``: steps that a signal handler cannot divide, the garbage collector, settings of regions in the native core.
"""
