"""The workspaces of cuBLAS that PyTorch keeps.

PyTorch allocates a workspace when a thread first uses cuBLAS on a stream, and keeps it for all later uses. If that is during
a capture, the workspace lies in the graph's pool. Other graphs and eager code on that stream use it too: a pause of the
graph's tag would take it away from them. So captures begin with workspaces that lie in ordinary memory.
"""

from __future__ import annotations

from typing import Any

__all__ = ["make_workspaces"]

#: The width of the matrices that are multiplied for that.
_WIDTH = 16


def make_workspaces(torch: Any, stream: Any) -> None:
    """Makes the workspaces of a stream, for this thread and, where gradients are enabled, for autograd's thread of the
    device. Call it before a capture on the stream, where this thread's allocations are not managed."""
    with torch.cuda.stream(stream):
        matrix = torch.zeros(_WIDTH, _WIDTH, device=stream.device, requires_grad=torch.is_grad_enabled())
        # The backward begins with neg(): as the first use of a device on a thread, cuBLAS would make PyTorch warn.
        product = torch.mm(matrix, matrix).neg()
        if product.requires_grad:
            torch.autograd.grad(product, matrix, torch.zeros_like(product))
