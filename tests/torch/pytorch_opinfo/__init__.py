"""PyTorch's own database of operators, with inputs for each, run on the simulated GPU and compared with the CPU.

- ``entries`` lists what there is: operators, foreach operators, optimizers, modules.
- ``values`` moves inputs between devices and compares results; ``operators`` and ``composed`` have the checks of an entry.
- ``worker`` is the program that runs checks; ``running`` starts it, and again after an error that ends its use of CUDA.
- ``report`` counts; ``differences`` knows which are expected.

``running``, ``report`` and ``differences`` do without torch.
"""
