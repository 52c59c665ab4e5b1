"""PyTorch's operators on the simulated GPU.

The program describes an operator call on CUDA tensors to another process, the device process, which has mapped the same
memory. The device process runs the operator's CPU implementation on these bytes when the stream reaches the operator. An
operator completes without the program's threads, their locks or Python's interpreter lock, as on a GPU.

- ``install`` replaces the CUDA implementations; torch.compile skips the new ones. ``table`` selects the operators and lists
  their peculiarities.
- ``launch`` implements an operator call: it checks the arguments, allocates the results and enqueues the request.
- ``results`` determines what an operator returns without running it.
- ``refusals`` has checks that PyTorch's meta implementations lack, and the operators that wait for the device, which a
  capture refuses. ``rehearsal`` runs the CPU implementation to find other refusals.
- ``cuda_types``, ``devices`` and ``determinism`` have what only CUDA refuses: types that its kernels lack, arguments on
  other devices, and operators that are not deterministic.
- ``composed`` implements operators without a CPU implementation in terms of other operators, ``batch_norm`` those of
  synchronised batch normalisations.
- ``sparse`` computes with sparse tensors on the host, in the program's process.
- ``special`` has operators that need more than their CPU implementation.
- ``wire`` defines the requests, which both processes use.
- ``native`` calls the simulated GPU. ``start`` starts the device process, which runs ``device_process``. ``compute`` is
  what it runs. ``precision`` lists the operators that are computed in a wider type than the CPU would.
"""
