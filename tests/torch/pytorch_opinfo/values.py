"""Moves inputs between devices and compares results."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

#: Computes results on a device with a seed. The returned tensors are on the host.
Produce = Callable[[str, int], list[Any]]

#: Operators whose results have undefined contents.
UNINITIALISED = frozenset(("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"))
#: CUDA returns statistics in the type of the computation, the CPU in the type of the input.
STATISTICS = frozenset(("_batch_norm_with_update", "_native_batch_norm_legit", "native_batch_norm", "native_layer_norm"))
#: The number of runs of a random operator on each device.
DRAWS = 16
#: The number of random regroupings of the draws. One false alarm is expected in 20 000 comparisons, even if the values of a
#: draw depend on each other.
REGROUPINGS = 20_000
#: At most this many values of a draw are compared.
POINTS = 512
#: Tolerance for rounding errors in float64 sums.
ROUNDING = 1e-9


class Different(Exception):
    """The simulated GPU differs from the CPU."""


class NotOnCuda(Exception):
    """PyTorch has no CUDA implementation, not even on a real GPU."""


def moved(value: Any, device: str, requires_grad: bool = True) -> Any:
    """A deep copy of the value on a device, with the same strides. Two references to one tensor become two to one copy."""
    known: dict[int, torch.Tensor] = {}

    def move(each: Any) -> Any:
        if isinstance(each, torch.Tensor):
            if id(each) not in known:
                made = _moved_tensor(each, device)
                known[id(each)] = made.requires_grad_(each.requires_grad and requires_grad)
            return known[id(each)]
        if isinstance(each, torch.device):
            return torch.device(device)
        if isinstance(each, torch.Generator):
            return torch.Generator(device).manual_seed(each.initial_seed())
        return device if isinstance(each, str) and each == "cpu" else each

    return tree_map(move, value)


def _moved_tensor(tensor: torch.Tensor, device: str) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.layout != torch.strided or tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return tensor.to(device, copy=True)
    storage = tensor.untyped_storage()
    content = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage).to(device, copy=True)
    made = torch.empty(0, dtype=tensor.dtype, device=device)
    return made.set_(content.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def on_host(value: Any) -> list[Any]:
    """The leaves of the value, with tensors copied to the host. Waits for the device, so its errors are raised here."""
    leaves = [each.detach().cpu() if isinstance(each, torch.Tensor) else each for each in tree_leaves(value)]
    torch.cuda.synchronize()
    return leaves


def tolerance(info: Any, dtype: torch.dtype) -> dict[str, float]:
    """OpInfo's tolerances as keywords of torch.testing.assert_close; empty, for its defaults, if OpInfo has none."""
    overrides = [
        decorator.d[dtype]
        for device in ("cpu", "cuda")
        for test in ("test_compare_cpu", "test_noncontiguous_samples", "test_variant_consistency_eager", "test_forward")
        for decorator in info.get_decorators("TestCommon", test, device, dtype, {})
        if isinstance(getattr(decorator, "d", None), dict) and hasattr(decorator.d.get(dtype), "rtol")
    ]
    if not overrides:
        return {}
    return {"rtol": max(each.rtol for each in overrides), "atol": max(each.atol for each in overrides)}


def compare(produce: Produce, contents: bool = True, check_dtype: bool = True, **tolerances: float) -> None:
    """Compares the results of the CPU and the simulated GPU: by value, or by distribution if they are random.

    Raises:
        Different: The results are not equal.
        Exception: `produce` raised it.
    """
    expected = produce("cpu", 0)
    actual = produce("cuda", 0)
    try:
        _equal(actual, expected, contents, check_dtype, **tolerances)
    except Different as difference:
        others = [produce("cpu", seed) for seed in (1, 2)]
        if all(_is_equal(expected, other) for other in others):
            raise difference from None
        _equal(actual, expected, False, check_dtype)
        cpu = [expected, *others, *[produce("cpu", seed) for seed in range(3, DRAWS)]]
        cuda = [actual, *[produce("cuda", seed) for seed in range(1, DRAWS)]]
        for place, leaf in enumerate(expected):
            if isinstance(leaf, torch.Tensor):
                same_distribution([draw[place] for draw in cpu], [draw[place] for draw in cuda])


def _is_equal(actual: list[Any], expected: list[Any]) -> bool:
    try:
        _equal(actual, expected, True, check_dtype=False)
    except Different:
        return False
    return True


def _equal(actual: list[Any], expected: list[Any], contents: bool, check_dtype: bool = True, **tolerances: float) -> None:
    if len(actual) != len(expected):
        raise Different(f"{len(expected)} results, and {len(actual)} on the device")
    for one, other in zip(actual, expected, strict=True):
        if not isinstance(other, torch.Tensor):
            if type(one) is not type(other) or ((one != other and one == one) and contents):
                raise Different(f"{other!r}, and {one!r} on the device")
            continue
        if not contents:
            one, other = torch.zeros_like(one), torch.zeros_like(other)
        try:
            torch.testing.assert_close(one, other, equal_nan=True, check_dtype=check_dtype, **tolerances)
        except AssertionError as error:
            raise Different(str(error)) from None


def same_distribution(cpu: list[torch.Tensor], cuda: list[torch.Tensor]) -> None:
    """Compares two sets of draws by the Kolmogorov-Smirnov distance of their distribution functions, in a permutation test.
    The limit is the largest distance over random divisions of all draws into two groups.

    Raises:
        Different: The distance exceeds the limit.
    """
    draws = [each.double().reshape(-1).nan_to_num() for each in (*cpu, *cuda)]
    if not draws[0].numel():
        return
    points = torch.cat(draws).unique()
    points = points[torch.linspace(0, len(points) - 1, min(len(points), POINTS)).long()]
    shares = torch.stack([torch.searchsorted(each.sort().values, points, right=True) / each.numel() for each in draws])
    groups = torch.ones(REGROUPINGS, len(draws), dtype=shares.dtype)
    chosen = torch.rand(groups.shape, generator=torch.Generator().manual_seed(0)).argsort(dim=1)
    groups.scatter_(1, chosen[:, : len(cpu)], -1)
    by_chance = float((groups @ shares).abs().max()) / len(cpu)
    distance = float((shares[len(cpu) :].mean(0) - shares[: len(cpu)].mean(0)).abs().max())
    if distance > by_chance + ROUNDING:
        raise Different(f"another distribution: distance {distance:.3f}, by chance at most {by_chance:.3f}")


def raised_by(action: Callable[[], Any]) -> Exception | None:
    """Runs the action and waits for the device. Returns the exception, or None."""
    try:
        on_host(action())
    except Exception as error:
        return error
    return None


def is_missing_in_pytorch(error: Exception) -> bool:
    """Whether PyTorch reports that it has no implementation for CUDA. The simulated GPU replaces implementations and removes
    none, so a real GPU would report it too."""
    return bool(re.search(r"Could not run '.*' with arguments from the '\w*CUDA' backend", str(error)))


def is_sticky(error: Exception) -> bool:
    """Whether the process can no longer use CUDA after this error."""
    return "CUDA error" in str(error) and "CUDA error: not simulated" not in str(error)
