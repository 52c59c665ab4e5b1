"""CUDA graphs of layers and of whole steps. All modules but ``progress``, ``accounting`` and ``graph_nodes`` import torch.

- ``capture`` has `capture_layers`: it makes the plan, captures, and returns `LayerGraphs`.
- ``layer`` is what the program calls in place of a module. ``passes`` has its two graphs for one slot.
- ``step`` has `capture_step` and what it returns. ``step_program`` runs forward and backward of one micro-batch, and finds
  what a graph cannot contain. ``step_gradients`` takes the gradients out of the graph's memory.
- ``parts`` ends a forward behind the last part that is captured, and resumes it there. ``attributes`` has what parts set.
- ``progress`` refuses replays that are out of turn. ``arguments`` checks a call, ``layer_inputs`` what is captured, and
  ``module_state`` what must stay as it was.
- ``warm_up`` runs a layer before its capture. ``capture_context`` surrounds captures. ``weak`` makes tensors without memory
  of their own. ``memory`` measures.
- ``graph_report`` measures a plain graph, without layers; ``graph_nodes`` counts its launches. ``accounting`` computes what
  both reports say.
"""
