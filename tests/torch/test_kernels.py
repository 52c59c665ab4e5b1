"""Guards that PyTorch's elementwise kernels and reductions give the CPU's results on the simulated GPU.

Only the simulated GPU interprets kernels, and only without ``--kernels cpu``.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

SIMULATED = torch.cuda.is_available() and torch.cuda.get_device_name(0).startswith("Simulated GPU")
INTERPRETED = SIMULATED and os.environ.get("TMS_SIMULATED_KERNELS") == "error"
pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs simulate --kernels error: run 'make torch-test-kernels'")

FLOATING = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
WHOLE = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
DTYPES = [*FLOATING, *WHOLE, torch.bool]
SIZES = [1, 3, 1001, 70_003]
#: Sums are taken in another order, and in another precision, than on the CPU.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 1e-2, torch.float16: 2e-3}

Operation = Callable[..., "torch.Tensor"]


def numbers(size: int, dtype: torch.dtype, period: int = 13) -> torch.Tensor:
    """Small numbers, different from their neighbours, that every type can hold."""
    values = torch.arange(size) % period
    return (values * 0.75 - 3).to(dtype) if dtype.is_floating_point else values.to(dtype)


def not_negative(size: int, dtype: torch.dtype, period: int = 13) -> torch.Tensor:
    values = numbers(size, dtype, period)
    return values.abs() if dtype.is_floating_point else values


def check(operation: Operation, *tensors: torch.Tensor, exact: bool = True) -> None:
    """Runs the operation on the CPU and on the device; skips what the CPU refuses."""
    try:
        expected = operation(*tensors)
    except RuntimeError as error:
        pytest.skip(f"PyTorch does not do this: {error}")
    result = operation(*[tensor.cuda() for tensor in tensors])
    assert result.device.type == "cuda"
    assert result.dtype == expected.dtype
    tolerance = 0.0 if exact else TOLERANCE.get(expected.dtype, 0.0)
    torch.testing.assert_close(result.cpu(), expected, rtol=tolerance, atol=0, equal_nan=True)


def kernels_launched() -> int:
    count = ctypes.CDLL(None).tms_sim_kernels_launched
    count.restype = ctypes.c_uint64
    return int(count())


def run_program(program: str) -> str:
    """In a process of its own, since an illegal access ends a process's use of the device. Its output."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_fill(dtype: torch.dtype, size: int) -> None:
    before = kernels_launched()
    check(lambda like: torch.full((size,), 3, dtype=dtype, device=like.device), numbers(1, dtype))
    assert kernels_launched() == before + 1
    check(lambda like: torch.zeros(size, dtype=dtype, device=like.device), numbers(1, dtype))
    check(lambda like: torch.ones_like(like), numbers(size, dtype))


@pytest.mark.parametrize("source", DTYPES, ids=str)
@pytest.mark.parametrize("target", DTYPES, ids=str)
def test_conversion(source: torch.dtype, target: torch.dtype) -> None:
    values = numbers(1001, source)
    if not target.is_floating_point and source.is_floating_point:
        values = values.abs()  # below zero, uint8 differs between CPUs already
    check(lambda tensor: tensor.to(target), values)
    check(lambda tensor: tensor[:1000].view(10, 100).t().to(target), values)


def test_conversion_rounds_to_nearest() -> None:
    values = torch.linspace(-70000, 70000, 20_011, dtype=torch.float64)
    extremes = torch.tensor(
        [float("nan"), float("inf"), -float("inf"), 65519, 65520, 2.0**-24, 2.0**-25, 2.0**-26, -0.0, 1e300]
    )
    for target in (torch.float32, torch.bfloat16, torch.float16):
        check(lambda tensor, target=target: tensor.to(target), values.float())
        check(lambda tensor, target=target: tensor.to(target), extremes.float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "eq", "ne"])
def test_arithmetic(name: str, dtype: torch.dtype) -> None:
    operation = getattr(torch, name)
    first, second = numbers(1001, dtype), numbers(1001, dtype, period=7)
    try:
        operation(first, second)
    except RuntimeError as error:
        pytest.skip(f"PyTorch does not do this: {error}")
    check(operation, first, second)
    check(lambda tensor: operation(tensor, 2), first, exact=name != "div")  # by a number: times its reciprocal
    check(lambda tensor: operation(tensor[1:], 2), first, exact=name != "div")  # not aligned for vectors
    check(lambda a, b: operation(a, b[3]), first, second, exact=name != "div")  # a tensor without dimensions, on the device
    check(lambda a, b: operation(a[:1000].view(10, 100), b[:100]), first, second)  # broadcast
    check(lambda a, b: operation(a[:1000].view(10, 100)[:, 3:50], b[:470].view(10, 47)), first, second)


@pytest.mark.parametrize("other", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8], ids=str)
def test_arithmetic_of_two_types(dtype: torch.dtype, other: torch.dtype) -> None:
    first, second = not_negative(1001, dtype), not_negative(1001, other, period=7)
    check(torch.add, first, second)
    check(torch.mul, first, second)
    check(torch.eq, first, second)
    check(lambda a, b: a[:1000].view(10, 100) * b[:100], first, second)


