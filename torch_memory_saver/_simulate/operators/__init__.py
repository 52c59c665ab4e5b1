"""PyTorch's operators on the simulated GPU.

An operator called with CUDA tensors is described to another process, the device process, which has mapped the same
memory. It runs the operator's CPU implementation on the bytes, at the operator's turn in its stream. So a program's threads,
their locks and Python's interpreter lock are out of it: an operator needs none of them to complete, as on a GPU.

- ``install`` replaces the CUDA implementations; ``table`` chooses which, and says what is special about one.
- ``launch`` is what an operator's call does: checks, allocates the results, and enqueues the request.
- ``results`` finds out what an operator returns without running it.
- ``refusals`` is what PyTorch's meta implementations do not refuse; ``rehearsal`` finds it by running the CPU's.
- ``composed`` has those without a CPU implementation, made of others.
- ``special`` has the operators that need more than their CPU implementation; ``originals`` has PyTorch's own of a few.
- ``eager`` keeps torch.compile out of all these.
- ``wire`` is what both processes know: how a tensor is described.
- ``native`` calls the simulated GPU; ``start`` starts the device process, and ``device_process`` is what runs in it;
  ``precision`` has the operators that are computed in another type there than the CPU would.
"""
