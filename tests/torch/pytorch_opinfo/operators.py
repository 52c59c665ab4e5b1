"""The checks of operators and foreach operators.

Each check raises if the simulated GPU differs from the CPU, and returns the number of inputs it used.
"""

from __future__ import annotations

import random
import re
import unittest
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from pytorch_opinfo.entries import Unit
from pytorch_opinfo.values import (
    STATISTICS,
    UNINITIALISED,
    Different,
    compare,
    is_sticky,
    moved,
    on_host,
    raised_by,
    tolerance,
)

#: The maximum number of inputs per check, spread evenly over the entry's inputs.
SAMPLES = 8
OUT_SAMPLES = 2


def check(unit: Unit, notes: list[str]) -> int:
    """Runs the unit's check. Returns the number of inputs used."""
    if unit.check == "errors":
        return _errors(unit, notes)
    if unit.check == "backward" and not _has_backward(unit):
        return 0
    if unit.check == "inplace" and _inplace(unit.info) is None:
        return 0
    if unit.check == "out" and (not unit.info.supports_out or unit.kind == "foreach"):
        return 0
    samples = _samples(unit)
    done = 0
    for sample in samples if unit.check != "out" else _spread(samples, OUT_SAMPLES):
        done += _PER_SAMPLE[unit.check](unit, sample)
    return done


def _has_backward(unit: Unit) -> bool:
    info, dtype = unit.info, unit.dtype
    return bool(info.supports_autograd) and all(dtype in info.supported_backward_dtypes(each) for each in ("cpu", "cuda"))


def _inplace(info: Any) -> Callable[..., Any] | None:
    variant: Callable[..., Any] | None = info.inplace_variant
    return variant


def _samples(unit: Unit) -> list[Any]:
    """The inputs, on the CPU. Those of the latest entry and type are cached for the next check."""
    key = unit._replace(info=None, check="")
    if key not in _kept:
        _kept.clear()
        _kept[key] = _make_samples(unit.kind, unit.info, unit.dtype)
    return _kept[key]


_kept: dict[Unit, list[Any]] = {}


def _make_samples(kind: str, info: Any, dtype: torch.dtype) -> list[Any]:
    random.seed(0)
    torch.manual_seed(0)
    requires_grad = bool(info.supports_autograd) and dtype in info.supported_backward_dtypes("cpu")
    # For the CPU, PyTorch creates no lists that contain empty tensors among others.
    device = "cuda" if kind == "foreach" else "cpu"
    samples = list(info.sample_inputs(device, dtype, requires_grad=requires_grad))
    if info.name == "tensor_split":  # its indices are on the host for every device
        samples = [each for each in samples if not any(isinstance(value, torch.Tensor) for value in each.args)]
    if kind == "foreach":
        samples += info.sample_zero_size_inputs(device, dtype, requires_grad=requires_grad)
    for sample in _spread(samples, SAMPLES):
        sample.input, sample.args, sample.kwargs = moved((sample.input, sample.args, sample.kwargs), "cpu")
    return _spread(samples, SAMPLES)


def _spread(values: list[Any], count: int) -> list[Any]:
    return values if len(values) <= count else [values[place * len(values) // count] for place in range(count)]


def _inputs(sample: Any, device: str, requires_grad: bool = True) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    made: tuple[Any, tuple[Any, ...], dict[str, Any]] = moved(
        (sample.input, tuple(sample.args), sample.kwargs), device, requires_grad
    )
    return made


def _compare(unit: Unit, produce: Callable[[str, int], list[Any]]) -> int:
    """Compares the results. Returns 1, or 0 if the CPU refuses the input."""
    try:
        produce("cpu", 0)
    except Exception:
        return 0
    name = unit.info.name
    compare(produce, name not in UNINITIALISED, name not in STATISTICS, **tolerance(unit.info, unit.dtype))
    return 1


def _forward(unit: Unit, sample: Any) -> int:
    def produce(device: str, seed: int) -> list[Any]:
        first, others, named = _inputs(sample, device)
        torch.manual_seed(seed)
        return on_host(unit.info(first, *others, **named))

    return _compare(unit, produce)


def gradients(result: Any, inputs: Any) -> list[Any]:
    """The gradients of all results with respect to all inputs, on the host. Empty if no gradients are required."""
    results = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor) and each.requires_grad]
    leaves = [each for each in tree_leaves(inputs) if isinstance(each, torch.Tensor) and each.requires_grad]
    if not results or not leaves:
        return []
    maker = torch.Generator().manual_seed(7)
    dense = torch.complex64 if any(each.is_complex() for each in results) else torch.float32
    # Every type represents these numbers exactly.
    given = [torch.randint(-9, 9, each.shape, generator=maker).to(dense) / 4 for each in results]
    given = [
        (each if result.is_complex() else each.real).to(result.device, result.dtype)
        for each, result in zip(given, results, strict=True)
    ]
    return on_host(torch.autograd.grad(results, leaves, given, allow_unused=True))


def _backward(unit: Unit, sample: Any) -> int:
    def produce(device: str, seed: int) -> list[Any]:
        inputs = _inputs(sample, device)
        torch.manual_seed(seed)
        result = unit.info(inputs[0], *inputs[1], **inputs[2])
        return gradients(sample.output_process_fn_grad(result) if sample.output_process_fn_grad else result, inputs)

    return _compare(unit, produce)


