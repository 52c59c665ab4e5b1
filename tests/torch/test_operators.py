"""Guards PyTorch's operators on the simulated GPU: values, types, shapes and refusals are those of PyTorch elsewhere."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

ANOTHER_DEVICE = "Expected all tensors to be on the same device, but"
OVERLAP = "unsupported operation: "


def outcome(function: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor | str:
    """The return value of a function, or the class and beginning of its exception."""
    try:
        return function(*arguments).cpu()
    except RuntimeError as error:
        return type(error).__mro__[-4].__name__  # both refuse; the words of an implementation may differ


def assert_same(found: torch.Tensor | str, expected: torch.Tensor | str, what: Any) -> None:
    if isinstance(found, str) or isinstance(expected, str):
        assert isinstance(found, str) and isinstance(expected, str), (what, found, expected)
        return
    assert found.dtype == expected.dtype, what
    torch.testing.assert_close(found, expected, equal_nan=True, msg=lambda text: f"{what}: {text}")


def test_a_tensor_can_be_printed_and_looked_at() -> None:
    tensor = torch.tensor([0.0, 3.5, 0.0, 4.0], device="cuda")
    assert str(tensor) == "tensor([0.0000, 3.5000, 0.0000, 4.0000], device='cuda:0')"
    assert tensor[1].item() == 3.5
    assert tensor.nonzero().flatten().tolist() == [1, 3]
    assert tensor.masked_select(tensor > 0).tolist() == [3.5, 4.0]
    assert bool((tensor == tensor).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.int64, torch.bool, torch.complex128])
@pytest.mark.parametrize("number", [0.1, 3, True, 0.25j])
def test_a_number_can_be_copied_to_a_tensor(number: complex, dtype: torch.dtype) -> None:
    wanted = torch.zeros(2, 3, dtype=dtype)
    found = wanted.cuda()
    if isinstance(number, complex) and not dtype.is_complex:
        pytest.skip("PyTorch warns that it discards the imaginary part")
    wanted.t().copy_(number)
    assert found.t().copy_(number, non_blocking=True).data_ptr() == found.data_ptr()
    assert torch.equal(found.cpu(), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_copy_between_devices_changes_type_and_order(dtype: torch.dtype) -> None:
    source = torch.arange(6, device="cuda:1").view(2, 3)
    found = torch.zeros(3, 2, dtype=dtype, device="cuda:0")
    found.t().copy_(source)
    assert torch.equal(found.cpu(), source.cpu().t().to(dtype))
    assert torch.equal(source[:, ::2].to("cuda:0", dtype).cpu(), source.cpu()[:, ::2].to(dtype))
    found.copy_(source[0, :2])  # which is broadcast
    assert found.tolist() == [[0, 1]] * 3


def test_a_tensor_can_be_copied_to_itself() -> None:
    values = torch.arange(6.0, device="cuda")
    assert values.copy_(values.view(6)) is values
    assert values.view(2, 3).t().copy_(values.view(2, 3).t()).flatten().tolist() == [0, 3, 1, 4, 2, 5]
    with pytest.raises(RuntimeError, match=OVERLAP):
        values.view(2, 3).t().copy_(values.view(3, 2))
    assert values.tolist() == [0, 1, 2, 3, 4, 5]


def test_outputs_are_written_to_the_given_tensors() -> None:
    ones = torch.ones(6, device="cuda")
    right = torch.empty(6, device="cuda")
    assert torch.add(ones, ones, out=right) is right
    strided = torch.zeros(6, 2, device="cuda")
    torch.add(ones, ones, out=strided[:, 0])
    indices = torch.empty(0, dtype=torch.int64, device="cuda")
    torch.nonzero(ones, out=indices)
    assert right.tolist() == [2.0] * 6
    assert strided.tolist() == [[2.0, 0.0]] * 6
    assert indices.flatten().tolist() == list(range(6))


def test_an_output_of_the_wrong_size_is_resized_with_one_warning() -> None:
    ones, wrong = torch.ones(6, device="cuda"), torch.empty(3, device="cuda")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.add(ones, ones, out=wrong)
    assert wrong.tolist() == [2.0] * 6
    (warning,) = caught
    assert str(warning.message).startswith("An output with one or more elements was resized since it had shape [3]")
    assert warning.filename == __file__


def test_factories_make_tensors_on_the_device_that_is_named() -> None:
    factories: list[Callable[..., torch.Tensor]] = [
        lambda **where: torch.arange(5, **where),
        lambda **where: torch.full((5,), 2, **where),
        lambda **where: torch.linspace(0, 1, 5, **where),
        lambda **where: torch.eye(3, **where),
        lambda **where: torch.tril_indices(3, 3, **where),
        lambda **where: torch.rand(5, **where),
        lambda **where: torch.randperm(5, **where),
    ]
    for place, factory in enumerate(factories):
        with torch.cuda.device(0), torch.cuda.stream(torch.cuda.Stream(0)):
            made = factory(device="cuda:1")
            torch.cuda.synchronize(1)
        with torch.cuda.stream(stream := torch.cuda.Stream(1)):
            again = factory(device="cuda")
        stream.synchronize()
        assert made.device == again.device == torch.device("cuda:1"), place
        if place < 5:
            assert_same(made.cpu(), factory(device="cpu"), place)
            assert_same(again.cpu(), made.cpu(), place)


@pytest.mark.parametrize("other", ["cpu", "cuda:1"])
def test_tensors_of_two_devices_are_refused(other: str) -> None:
    here, there = torch.ones(3, device="cuda:0"), torch.ones(3, device=other)
    calls: list[Callable[[], Any]] = [
        lambda: here + there,
        lambda: there + here,
        lambda: here.add_(there),
        lambda: torch.mm(here[None], there[:, None]),
        lambda: torch.where(here > 0, here, there),
        lambda: functional.linear(here, torch.ones(3, 3, device=other)),
        lambda: torch.add(here, here, out=there),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=ANOTHER_DEVICE):
            call()
    assert (here + 1).tolist() == [2.0] * 3  # the device is as before


def test_indices_of_the_host_are_taken() -> None:
    tensor = torch.arange(5.0, device="cuda")
    indices = torch.tensor([3, 1])
    assert tensor[indices].tolist() == [3.0, 1.0]
    tensor[indices] = 0.0
    assert tensor.tolist() == [0.0, 0.0, 2.0, 0.0, 4.0]


NUMBERS: list[Any] = [
    True,
    2,
    2.5,
    2j,
    *[torch.tensor(2, dtype=each) for each in (torch.float32, torch.float64, torch.int64)],
]
FUNCTIONS: list[Callable[..., torch.Tensor]] = [
    torch.add,
    torch.div,
    torch.pow,
    torch.eq,
    torch.lt,
    torch.remainder,
    lambda tensor, number: torch.where(tensor == 0, tensor, number),
    lambda tensor, number: number - tensor,
    lambda tensor, number: torch.lerp(tensor, tensor, number),
    lambda tensor, number: torch.fmod(tensor, number),
    lambda tensor, number: tensor.clone().add_(number),
]


@pytest.mark.parametrize("dtype", [torch.int32, torch.float16, torch.bfloat16, torch.float64, torch.bool, torch.complex64])
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_numbers_are_promoted_or_refused_as_on_the_cpu(dtype: torch.dtype) -> None:
    there = torch.ones(3, dtype=dtype)
    here = there.cuda()
    for place, function in enumerate(FUNCTIONS):
        for number in NUMBERS:
            assert_same(outcome(function, here, number), outcome(function, there, number), (place, number))
    torch.cuda.synchronize()


def test_types_are_converted() -> None:
    numbers = torch.tensor([0.0, -0.0, 1.0, 3.3, -448.0, 1e-3])
    narrow = [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16]
    for dtype in (*narrow, torch.complex64, torch.complex128, torch.int8, torch.float64):
        here, there = numbers.cuda().to(dtype), numbers.to(dtype)
        wide = torch.complex128 if dtype.is_complex else torch.float64
        assert here.dtype == dtype
        assert_same(here.to(wide).cpu(), there.to(wide), dtype)
        assert str(here).startswith("tensor(")


def test_lazy_views_are_resolved() -> None:
    there = torch.tensor([1 + 2j, 3 - 1j])
    here = there.cuda()
    for function in (
        lambda each: each.conj() + 1,
        lambda each: each.conj().imag * 2,
        lambda each: each.conj().clone().mul_(2j),
        lambda each: torch.vdot(each, each),
        lambda each: each[None].conj() @ each,
    ):
        assert_same(outcome(function, here), outcome(function, there), function)
    here.conj().mul_(2j)
    there.conj().mul_(2j)
    assert_same(here.cpu(), there, "written through a view")
    assert here.conj().tolist() == there.conj().tolist()


def test_overlapping_memory_is_refused_at_the_call() -> None:
    functions: list[Callable[[torch.Tensor], Any]] = [
        lambda each: each[1:].add_(each[:-1]),
        lambda each: each.expand(3, 5).add_(1),
        lambda each: torch.add(each[1:], 1, out=each[:-1]),
    ]
    for function in functions:
        for device in ("cpu", "cuda"):
            with pytest.raises(RuntimeError, match=OVERLAP):
                function(torch.zeros(5, device=device))
    tensor = torch.zeros(5, device="cuda")
    assert tensor.add_(tensor).tolist() == [0.0] * 5  # the whole of it is no partial overlap


def test_an_operator_without_a_cpu_implementation_is_refused_at_the_call() -> None:
    query = torch.ones(1, 2, 4, 8, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(
        NotImplementedError, match=r"aten::_scaled_dot_product_flash_attention has no CPU implementation.*GPU"
    ):
        torch.ops.aten._scaled_dot_product_flash_attention(query, query, query)
    torch.cuda.synchronize()
    assert query.sum().item() == 64  # the device continues


def test_an_operator_without_a_cpu_implementation_may_be_decomposed() -> None:
    first, second = (
        torch.ones(2, 3, device="cuda", dtype=torch.bfloat16),
        torch.ones(3, 2, device="cuda", dtype=torch.bfloat16),
    )
    bias = torch.ones(2, device="cuda")
    assert torch.ops.aten._fused_dropout(bias, 1.0)[0].tolist() == [1.0, 1.0]
    if "dtype" in torch.ops.aten.mm.overloads():  # PyTorch 2.8 and later
        assert torch.ops.aten.mm.dtype(first, second, torch.float32).tolist() == [[3.0, 3.0]] * 2
        assert torch.ops.aten.addmm.dtype(bias, first, second, torch.float32).tolist() == [[4.0, 4.0]] * 2


def gradients(module: nn.Module, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The output, its sum's gradients, and the buffers."""
    inputs = [each.detach().requires_grad_(each.is_floating_point()) for each in inputs]
    output = module(*inputs)
    output = output if isinstance(output, torch.Tensor) else output[0]
    output.square().sum().backward()
    found = [output, *[each.grad for each in (*inputs, *module.parameters())], *module.buffers()]
    return [each.detach().cpu() for each in found if each is not None]


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "lstm": (lambda: nn.LSTM(3, 4, 2), (5, 2, 3)),
    "lstm without bias": (lambda: nn.LSTM(3, 4, bias=False, bidirectional=True), (5, 2, 3)),
    "gru": (lambda: nn.GRU(3, 4, 2, bidirectional=True), (5, 2, 3)),
    "gru without bias": (lambda: nn.GRU(3, 4, bias=False), (5, 2, 3)),
    "conv1d": (lambda: nn.Conv1d(3, 4, 3), (2, 3, 8)),
    "conv2d": (lambda: nn.Conv2d(4, 4, 3, padding=1, stride=2, groups=2), (2, 4, 8, 8)),
    "conv3d": (lambda: nn.Conv3d(3, 4, 3), (2, 3, 5, 5, 5)),
    "transposed": (lambda: nn.ConvTranspose2d(3, 4, 3), (2, 3, 5, 5)),
    "batch_norm": (lambda: nn.BatchNorm2d(3), (2, 3, 5, 5)),
    "batch_norm, eval": (lambda: nn.BatchNorm2d(3).eval(), (2, 3, 5, 5)),
    "layer_norm": (lambda: nn.LayerNorm(5), (2, 3, 5)),
    "max_pool": (lambda: nn.MaxPool2d(2), (2, 3, 4, 4)),
    "transformer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (2, 5, 8)),
    "embedding": (lambda: nn.Embedding(10, 3), ()),
    "embedding_bag": (lambda: nn.EmbeddingBag(10, 3), ()),
    "embedding_bag, max": (lambda: nn.EmbeddingBag(10, 3, mode="max"), ()),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_compute_and_learn_as_on_the_cpu(name: str) -> None:
    torch.manual_seed(0)
    make, shape = MODULES[name]
    module = make()
    inputs = [torch.randn(shape) if shape else torch.randint(0, 9, (4, 5))]
    expected = gradients(copy.deepcopy(module), inputs)
    found = gradients(module.cuda(), [each.cuda() for each in inputs])
    torch.testing.assert_close(found, expected)


