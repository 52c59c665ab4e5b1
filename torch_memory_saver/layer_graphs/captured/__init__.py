"""CUDA graphs of layers. All modules but ``progress`` import torch.

- ``capture`` has `capture_layers`: it makes the plan, captures, and returns `LayerGraphs`.
- ``layer`` is what the program calls in place of a module. ``passes`` has its two graphs for one slot.
- ``progress`` refuses replays that are out of turn. ``arguments`` checks a call, and ``layer_inputs`` what is captured.
- ``warm_up`` runs a layer before its capture. ``weak`` makes tensors without memory of their own. ``memory`` measures.
"""
