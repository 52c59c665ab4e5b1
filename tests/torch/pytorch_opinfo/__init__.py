"""Runs PyTorch's operator database (OpInfo) with its inputs on the simulated GPU and compares the results with the CPU.

- ``entries`` lists the entries: operators, foreach operators, optimizers, modules.
- ``values`` moves inputs between devices and compares results. ``operators`` and ``composed`` have the checks of an entry.
- ``worker`` is the program that runs checks. ``running`` starts it, and restarts it after an error that disables CUDA.
- ``report`` counts the outcomes. ``differences`` has the expected differences.

``running``, ``report`` and ``differences`` do not import torch.
"""