def _run_inplace(unit: Unit, sample: Any) -> int:
    def produce(device: str, seed: int) -> list[Any]:
        first, others, named = _inputs(sample, device, requires_grad=False)
        torch.manual_seed(seed)
        result = unit.info.inplace_variant(first, *others, **named)
        return [result is first, *on_host(first)]

    return _compare(unit, produce)


def _noncontiguous(unit: Unit, sample: Any) -> int:
    def produce(device: str, seed: int) -> list[Any]:
        on_device = type(sample)(sample.input)
        on_device.input, on_device.args, on_device.kwargs = _inputs(sample, device)
        inputs = on_device.noncontiguous()
        torch.manual_seed(seed)
        result = unit.info(inputs.input, *inputs.args, **inputs.kwargs)
        process = sample.output_process_fn_grad or (lambda each: each)
        leaves = (inputs.input, inputs.args, inputs.kwargs)
        return on_host(result) + (gradients(process(result), leaves) if _has_backward(unit) else [])

    return _compare(unit, produce)


def _out(unit: Unit, sample: Any) -> int:
    try:
        expected = unit.info(*_flat(_inputs(sample, "cpu", False)), **_inputs(sample, "cpu", False)[2])
    except Exception:
        return 0
    several = not isinstance(expected, torch.Tensor)
    if several and not (isinstance(expected, tuple) and all(isinstance(each, torch.Tensor) for each in expected)):
        return 0
    likes = list(expected) if several else [expected]
    for case in _OUT_CASES:
        _compare_out(unit, sample, case, likes, several)
    return 1


def _flat(inputs: tuple[Any, tuple[Any, ...], dict[str, Any]]) -> tuple[Any, ...]:
    return (inputs[0], *inputs[1])


def _as_expected(like: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(like)


def _with_gaps(like: torch.Tensor) -> torch.Tensor:
    return torch.zeros((*like.shape, 2), dtype=like.dtype)[..., 1]


def _of_another_size(like: torch.Tensor) -> torch.Tensor:
    return torch.zeros((*like.shape, 2), dtype=like.dtype)


def _of_another_type(like: torch.Tensor) -> torch.Tensor:
    other = torch.int32 if like.dtype.is_floating_point or like.dtype.is_complex else torch.bool
    return torch.zeros(like.shape, dtype=other)


_OUT_CASES = (_as_expected, _with_gaps, _of_another_size, _of_another_type)


def _compare_out(
    unit: Unit, sample: Any, make: Callable[[torch.Tensor], torch.Tensor], likes: list[torch.Tensor], several: bool
) -> None:
    """Compares the results for an out= from `make`. If the CPU raises an exception, the simulated GPU must raise it too."""

    def produce(device: str, seed: int) -> list[Any]:
        inputs = _inputs(sample, device, requires_grad=False)
        out = [moved(make(each.detach()), device) for each in likes]
        before = [each.data_ptr() for each in out]
        torch.manual_seed(seed)
        result = unit.info(*_flat(inputs), **inputs[2], out=tuple(out) if several else out[0])
        same = all(one is other for one, other in zip(tree_leaves(result), out, strict=False))
        kept = [each.data_ptr() for each in out] == before if make in (_as_expected, _with_gaps) else True
        return [same, kept, *on_host(out)]

    refused = raised_by(lambda: produce("cpu", 0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if refused is None:
            compare(produce, unit.info.name not in UNINITIALISED, **tolerance(unit.info, unit.dtype))
            return
        error = raised_by(lambda: produce("cuda", 0))
    expect_error(error, type(refused), "", [], make.__name__[1:].replace("_", " "))


def expect_error(error: Exception | None, kind: type[BaseException], text: str, notes: list[str], what: str) -> None:
    """Raises unless the error has this type. A message that does not match `text` only adds a note."""
    if error is None:
        raise Different(f"no {kind.__name__}: {what}")
    if is_sticky(error):
        raise error
    if not isinstance(error, kind):
        raise Different(f"{type(error).__name__} instead of {kind.__name__}: {str(error).splitlines()[0]}") from error
    if text and not re.search(text, str(error)):
        notes.append(f"{str(error).splitlines()[0]!r} where {text!r} was expected")


def _errors(unit: Unit, notes: list[str]) -> int:
    """Checks the entry's invalid inputs, once per entry: only for float32."""
    if unit.info.error_inputs_func is None or unit.dtype != torch.float32:
        return 0
    if unittest.expectedFailure in unit.info.get_decorators("TestCommon", "test_errors", "cuda", unit.dtype, {}):
        return 0  # PyTorch's own test of these errors fails on every device
    done = 0
    for wrong in unit.info.error_inputs("cuda"):
        sample = wrong.sample_input
        if not any(isinstance(each, torch.Tensor) for each in tree_leaves((sample.input, sample.args, sample.kwargs))):
            continue  # no tensor: the error does not come from a device
        error = raised_by(lambda sample=sample: unit.info(sample.input, *sample.args, **sample.kwargs))
        expect_error(error, wrong.error_type, wrong.error_regex, notes, str(wrong.error_regex))
        done += 1
    return done


_PER_SAMPLE: dict[str, Callable[[Unit, Any], int]] = {
    "forward": _forward,
    "backward": _backward,
    "inplace": _run_inplace,
    "out": _out,
    "noncontiguous": _noncontiguous,
}
