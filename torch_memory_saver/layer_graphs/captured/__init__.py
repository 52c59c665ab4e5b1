"""CUDA graphs of layers and of whole steps.

All modules except ``progress`` and ``accounting`` import torch.

- ``capture`` has `capture_layers`, which checks its arguments, makes the plan, captures, and returns `LayerGraphs`.
- ``layer`` has `CapturedLayer`, which the program calls in place of a module. ``passes`` has the two graphs of a layer for
  one slot.
- ``step`` has `capture_step` and its result, `CapturedStep`. ``step_program`` runs forward and backward of one micro-batch,
  and refuses code that a graph cannot contain. ``step_gradients`` copies the gradients out of the graph's memory.
- ``parts`` ends a forward after the last part that is captured, and resumes it there.
- ``progress`` refuses replays that are out of order. ``arguments`` checks the arguments of a call. ``module_state`` checks
  that a module has not changed, and finds the attributes that the module's code sets.
- ``capture_context`` runs a layer before its capture, and has the context managers for captures. ``weak`` makes tensors that
  do not own their memory. ``memory`` measures memory.
- ``graph_report`` measures a plain graph, without layers. ``accounting`` computes the figures of both reports.
"""
