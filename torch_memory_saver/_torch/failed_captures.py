"""Cleans up after a capture that CUDA has invalidated, for instance because the program waited for the device in it.

``torch.cuda.graph`` then fails in its exit, before it has restored everything (seen up to 2.14): the capture's stream
stays current, the pool stays routed and is never released, and random numbers fail with "Offset increment outside graph
capture". Does nothing where PyTorch has done it.
"""

from __future__ import annotations

from typing import Any

from torch_memory_saver._torch.layer import PoolId, TorchCuda

__all__ = ["clean_up"]

#: torch's error if a routing is ended that is not in force.
_NOT_ROUTED = "not currently recording to mempool_id"


def clean_up(torch: TorchCuda, device: int, pool: PoolId, stream: Any) -> None:
    """
    Args:
        torch: PyTorch.
        device: The device of the capture.
        pool: Its pool.
        stream: The stream that was current before.
    """
    torch.torch.cuda.set_stream(stream)
    try:
        torch.end_routing(device, pool)
    except RuntimeError as error:
        if _NOT_ROUTED not in str(error):
            raise
        return  # PyTorch has cleaned up
    torch.release_pool(device, pool)
    _end_capture_of_generator(torch.torch, device)


def _end_capture_of_generator(torch: Any, device: int) -> None:
    """The end of any capture ends that state of the device's random generator."""
    with torch.cuda.device(device):
        target, graph = torch.empty(1, device="cuda"), torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            target.zero_()  # PyTorch warns of graphs without a kernel
            graph.capture_end()
