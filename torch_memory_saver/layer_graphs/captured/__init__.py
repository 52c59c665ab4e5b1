"""CUDA graphs of layers and of whole steps. All modules but ``progress`` and ``accounting`` import torch.

- ``capture`` has `capture_layers`: it checks what it gets, makes the plan, captures, and returns `LayerGraphs`.
- ``layer`` is what the program calls in place of a module. ``passes`` has its two graphs for one slot.
- ``step`` has `capture_step` and what it returns. ``step_program`` runs forward and backward of one micro-batch, and finds
  what a graph cannot contain. ``step_gradients`` takes the gradients out of the graph's memory.
- ``parts`` ends a forward behind the last part that is captured, and resumes it there.
- ``progress`` refuses replays that are out of turn. ``arguments`` checks a call, and ``module_state`` knows what must stay
  as it was in a module, and what the module's code sets.
- ``capture_context`` runs a layer before its capture, and surrounds captures. ``weak`` makes tensors without memory of their
  own. ``memory`` measures.
- ``graph_report`` measures a plain graph, without layers. ``accounting`` computes what both reports say.
"""
