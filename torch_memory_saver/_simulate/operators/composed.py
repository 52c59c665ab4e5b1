"""Operators without a CPU implementation: composed of other operators here or by PyTorch's decompositions, or refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from torch_memory_saver._simulate.operators import batch_norm

__all__ = ["kernel_of"]

_Tensor: TypeAlias = torch.Tensor
_Optional: TypeAlias = torch.Tensor | None


def kernel_of(operator: Any) -> Callable[..., Any]:
    """Return the function to register as the CUDA implementation of the operator.

    Without a composition or a decomposition, this function raises NotImplementedError when called.
    """
    name = operator.name()
    if name in _COMPOSED:
        return _COMPOSED[name]

    def kernel(*arguments: Any, **keywords: Any) -> Any:
        from torch._decomp import decomposition_table  # importing it takes a second

        decomposition = decomposition_table.get(operator)
        if decomposition is None:
            raise NotImplementedError(
                f"{name} has no CPU implementation, and the simulated GPU runs those: use operators that PyTorch has for "
                "the CPU as well, or a real GPU for this one"
            )
        return decomposition(*arguments, **keywords)

    kernel.__name__ = name
    return kernel


def _gates(from_input: _Tensor, from_hidden: _Tensor, input_bias: _Optional, hidden_bias: _Optional) -> Any:
    if input_bias is None or hidden_bias is None:
        return from_input, from_hidden
    return from_input + input_bias, from_hidden + hidden_bias


def _lstm_cell(
    input_gates: _Tensor, hidden_gates: _Tensor, cx: _Tensor, input_bias: _Optional = None, hidden_bias: _Optional = None
) -> tuple[_Tensor, _Tensor, _Tensor]:
    from_input, from_hidden = _gates(input_gates, hidden_gates, input_bias, hidden_bias)
    entered, forgotten, made, shown = (from_input + from_hidden).chunk(4, 1)
    entered, forgotten, made, shown = entered.sigmoid(), forgotten.sigmoid(), made.tanh(), shown.sigmoid()
    cy = forgotten * cx + entered * made
    return shown * cy.tanh(), cy, torch.cat((entered, forgotten, made, shown), 1)


def _lstm_cell_backward(
    grad_hy: _Optional, grad_cy: _Optional, cx: _Tensor, cy: _Tensor, workspace: _Tensor, has_bias: bool
) -> tuple[_Tensor, _Tensor, _Optional]:
    entered, forgotten, made, shown = workspace.chunk(4, 1)
    hidden = torch.zeros_like(cx) if grad_hy is None else grad_hy
    bent = cy.tanh()
    cell = hidden * shown * (1 - bent * bent)
    cell = cell if grad_cy is None else cell + grad_cy
    gates = torch.cat(
        (
            cell * made * entered * (1 - entered),
            cell * cx * forgotten * (1 - forgotten),
            cell * entered * (1 - made * made),
            hidden * bent * shown * (1 - shown),
        ),
        1,
    )
    return gates, cell * forgotten, gates.sum(0) if has_bias else None


def _gru_cell(
    input_gates: _Tensor, hidden_gates: _Tensor, hx: _Tensor, input_bias: _Optional = None, hidden_bias: _Optional = None
) -> tuple[_Tensor, _Tensor]:
    from_input, from_hidden = _gates(input_gates, hidden_gates, input_bias, hidden_bias)
    input_reset, input_update, input_new = from_input.chunk(3, 1)
    hidden_reset, hidden_update, hidden_new = from_hidden.chunk(3, 1)
    reset, update = (input_reset + hidden_reset).sigmoid(), (input_update + hidden_update).sigmoid()
    new = (input_new + reset * hidden_new).tanh()
    return new + update * (hx - new), torch.cat((reset, update, new, hx, hidden_new), 1)


def _gru_cell_backward(
    grad_hy: _Tensor, workspace: _Tensor, has_bias: bool
) -> tuple[_Tensor, _Tensor, _Tensor, _Optional, _Optional]:
    reset, update, new, hx, hidden_new = workspace.chunk(5, 1)
    to_new = grad_hy * (1 - update) * (1 - new * new)
    to_update = grad_hy * (hx - new) * update * (1 - update)
    to_reset = to_new * hidden_new * reset * (1 - reset)
    of_input = torch.cat((to_reset, to_update, to_new), 1)
    of_hidden = torch.cat((to_reset, to_update, to_new * reset), 1)
    biases = (of_input.sum(0), of_hidden.sum(0)) if has_bias else (None, None)
    return of_input, of_hidden, grad_hy * update, *biases


def _product(multiply: Callable[..., _Tensor]) -> Callable[..., _Tensor]:
    """Return a matrix product, optionally added to a third matrix, with a result type wider than that of the matrices."""

    def product(*arguments: Any, beta: float = 1, alpha: float = 1, out: _Optional = None) -> _Tensor:
        *matrices, dtype = arguments
        wide = [each.to(dtype) for each in matrices]
        made = multiply(*wide, beta=beta, alpha=alpha) if len(wide) == 3 else multiply(*wide)
        return made if out is None else out.resize_(made.shape).copy_(made)

    return product


def _cudnn_convolution(
    values: _Tensor,
    weight: _Tensor,
    padding: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    benchmark: bool,
    deterministic: bool,
    allow_tf32: bool,
) -> _Tensor:
    unused = [0] * len(padding)
    return torch.ops.aten.convolution.default(values, weight, None, stride, padding, dilation, False, unused, groups)


def _cudnn_convolution_transpose(
    values: _Tensor,
    weight: _Tensor,
    padding: Sequence[int],
    output_padding: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    benchmark: bool,
    deterministic: bool,
    allow_tf32: bool,
) -> _Tensor:
    return torch.ops.aten.convolution.default(values, weight, None, stride, padding, dilation, True, output_padding, groups)


_COMPOSED: dict[str, Callable[..., Any]] = {
    **batch_norm.COMPOSED,
    # A program can ask for cuDNN by an argument although it is disabled.
    "aten::cudnn_convolution": _cudnn_convolution,
    "aten::cudnn_convolution_transpose": _cudnn_convolution_transpose,
    "aten::_thnn_fused_lstm_cell": _lstm_cell,
    "aten::_thnn_fused_lstm_cell_backward_impl": _lstm_cell_backward,
    "aten::_thnn_fused_gru_cell": _gru_cell,
    "aten::_thnn_fused_gru_cell_backward": _gru_cell_backward,
}
for _multiply in (torch.addmm, torch.baddbmm, torch.bmm, torch.mm):
    for _overload in ("dtype", "dtype_out"):
        _COMPOSED[f"aten::{_multiply.__name__}.{_overload}"] = _product(_multiply)
