"""Guards that the simulated GPU refuses the types that CUDA lacks and the CPU has, according to PyTorch's database of
operators."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

pytest.importorskip("expecttest", reason="PyTorch's database of operators needs it")
#: Operator -> why the simulated GPU computes with types that the database denies CUDA.
ALLOWED = {
    "angle": "newer releases have halves",
    "logaddexp": "only releases before 2.11 lack complex numbers",
    "norm": "the database has no complex halves for CUDA, and a composition of operators that have them",
    "scatter_reduce": "only some reductions lack booleans",
    "torch._scaled_mm": "the types depend on the GPU",
    "torch._scaled_mm_v2": "the types depend on the GPU",
}
SAMPLES = 8


@functools.cache
def lacking() -> dict[str, tuple[Any, torch.dtype]]:
    """The entries with a type that CUDA lacks, by a label."""
    from torch.testing._internal.common_methods_invocations import op_db

    found = {}
    for info in op_db:
        for dtype in set(info.supported_dtypes("cpu")) - set(info.supported_dtypes("cuda")):
            if info.name not in ALLOWED:
                found[f"{info.name} {info.variant_test_name} {dtype}"] = (info, dtype)
    return found


def on_the_gpu(value: Any) -> Any:
    return tree_map(lambda each: each.cuda() if isinstance(each, torch.Tensor) else each, value)


def is_refused(info: Any, sample: Any) -> bool:
    try:
        info.op(on_the_gpu(sample.input), *on_the_gpu(sample.args), **on_the_gpu(sample.kwargs))
    except (RuntimeError, TypeError, ValueError):
        return True
    return False


@pytest.mark.slow  # thousands of inputs
@pytest.mark.filterwarnings("ignore")
def test_types_that_cuda_lacks_are_refused() -> None:
    """By one call at least: some operators are composed of others, which depend on the shapes."""
    computed = []
    for label, (info, dtype) in lacking().items():
        samples = list(info.sample_inputs("cpu", dtype))
        if samples and not any(is_refused(info, sample) for sample in samples[:SAMPLES]):
            computed.append(label)
    torch.cuda.synchronize()
    assert computed == []
    assert lacking()