ATTENTION: list[dict[str, Any]] = [
    {},
    {"is_causal": True},
    {"attn_mask": torch.ones(6, 6, dtype=torch.bool).tril()},
    {"attn_mask": torch.linspace(-1, 1, 36).reshape(6, 6)},
]


@pytest.mark.parametrize("options", ATTENTION, ids=["plain", "causal", "boolean mask", "added mask"])
def test_attention_computes_and_learns_as_on_the_cpu(options: dict[str, Any]) -> None:
    class Attention(nn.Module):
        def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
            there = {name: value.to(inputs[0].device) if name == "attn_mask" else value for name, value in options.items()}
            return functional.scaled_dot_product_attention(*inputs, **there)

    torch.manual_seed(0)
    inputs = [torch.randn(2, 4, 6, 8) for _ in range(3)]
    torch.testing.assert_close(gradients(Attention(), [each.cuda() for each in inputs]), gradients(Attention(), inputs))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("loss", [functional.mse_loss, functional.smooth_l1_loss, functional.huber_loss, functional.l1_loss])
def test_losses_have_the_requested_shape(loss: Callable[..., torch.Tensor], reduction: str) -> None:
    values = torch.linspace(-2, 2, 12).reshape(4, 3)
    expected = loss(values, torch.ones(4, 3), reduction=reduction)
    found = loss(values.cuda(), torch.ones(4, 3, device="cuda"), reduction=reduction)
    torch.cuda.synchronize()
    assert_same(found.cpu(), expected, loss)


