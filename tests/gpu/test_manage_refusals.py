"""Guards what manage() refuses by name, before it moves anything."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from gpu_programs import Program
from gpu_support import MIB, STARTED_PRELOADED, empty, errors, saver, tensor_at, torch

TAG = "managed"


def refused(what: Any, match: str, kind: type[Exception] | None = None) -> None:
    """Checks that a call is refused, and that it has not moved what comes before."""
    beside = torch.ones(MIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(kind or errors.InvalidArgumentError, match=match) as caught:
        saver.manage([beside, what], tag=TAG)
    assert str(caught.value).startswith("manage")
    assert saver.tag_of(beside) is None


def weight(*shape: int) -> Any:
    return torch.nn.Parameter(torch.ones(*shape or (16, 16), device="cuda"))


# -- what is no tensor with memory of its own --------------------------------------------------------------------------


@pytest.mark.parametrize("what", [3, "weights", {"a": 1}, None], ids=repr)
def test_objects_of_another_kind(what: Any) -> None:
    refused(what, "needs tensors, modules, optimizers or iterables of them")
    with pytest.raises(errors.InvalidArgumentError, match="not str: pass a name as tag=, and of a dict its values"):
        (saver.manage if what == 3 else saver.preserve)("weights")


def test_bad_options() -> None:
    tensor = empty(MIB)
    for options in ({"tag": ""}, {"backup": "tape"}):
        with pytest.raises(errors.InvalidArgumentError):
            saver.manage(tensor, **options)
    assert saver.tag_of(tensor) is None


def test_tensors_on_the_cpu() -> None:
    refused(torch.ones(3), r"a tensor of shape \(3,\) is on device cpu")
    refused(torch.ones(3).pin_memory(), "is on device cpu")
    refused(torch.empty(3, device="meta"), "is on device meta")
    refused(torch.nn.Linear(2, 2), "every tensor of Linear is on device cpu")


def test_a_tensor_that_only_seems_to_be_on_the_device() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    fake = FakeTensorMode().from_tensor(torch.ones(3, device="cuda"))
    refused(fake, "is a FakeTensor without memory")


def test_tensors_without_a_storage_of_their_own() -> None:
    class Wrapper(torch.Tensor):
        """A subclass that does not say what it is made of."""

        @staticmethod
        def __new__(cls, inner: Any) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

        @classmethod
        def __torch_dispatch__(cls, *_: Any) -> Any:
            raise NotImplementedError

    refused(Wrapper(torch.ones(3, device="cuda")), r"a tensor of shape \(3,\) has no storage of its own")
    refused(torch.nn.LazyLinear(3, device="cuda"), "LazyLinear.weight has no storage of its own")


def test_tensors_that_are_no_leaves() -> None:
    product = weight() * 2
    refused(product, "is not a leaf: MulBackward0 has made it")
    model = torch.nn.Module()
    model.register_buffer("made", product)
    refused(model, "Module.made is not a leaf")
    assert saver.manage(product.detach(), tag=TAG).moved_bytes == 16 * 16 * 4


# -- saved for a backward ----------------------------------------------------------------------------------------------


def function(x: Any, y: Any) -> Any:
    """A function of the program that saves its arguments."""

    class Keeping(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, y: Any) -> Any:
            ctx.save_for_backward(x, y)
            return x * y

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> tuple[Any, Any]:
            x, y = ctx.saved_tensors
            return gradient * y, gradient * x

    return Keeping.apply(x, y)


def packed(x: Any, y: Any) -> Any:
    """Return a product whose arguments a hook has packed in tuples. Unpacking them is an error."""

    def unpack(_: Any) -> Any:
        raise AssertionError("manage() must not unpack")

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: ("packed", tensor), unpack):
        return x * y


SAVING: dict[str, Callable[[Any, Any], Any]] = {
    "product": lambda x, y: x * y,
    "matmul": lambda x, y: x @ y,
    "view": lambda x, y: torch.nn.functional.linear(x, y),
    "function": function,
    "deep": lambda x, y: ((x * y) + 1).relu().sum(),
    "list": lambda x, y: torch.einsum("ij,jk->ik", x, y),
    "hooks": packed,
}


@pytest.fixture
def shows_saved_tensors() -> None:
    if not hasattr(torch._C._autograd.SavedTensor, "data"):
        pytest.skip(f"PyTorch {torch.__version__} does not show saved tensors")


@pytest.mark.usefixtures("shows_saved_tensors")
@pytest.mark.parametrize("compute", SAVING.values(), ids=SAVING)
def test_a_tensor_that_is_saved_for_a_backward(compute: Callable[[Any, Any], Any]) -> None:
    parameter = weight()
    result = compute(torch.rand(16, 16, device="cuda", requires_grad=True), parameter)
    refused(parameter, r"a tensor of shape \(16, 16\) is saved for a backward", errors.InvalidStateError)
    refused(parameter.data[3:5], "is saved for a backward", errors.InvalidStateError)
    node = result.grad_fn
    del result
    if compute is not function:  # whose node ends with its result
        refused(parameter, "is saved for a backward", errors.InvalidStateError)
    del node
    gc.collect()
    assert saver.manage(parameter, tag=TAG).moved_bytes == 16 * 16 * 4


@pytest.mark.usefixtures("shows_saved_tensors")
def test_the_error_names_the_parameter_and_the_node() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)).cuda()
    model(torch.rand(4, 8, device="cuda")).sum()
    saver.manage(model[0], tag=TAG)  # nothing is alive that refers to the graph
    result = model(torch.rand(4, 8, device="cuda")).sum()
    refused(
        model[1],
        r"BatchNorm1d.(weight|running_mean) is saved for a backward \(\w+BatchNormBackward0\)",
        errors.InvalidStateError,
    )
    result.backward()
    assert saver.manage(model, tag=TAG).moved_bytes > 0, "the result lives on, but its backward has run"


@pytest.mark.usefixtures("shows_saved_tensors")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm"])
def test_the_error_names_the_attribute_of_a_module_that_holds_the_result(norm: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()).cuda()
    getattr(torch.nn.utils, norm)(model[0])
    inputs = torch.rand(4, 8, device="cuda")
    model(inputs)
    refused(
        model,
        r"Sequential.0.weight_\w+ is saved .*: attribute Sequential.0.weight holds the result: delete that attribute",
        errors.InvalidStateError,
    )
    result = model(inputs)
    del model[0].weight
    refused(model, "call manage\\(\\) after that backward", errors.InvalidStateError)
    expected = result.detach().clone()
    del result
    assert saver.manage(model, tag=TAG).moved_bytes > 0
    with torch.no_grad():
        model.eval()
        assert torch.allclose(model(inputs), expected)


def test_a_saved_tensor_that_is_not_found_keeps_its_contents() -> None:
    class Hidden:
        """The object in which a hook packs a tensor."""

        def __init__(self, tensor: Any) -> None:
            self.tensor = tensor

    parameter, other = weight(), torch.rand(16, 16, device="cuda", requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(Hidden, lambda hidden: hidden.tensor):
        result = (parameter * other).sum()
    address = parameter.data_ptr()
    assert saver.manage(parameter, tag=TAG).moved_bytes > 0
    assert parameter.data_ptr() != address
    result.backward()
    assert torch.equal(other.grad, parameter.detach())
    assert torch.equal(parameter.grad, other.detach())


def test_what_no_backward_needs_may_move_while_a_graph_lives() -> None:
    used, unused = weight(), weight()
    result = used * 2 + unused
    assert saver.manage([used, unused], tag=TAG).moved_bytes == 2 * 16 * 16 * 4, "a product with a number saves nothing"
    result.sum().backward()
    assert bool((used.grad == 2).all())


# -- memory of others --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ours", [False, True], ids=["torch.cuda.graph", "cuda_graph"])
def test_memory_of_a_captured_graph(ours: bool) -> None:
    graph = torch.cuda.CUDAGraph()
    with saver.cuda_graph(graph, tag="graph") if ours else torch.cuda.graph(graph):
        output = torch.ones(MIB, dtype=torch.uint8, device="cuda")
    refused(output, "has memory of pool .*, which captured graphs or a MemPool of the program may use")
    del graph, output


def test_memory_of_a_pool_of_the_program() -> None:
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        tensor = empty(MIB)
    refused(tensor, "a MemPool of the program")
    del tensor, pool


def test_a_graph_in_the_pool_of_a_region() -> None:
    with saver.region(tag="region"):
        tensor = empty(MIB)
    (row,) = [row for row in torch.cuda.memory_snapshot() if any(b["address"] == tensor.data_ptr() for b in row["blocks"])]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=tuple(row["segment_pool_id"])):
        output = torch.ones(MIB, dtype=torch.uint8, device="cuda")
    refused(output, "captured graphs")
    del graph, output, tensor


def test_ordinary_memory_of_disable_and_of_other_tags_may_move() -> None:
    with saver.region(tag="region"):
        managed = empty(MIB)
        with saver.disable():
            ordinary = empty(MIB)
    assert saver.manage([managed, ordinary], tag=TAG).moved_bytes == 2 * MIB


def test_a_warning_of_graphs_that_may_have_the_old_addresses(caplog: pytest.LogCaptureFixture) -> None:
    tensor = torch.ones(MIB, dtype=torch.uint8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensor.add_(1)
    saver.manage(tensor, tag=TAG)
    assert sum("Capture such graphs again" in record.message for record in caplog.records) == 1
    del graph


def test_memory_that_pytorch_has_not_made() -> None:
    whole = torch.ones(MIB, dtype=torch.uint8, device="cuda")
    refused(tensor_at(whole.data_ptr(), 4096), "has memory that PyTorch's CUDA allocator has not made")
    refused(torch.from_dlpack(whole), "has memory that PyTorch's CUDA allocator has not made")
    assert saver.manage(whole.clone(), tag=TAG).moved_bytes == MIB


@pytest.mark.usefixtures("shared_device")
def test_memory_of_another_process() -> None:
    sender = Program("exporter.py", ("11",), preload=STARTED_PRELOADED).start(pipes=True)
    assert sender.stdin is not None and sender.stdout is not None
    imported = pickle.loads(bytes.fromhex(sender.stdout.readline()))
    refused(imported, r"is memory of another process \(CUDA IPC\)")
    assert saver.manage(imported.clone(), tag=TAG).moved_bytes == 4 * MIB
    del imported
    gc.collect()
    sender.stdin.close()
    sender.wait(timeout=60)


def test_paused_memory_of_another_tag() -> None:
    with saver.region(tag="paused"):
        tensor = empty(MIB)
    saver.pause("paused")
    refused(tensor, "is paused with tag 'paused': resume that tag first", errors.InvalidStateError)
    saver.resume("paused")
    assert saver.manage(tensor, tag=TAG).moved_bytes == MIB


def test_state_of_an_optimizer_that_is_followed_with_another_tag() -> None:
    parameter = weight()
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter])
    handle = saver.manage(optimizer, tag="followed")
    optimizer.step()
    state = [tensor for tensor in optimizer.state[parameter].values() if tensor.is_cuda]
    refused(state, r"a tensor of shape \(16, 16\) is state of AdamW, whose steps move it to memory with tag 'followed'")
    assert {saver.tag_of(tensor) for tensor in state} == {"followed"}
    assert saver.manage(state, tag="followed").moved_bytes == 0
    last = saver.manage([state, optimizer], tag=TAG)
    assert last.moved_bytes == 2 * 16 * 16 * 4
    handle.remove()  # which the last call has replaced
    with pytest.raises(errors.InvalidArgumentError, match="is state of AdamW"):
        saver.manage(state, tag="other")
    last.remove()
    assert saver.manage(state, tag="other").moved_bytes == 2 * 16 * 16 * 4


def test_while_a_capture_is_active() -> None:
    tensor = empty(MIB)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        refused(tensor, "a stream capture is active", errors.CaptureInProgressError)
        tensor.add_(1)
    graph.replay()
    torch.cuda.synchronize()
    del graph