@pytest.mark.parametrize("dtype", [*FLOATING, *WHOLE], ids=str)
def test_factors_and_whole_numbers_wrap(dtype: torch.dtype) -> None:
    first, second = numbers(1001, dtype), numbers(1001, dtype, period=7)
    check(lambda a, b: torch.add(a, b, alpha=3), first, second)
    check(lambda a: 5 - a, first)
    check(lambda a: a * 100 * 100, first)
    check(torch.abs, first)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["sum", "mean", "max", "min", "all", "any"])
def test_reductions(name: str, dtype: torch.dtype) -> None:
    for size in SIZES:
        check(lambda tensor: getattr(tensor, name)(), not_negative(size, dtype), exact=False)
    if name in ("sum", "mean"):
        values = not_negative(1000, dtype)
        for dims in (0, 1, (0, 2), (1, 2)):
            check(lambda tensor, dims=dims: getattr(tensor.view(10, 20, 5), name)(dims), values, exact=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_and_all(dtype: torch.dtype) -> None:
    first = numbers(70_003, dtype)
    second = first.cuda()
    assert torch.equal(first.cuda(), second)
    assert bool((first.cuda() == second).all())
    second[70_001] = second[70_000] == 0
    second[70_002] = 1 if float(first[70_002]) == 0 else 0
    assert not torch.equal(first.cuda(), second)


@pytest.mark.parametrize("dtype", [*FLOATING, *WHOLE], ids=str)
def test_arange(dtype: torch.dtype) -> None:
    check(lambda like: torch.arange(3, 100, 7, dtype=dtype, device=like.device), numbers(1, dtype))
    check(lambda like: torch.arange(50, dtype=dtype, device=like.device), numbers(1, dtype))


def test_captured_graph() -> None:
    tensor = torch.full((1001,), 1.0, device="cuda")
    result = torch.zeros(1001, dtype=torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensor.mul_(2).add_(1)
        result.copy_(tensor)
    assert tensor.cpu().eq(1).all(), "a capture does nothing yet"
    for _ in range(3):
        graph.replay()
    assert tensor.cpu().eq(15).all()
    assert result.cpu().eq(15).all()


def test_streams_keep_their_order() -> None:
    tensor = torch.zeros(100_003, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(20):
            tensor.add_(1).mul_(2)
    stream.synchronize()
    assert tensor.cpu().eq(2**21 - 2).all()


def test_other_kernels_are_errors_that_name_the_kernel() -> None:
    output = run_program(
        "import os, torch\n"
        "os.dup2(1, 2)\n"
        "tensor = torch.ones(4, device='cuda')\n"
        "try:\n"
        "    torch.exp(tensor)\n"
        "except RuntimeError as error:\n"
        "    print('raised', error)\n"
        "print('then', (tensor + 1).cpu().tolist())\n"
    )
    assert "raised CUDA error: operation not supported" in output
    assert "exp_kernel_cuda" in output.partition("raised")[0]
    assert "then [2.0, 2.0, 2.0, 2.0]" in output, "such an error is not sticky"


def test_paused_memory_is_an_illegal_access() -> None:
    output = run_program(
        "import torch\n"
        "from torch_memory_saver import torch_memory_saver as saver\n"
        "with saver.region():\n"
        "    tensor = torch.ones(1 << 20, device='cuda')\n"
        "assert tensor.add_(1).sum().item() == 2 << 20\n"
        "saver.pause()\n"
        "try:\n"
        "    tensor.add_(1)\n"
        "    torch.cuda.synchronize()\n"
        "except RuntimeError as error:\n"
        "    print(error)\n"
    )
    assert "an illegal memory access was encountered" in output


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_random_floats(dtype: torch.dtype) -> None:
    """Other numbers than a device's, of the same distribution, that follow from the seed."""
    torch.cuda.manual_seed(3)
    normal = torch.randn(100_000, dtype=dtype, device="cuda").cpu().double()
    uniform = torch.empty(100_000, dtype=dtype, device="cuda").uniform_(-3, 1).cpu().double()
    assert abs(normal.mean()) < 0.02
    assert abs(normal.std() - 1) < 0.02
    assert uniform.min() >= -3
    assert uniform.max() <= 1
    assert abs(uniform.mean() + 1) < 0.02
    other = torch.randn(100_000, dtype=dtype, device="cuda").cpu().double()
    torch.cuda.manual_seed(3)
    again = torch.randn(100_000, dtype=dtype, device="cuda").cpu().double()
    assert torch.equal(again, normal)
    assert not torch.equal(again, other)


@pytest.mark.parametrize("dtype", WHOLE, ids=str)
def test_random_whole_numbers(dtype: torch.dtype) -> None:
    values = torch.randint(2, 9, (10_000,), dtype=dtype, device="cuda").cpu()
    assert values.unique().tolist() == list(range(2, 9))
    values = torch.empty(10_000, dtype=dtype, device="cuda").random_().cpu()
    assert values.min() >= 0
    assert values.unique().numel() > 100