def test_tensors_are_exchanged_without_a_copy() -> None:
    tensor = torch.arange(5, device="cuda")
    torch.from_dlpack(tensor).add_(1)
    assert tensor.tolist() == [1, 2, 3, 4, 5]
    interface = tensor.__cuda_array_interface__
    assert (interface["data"][0], interface["shape"]) == (tensor.data_ptr(), (5,))


def test_pinned_memory_is_copied_in_the_order_of_the_stream() -> None:
    source = torch.arange(1000.0).pin_memory()
    target = torch.zeros(1000).pin_memory()
    target.copy_(source.to("cuda", non_blocking=True).mul_(2), non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(target, source * 2)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_functions(backend: str) -> None:
    def function(tensor: torch.Tensor) -> torch.Tensor:
        return functional.gelu(tensor @ tensor).softmax(-1)

    there = torch.randn(4, 4, requires_grad=True)
    here = there.detach().cuda().requires_grad_()
    function(there)[0].sum().backward()
    output = torch.compile(function, backend=backend)(here)
    output[0].sum().backward()
    torch.testing.assert_close(output.cpu(), function(there))
    assert here.grad is not None
    torch.testing.assert_close(here.grad.cpu(), there.grad)


def test_operators_do_not_import_the_compiler() -> None:
    """It takes a second. After a program has imported it, operators called by compiled code are kept out of it as always."""
    program = """
import sys, torch
tensor = torch.ones(4, device="cuda")
assert (tensor + tensor).cpu().tolist() == [2.0] * 4
print(sorted(each for each in ("torch._dynamo", "torch._inductor") if each in sys.modules))
compiled = torch.compile(lambda each: torch.nn.functional.gelu(each + 1), backend="aot_eager")
assert torch.allclose(compiled(tensor).cpu(), torch.nn.functional.gelu(torch.full((4,), 2.0)))
assert (tensor + tensor).cpu().tolist() == [2.0] * 4
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (0, "[]\nTrue\n"), done.stderr
